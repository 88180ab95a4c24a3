"""The command line: `dlite generate`, `serve`, `inspect`, `export`, `corpus`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dlite.drafters.registry import DRAFTERS

if TYPE_CHECKING:
    from dlite.target import TargetModel
    from dlite.types import Request


TO = ("dlite", "authors", "z-lab", "deepspec", "speculators", "vllm", "sglang")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. An error is one line on stderr and exit code 2; `--debug` shows where."""
    root = parser()
    args, args.others = root.parse_known_args(argv)
    if args.others and args.run is not _serve:
        root.error(f"unrecognized arguments: {' '.join(args.others)}")
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _say(f"warning: {message}")
        try:
            args.run(args)
        except (ValueError, OSError) as error:
            if args.debug:
                raise
            _say(f"error: {' '.join(str(error).split())}")
            return 2
        except KeyboardInterrupt:
            return 130
    return 0


def _say(line: str) -> None:
    print(f"dlite: {line}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"dlite: error: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    root = _Parser(prog="dlite", description=__doc__, allow_abbrev=False)
    commands = root.add_subparsers(metavar="COMMAND", required=True)

    generate = _command(commands, "generate", _generate, "stream the target's answer to a prompt")
    generate.add_argument("target", metavar="TARGET", help="folder, hub id, .gguf, smollm2-135m")
    generate.add_argument("--draft", metavar="DIR", help="draft model: folder or hub id")
    generate.add_argument(
        "--drafter",
        choices=(*DRAFTERS, "none"),
        help="default: dlite with --draft, else ngram; hybrid plans over retrieval and --draft",
    )
    generate.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="of the drafter"
    )
    generate.add_argument("--prompt", metavar="TEXT", help="default: read standard input")
    generate.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    generate.add_argument("--top-k", type=int, default=0, help="0: off (default)")
    generate.add_argument("--top-p", type=float, default=1.0, help="1: off (default)")
    generate.add_argument("--seed", type=int)
    generate.add_argument("--max-new-tokens", type=int, default=256)
    generate.add_argument(
        "--num-draft", type=int, help="default: as trained, 7 for ngram, 32 for hybrid"
    )
    generate.add_argument("--chat", **_flag(True), help="wrap the prompt in the chat template")
    generate.add_argument(
        "--template-kwargs", type=json.loads, metavar="JSON", help="default: as in training"
    )
    generate.add_argument("--strict", **_flag(False), help="refuse a target of other weights")
    generate.add_argument("--device", help="default: cuda where there is one, else cpu")
    generate.add_argument("--dtype", help="default: bfloat16 on cuda, float32 on cpu")

    from dlite import serve

    text = "serve a target with vLLM; flags that are not ours go to it"
    serve.add_arguments(_command(commands, "serve", _serve, text))

    inspect = _command(commands, "inspect", _inspect, "what a draft model or a target is")
    inspect.add_argument("name", metavar="DIR|TARGET")

    export = _command(commands, "export", _export, "write a draft model in another layout")
    export.add_argument("folder", metavar="DIR")
    export.add_argument("out", metavar="OUT", nargs="?")
    export.add_argument("--to", choices=TO, required=True)
    export.add_argument("--target", help="what an import was trained for: recorded, and compared")
    export.add_argument("--overwrite", **_flag(False), help="write into a folder that has files")

    corpus = _command(commands, "corpus", None, "static corpora for retrieval drafters")
    actions = corpus.add_subparsers(metavar="COMMAND", required=True)
    build = _command(actions, "build", _corpus_build, "index documents with their sources")
    build.add_argument("out", metavar="OUT")
    build.add_argument("paths", metavar="FILE|DIR", nargs="+", help="text, or .jsonl documents")
    build.add_argument("--tokenizer", metavar="TARGET", required=True)
    build.add_argument("--licence", default="", help="of documents that state none")
    show = _command(actions, "inspect", _corpus_inspect, "what a corpus holds, and where from")
    show.add_argument("folder", metavar="DIR")
    return root


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    command.add_argument("--debug", **_flag(False), help="show where an error arose")
    command.set_defaults(run=run)
    return command


def _flag(default: bool) -> dict[str, Any]:
    return {"action": argparse.BooleanOptionalAction, "default": default}


# ---- generate --------------------------------------------------------------------------------


