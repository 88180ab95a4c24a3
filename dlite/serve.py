"""`dlite serve`: a vLLM server with our drafters, and the exact command that starts it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlite import vllm_plugin
from dlite.vllm_plugin.command import MIDDLEWARE, engine_arguments

SERVER = "vllm.entrypoints.openai.api_server"  # what `vllm serve` runs; the CPU build lacks that
MODEL_NEEDED = ("dlite", "hybrid")


def command(
    target: str,
    drafters: Sequence[str],
    draft: str | None,
    *,
    num_draft: int,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    tenants: bool = True,
    others: Sequence[str] = (),
) -> list[str]:
    """vLLM's command line; `others` are flags of its own. Raises ValueError for what can't go."""
    needing = [name for name in drafters if name in MODEL_NEEDED]
    if needing and draft is None:
        raise ValueError(f"drafter {needing[0]} needs a draft model; give --draft DIR")
    arguments = engine_arguments(drafters, draft, num_draft, settings)
    line = [sys.executable, "-m", SERVER, "--model", target]
    line += ["--worker-cls", arguments["worker_cls"]]
    line += ["--speculative-config", json.dumps(arguments["speculative_config"])]
    line += ["--additional-config", json.dumps(arguments["additional_config"])]
    if tenants:
        line += ["--middleware", MIDDLEWARE]
    return [*line, *others]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="folder, hub id, .gguf, smollm2-135m")
    parser.add_argument(
        "--drafter",
        help="one, or several by commas: the first serves requests that name none "
        "(default: dlite with --draft, else ngram)",
    )
    parser.add_argument("--draft", metavar="DIR", help="draft model: folder or hub id")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="DRAFTER.KEY=VALUE",
        help="of one of the drafters, such as agspec.corpus=DIR",
    )
    parser.add_argument("--num-draft", type=int, help="default: as trained, 7 without --draft")
    parser.add_argument(
        "--tenants",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a tenant per API key, headers and references, by our middleware",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--dry-run",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="only print the command",
    )


def main(args: argparse.Namespace) -> None:
    """`args.others`: flags that are vLLM's."""
    from dlite import checkpoint

    num_draft = args.num_draft
    if num_draft is None:
        num_draft = checkpoint.read(args.draft).config.num_draft_tokens if args.draft else 7
    drafters = (args.drafter or ("dlite" if args.draft else "ngram")).split(",")
    others = ["--host", args.host, "--port", str(args.port), *args.others]
    line = command(
        args.target if args.dry_run else servable(args.target),
        drafters,
        args.draft,
        num_draft=num_draft,
        settings=_settings(args.option, drafters),
        tenants=args.tenants,
        others=others,
    )
    if args.dry_run:
        print(shlex.join(line))
    elif code := serve(line, host=args.host, port=args.port):
        raise ValueError(f"the server ended with exit code {code}; its own lines above say why")


def _settings(options: Sequence[str], drafters: Sequence[str]) -> dict[str, dict[str, Any]]:
    from dlite.config import split

    settings: dict[str, dict[str, Any]] = {}
    for key, value in split(options).items():
        name, _, own = key.partition(".")
        if name not in drafters or not own:
            raise ValueError(f"--option {key}: write DRAFTER.KEY=VALUE, of {', '.join(drafters)}")
        settings.setdefault(name, {})[own] = value
    return settings


def servable(target: str, cache: Path | None = None) -> str:
    """A name that vLLM can load: GGUF weights are written out as safetensors once."""
    from dlite.loading import locate

    folder, gguf = locate(target)
    if gguf is None:
        return folder
    out = (cache or cache_folder() / "targets") / Path(gguf).stem
    if not (out / "model.safetensors").is_file():
        from dlite.loading import load_model, save_model

        save_model(*load_model(target, dtype="float32", device="cpu", revision=None), out)
    return str(out)


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dlite"


def serve(line: Sequence[str], *, host: str = "127.0.0.1", port: int = 8000) -> int:
    """Runs the server until it ends or is interrupted; says when it answers. Its exit code.

    Raises ValueError where the installed vLLM is not one that the plugin was tested with.
    """
    vllm_plugin.check_version()
    print(f"dlite: {shlex.join(line)}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="dlite-metrics-") as metrics:
        server = subprocess.Popen(line, env=environment(metrics))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: server.send_signal(number))
        url = f"http://{host}:{port}"
        threading.Thread(target=_announce, args=(server, url), daemon=True).start()
        return server.wait()


def environment(metrics: str) -> dict[str, str]:
    """Ours and, in the folder `metrics`, counters that the workers share with the server."""
    return {**os.environ, "PROMETHEUS_MULTIPROC_DIR": metrics}


def _announce(server: subprocess.Popen[bytes], url: str) -> None:
    while server.poll() is None:
        if healthy(url):
            print(f"dlite: ready: {url}/v1, metrics at {url}/metrics", file=sys.stderr, flush=True)
            return
        time.sleep(1.0)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
