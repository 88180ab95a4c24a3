"""The target's own answers to prompts, one row each: what a drafter is trained on.

python -m train.regenerate target=smollm2-135m prompts=FILE.jsonl out=answers.jsonl
python -m train.regenerate server=URL model=NAME prompts=FILE.jsonl out=answers.jsonl
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dlite import config as arguments
from dlite.decode import decode
from dlite.drafters.ngram import NgramDrafter
from dlite.files import writable
from dlite.target import TargetModel
from dlite.types import Request, Sampling
from train.answers import AnswerFile
from train.client import ChatClient
from train.rows import ID_KEYS, Chat, Rejected, prompt, read_rows, reasons, row_id
from train.supervision import render

DRAFTERS: dict[str, Callable[[], NgramDrafter | None]] = {
    "none": lambda: None,
    "ngram": NgramDrafter,
}


@dataclass
class Config:
    """Answers prompts with the target itself, or with a server that runs it; resumes by row id.

    Prompts: JSONL files or hub ids whose rows have messages, turns (the first is asked) or prompt.
    """

    prompts: list[str]
    out: str
    target: str | None = None  # with `server`: only checks that it renders prompts alike
    dtype: str = "float32"
    device: str = "cpu"
    batch_size: int = 16
    drafter: str = "none"
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    text: bool = True  # false: a row has the prompt and `answer_ids` only, half the size
    limit: int | None = None
    overwrite: bool = False
    server: str | None = None
    model: str | None = None
    concurrency: int = 8
    shards: int = 1  # workers that share the prompts; each writes a file of its own
    shard: int = 0  # this worker's number: a global rank
    retries: int = 5
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.drafter not in DRAFTERS:
            raise ValueError(f"drafter is {self.drafter!r}; choose one of {', '.join(DRAFTERS)}")
        for name in ("batch_size", "max_new_tokens", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")
        if not 0 <= self.shard < self.shards:
            raise ValueError(f"shard is {self.shard} of {self.shards}; give 0 to {self.shards - 1}")
        if self.server and not self.model:
            raise ValueError("model is missing; add model=NAME as the server knows it")
        if not self.server and not self.target:
            raise ValueError("target is missing; add target=... or server=URL model=NAME")
        Sampling(self.temperature, self.top_k, self.top_p)  # checks their ranges

    @property
    def file(self) -> Path:
        """Where this worker writes: a folder of shards, or the one file."""
        if self.shards == 1:
            return Path(self.out)
        return Path(self.out) / f"{self.shard:05d}-of-{self.shards:05d}.jsonl"

    def sampling(self, name: str) -> Sampling:
        """Each row draws from its own seed, so an interruption changes no answer."""
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        return Sampling(
            self.temperature, self.top_k, self.top_p, int.from_bytes(digest[:4], "big") >> 1
        )


class Progress:
    """Writes rows as they finish, and shows how many, how fast and until when."""

    def __init__(self, file: AnswerFile, chats: dict[str, Chat], config: Config) -> None:
        self.file, self.chats, self.kwargs = file, chats, config.template_kwargs
        self.text = config.text
        self.num_tokens = self.num_rows = 0
        self.rejected: Counter[str] = Counter()
        self.start = time.perf_counter()
        done = len(file.ids & chats.keys())
        self.bar = tqdm(total=len(chats), initial=done, desc="answers", unit="row")

    def row(
        self,
        name: str,
        message: dict[str, Any],
        finish_reason: str,
        num_tokens: int,
        answer_ids: list[int] | None,
    ) -> None:
        chat = self.chats[name]
        row: dict[str, Any] = {"id": name, "messages": chat.messages}
        if answer_ids is not None:
            row["answer_ids"] = answer_ids
        elif not self.text:
            raise ValueError("text=false, but the server gives no token ids; use text=true")
        if self.text:
            row["messages"] = [*chat.messages, message]
        row["finish_reason"] = finish_reason
        if chat.tools:
            row["tools"] = chat.tools
        if self.kwargs:
            row["template_kwargs"] = self.kwargs
        self.file.append(row)
        self.num_rows += 1
        self.num_tokens += num_tokens
        self.bar.set_postfix_str(f"{self.tokens_per_second:.1f} tokens/s", refresh=False)
        self.bar.update()

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / (time.perf_counter() - self.start)

    def close(self) -> None:
        self.bar.close()
        self.file.close()


def load_prompts(config: Config, rejected: Counter[str]) -> dict[str, Chat]:
    """Prompts by row id. Raises ValueError for an id given twice and when there is no prompt."""
    chats: dict[str, Chat] = {}
    for row in islice(read_rows(config.prompts, rejected), config.limit):
        name = row_id(row)
        if zlib.crc32(name.encode()) % config.shards != config.shard:
            continue
        if name in chats and any(key in row for key in ID_KEYS):
            raise ValueError(f"{','.join(config.prompts)} has two rows of id {name!r}; rename one")
        try:
            if name in chats:
                raise Rejected("the same prompt again")
            chats[name] = prompt(row)
        except Rejected as reason:
            rejected[str(reason)] += 1
    if not chats:
        raise ValueError(f"no prompts in {','.join(config.prompts)}: {reasons(rejected)}")
    return chats


def regenerate(config: Config) -> None:
    rejected: Counter[str] = Counter()
    writable(config.file.parent, "out")
    chats = load_prompts(config, rejected)
    target = None
    if config.target:
        target = TargetModel.load(config.target, dtype=config.dtype, device=config.device)
    file = AnswerFile(config.file, _settings(config, target), overwrite=config.overwrite)
    progress = Progress(file, chats, config)
    progress.rejected += rejected
    todo = {name: chat for name, chat in chats.items() if name not in file.ids}
    try:
        if config.server:
            _ask_server(config, target, todo, progress)
        elif target is not None:
            _ask_target(config, target, todo, progress)
    finally:
        progress.close()
    if todo and not progress.num_rows:
        raise ValueError(f"none of {len(todo)} prompts got an answer: {reasons(progress.rejected)}")
    print(
        f"{progress.num_rows} answers of {progress.num_tokens} tokens at "
        f"{progress.tokens_per_second:.1f} tokens/s; {len(file.ids)} rows in {config.file}; "
        f"left out: {reasons(progress.rejected)}"
    )


def _ask_target(
    config: Config, target: TargetModel, todo: dict[str, Chat], progress: Progress
) -> None:
    requests = []
    for name, chat in todo.items():
        try:
            ids = render(target.render, chat.messages, **chat.kwargs(config.template_kwargs))
            if len(ids) + config.max_new_tokens > target.max_length:
                raise Rejected(f"prompt + max_new_tokens exceed the target's {target.max_length}")
        except Rejected as reason:
            progress.rejected[str(reason)] += 1
            continue
        requests.append(
            Request(name, ids, config.max_new_tokens, target.eos_ids, config.sampling(name))
        )
    answers: dict[str, list[int]] = {request.id: [] for request in requests}

    def on_tokens(request: Request, tokens: list[int]) -> None:
        answers[request.id] += tokens
        stopped = tokens[-1] in target.eos_ids
        if not stopped and len(answers[request.id]) < request.max_new_tokens:
            return
        ids = answers.pop(request.id)
        said = ids[:-1] if stopped else ids
        text = target.tokenizer.decode(said, skip_special_tokens=True)
        message = {"role": "assistant", "content": text}
        progress.row(request.id, message, "stop" if stopped else "length", len(ids), ids)

    drafter = DRAFTERS[config.drafter]()
    decode(target, requests, drafter, batch_size=config.batch_size, on_tokens=on_tokens)


def _ask_server(
    config: Config, target: TargetModel | None, todo: dict[str, Chat], progress: Progress
) -> None:
    assert config.server
    client = ChatClient(
        config.server, retries=config.retries, timeout_seconds=config.timeout_seconds
    )
    bodies = ((name, _body(config, name, chat)) for name, chat in todo.items())
    with closing(client.complete_all(bodies, config.concurrency)) as replies:
        for name, reply in replies:
            if isinstance(reply, Rejected):
                progress.rejected[str(reply)] += 1
                continue
            if target is not None and reply.num_prompt_tokens is not None:
                kwargs = todo[name].kwargs(config.template_kwargs)
                num_tokens = len(target.render(todo[name].messages, **kwargs))
                if num_tokens != reply.num_prompt_tokens:
                    raise ValueError(
                        f"the server made {reply.num_prompt_tokens} tokens of prompt {name!r}, the "
                        f"target {num_tokens}; give both the same chat template and template_kwargs"
                    )
            progress.row(
                name, reply.message, reply.finish_reason, reply.num_tokens, reply.answer_ids
            )


def _body(config: Config, name: str, chat: Chat) -> dict[str, Any]:
    """A chat completion request; what OpenAI's API lacks is named as vLLM names it."""
    sampling = config.sampling(name)
    body: dict[str, Any] = {
        "model": config.model,
        "messages": [_with_json_arguments(message) for message in chat.messages],
        "max_tokens": config.max_new_tokens,
        "temperature": sampling.temperature,
    }
    if not sampling.greedy:
        body |= {"top_p": sampling.top_p, "seed": sampling.seed}
        body |= {"top_k": sampling.top_k} if sampling.top_k else {}
    if chat.tools:
        body["tools"] = chat.tools
    if config.template_kwargs:
        body["chat_template_kwargs"] = config.template_kwargs
    return body


def _with_json_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Servers take a call's arguments as JSON text, chat templates as an object."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(arguments)}}
        for call in message["tool_calls"]
        for arguments in [call["function"]["arguments"]]
    ]
    return {**message, "tool_calls": calls}


def _settings(config: Config, target: TargetModel | None) -> dict[str, Any]:
    """What decides an answer, and so must not change within a file."""
    names = ["max_new_tokens", "temperature", "template_kwargs"]
    if config.temperature > 0:
        names += ["top_k", "top_p", "seed"]
    settings: dict[str, Any] = {name: getattr(config, name) for name in names}
    if config.server:
        return {**settings, "model": config.model}
    assert target is not None
    prints = target.fingerprint()
    made_by = {"weights": prints["weights"], "tokenizer": prints["tokenizer"]}
    return {**settings, **made_by, "dtype": config.dtype}


if __name__ == "__main__":
    arguments.run(Config, regenerate)