def _generate(args: argparse.Namespace) -> None:
    from dlite import checkpoint
    from dlite.decode import decode
    from dlite.describe import run_line
    from dlite.drafters.registry import build
    from dlite.streaming import TextStream
    from dlite.types import Request, Sampling

    kind = args.drafter or ("dlite" if args.draft else "ngram")
    if args.draft is not None and kind not in ("dlite", "hybrid"):
        raise ValueError(f"--drafter {kind} has no use for --draft {args.draft}; leave one out")
    if kind == "dlite" and args.draft is None:
        raise ValueError("--drafter dlite needs a draft model; add --draft DIR")
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    trained = checkpoint.read(args.draft) if args.draft else None
    longest = trained.config.num_draft_tokens if trained and kind == "dlite" else None
    num_draft = _num_draft(args.num_draft, longest, 32 if kind == "hybrid" else 7)
    template_kwargs = args.template_kwargs
    if template_kwargs is None:
        template_kwargs = trained.template_kwargs if trained else {}
    elif trained and template_kwargs != trained.template_kwargs:
        warnings.warn(
            f"--template-kwargs {template_kwargs} differ from {trained.template_kwargs} in "
            "training; fewer drafts may be accepted",
            stacklevel=1,
        )
    prompt = args.prompt if args.prompt is not None else sys.stdin.read()
    if not prompt.strip():
        raise ValueError("the prompt is empty; give --prompt TEXT or write it to standard input")

    target = _load_target(args.target, args.device, args.dtype)
    options = _options(kind, args, num_draft)
    drafter = None if kind == "none" else build(kind, options, target=target)
    if args.chat:
        ids = target.render([{"role": "user", "content": prompt}], **template_kwargs)
    else:
        ids = target.tokenizer(prompt)["input_ids"]
    request = Request("generate", ids, args.max_new_tokens, target.eos_ids, sampling)
    stream = TextStream(target.tokenizer)

    def show(request: Request, tokens: list[int]) -> None:
        print(stream.push(t for t in tokens if t not in request.stop_ids), end="", flush=True)

    result = decode(target, [request], drafter, num_draft=num_draft, on_tokens=show)
    print(stream.flush(), flush=True)
    print(run_line(result, kind), file=sys.stderr)


def _num_draft(asked: int | None, trained: int | None, default: int) -> int:
    if asked is None:
        return trained or default
    if asked < 1:
        raise ValueError(f"--num-draft is {asked}; give at least 1, or --drafter none")
    if trained is not None and asked > trained:
        raise ValueError(f"--num-draft is {asked}; the draft model was trained for {trained}")
    return asked


def _load_target(name: str, device: str | None, dtype: str | None) -> TargetModel:
    import torch

    from dlite.target import TargetModel

    gpu = torch.cuda.is_available()
    device = device or ("cuda" if gpu else "cpu")
    if device.partition(":")[0] not in (("cpu", "cuda") if gpu else ("cpu",)):
        here = "cpu and cuda" if gpu else "only cpu: PyTorch sees no GPU"
        raise ValueError(f"--device is {device!r}, and this machine has {here}")
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    return TargetModel.load(name, dtype=dtype, device=device)


def _options(kind: str, args: argparse.Namespace, num_draft: int) -> dict[str, Any]:
    from dlite.config import split

    options: dict[str, Any] = {"num_draft": num_draft} if kind == "hybrid" else {}
    options |= split(args.option)
    if args.draft:
        options |= {"draft": args.draft, "strict": args.strict}
    return options


def _serve(args: argparse.Namespace) -> None:
    from dlite import serve

    serve.main(args)


# ---- inspect ---------------------------------------------------------------------------------


def _inspect(args: argparse.Namespace) -> None:
    from dlite import checkpoint, describe

    if checkpoint.is_checkpoint(args.name):
        lines = describe.draft_lines(args.name)
    else:
        lines = describe.target_lines(_load_target(args.name, "cpu", None))
    _print_table({**lines, **describe.environment_lines()})


def _print_table(lines: dict[str, Any]) -> None:
    width = max(map(len, lines))
    for key, value in lines.items():
        print(f"{key:<{width}}  {value}")


# ---- export ----------------------------------------------------------------------------------


def _export(args: argparse.Namespace) -> None:
    from dlite import checkpoint

    if args.to == "sglang":
        raise ValueError("there is no plugin for sglang; serve with vLLM: --to vllm")
    if args.to == "vllm":  # it reads the folder as it is
        print(_served_by(args.folder, args.target))
        return
    if args.out is None:
        raise ValueError(f"--to {args.to} writes a folder; name it: dlite export DIR OUT")
    out = Path(args.out)
    if not args.overwrite and out.exists() and (out.is_file() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not empty; choose another folder, or --overwrite")
    target = _load_target(args.target, "cpu", None) if args.target else None
    found = checkpoint.read(args.folder, target and target.num_layers)
    model = checkpoint.assemble(found, target, strict=True)
    dtype = model.norm.weight.dtype
    if args.to == "authors":
        checkpoint.export_authors(model, out, dtype=dtype)
    elif args.to == "dlite":
        target = target or found.target
        checkpoint.save(model, out, target=target, training=found.training, dtype=dtype)
    else:
        checkpoint.export_history(model, out, args.to, target=target, dtype=dtype)
    print(f"wrote {out} in the {args.to} layout")


def _served_by(folder: str, target: str | None) -> str:
    from dlite import checkpoint

    record = checkpoint.read(folder).target
    name = target or (record.name if record else "TARGET")
    return shlex.join(["dlite", "serve", name, "--draft", folder])


# ---- corpus ----------------------------------------------------------------------------------


def _corpus_build(args: argparse.Namespace) -> None:
    from dlite.corpora import build_corpus

    manifest = build_corpus(
        Path(args.out), args.tokenizer, [Path(path) for path in args.paths], args.licence
    )
    print(f"wrote {args.out}: {len(manifest.sources)} documents, {manifest.num_tokens:,} tokens")


def _corpus_inspect(args: argparse.Namespace) -> None:
    from dlite.describe import corpus_lines

    _print_table(corpus_lines(Path(args.folder)))


if __name__ == "__main__":
    sys.exit(main())
