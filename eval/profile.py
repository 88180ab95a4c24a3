"""What is learnt from recorded sessions before serving: a static corpus, AgSpec's caps, survival
priors.

    python -m eval.profile sessions=FILE.jsonl.gz tokenizer=DIR split=global out=DIR

writes `corpus/` (what models generated), `caps-LAMBDA.json` and `survival.json`. Caps and priors
come from a walk: only positions where a drafter would really come to draft, which is right behind
the last draft's first wrong token, count. For them no session looks into a corpus with text of its
own task: sessions are split by task into halves, and each half looks into the other's text.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dlite.config import run
from dlite.costs import CostTable
from dlite.drafters.memory import Memory, MemoryOptions
from dlite.drafters.registry import Resources
from dlite.fingerprint import tokenizer_fingerprint
from dlite.retrieval import corpus
from dlite.survival import Outcome, fit
from dlite.types import Draft, Request, SessionKey, Verdict, View
from eval.provenance import provenance
from eval.rendering import Call, Workload, load_calls
from eval.replay import MAX_DRAFT, replay
from eval.traces import read_sessions

CORPUS_FOLDER, PRIORS_FILE, CAPS_FILE = "corpus", "survival.json", "caps-{}.json"
MIN_MATCH = 3  # shorter matches are many and nearly worthless: with them every cap becomes 0


@dataclass(kw_only=True)
class Config:
    """python -m eval.profile key=value ...: what drafters learn offline from recorded sessions.

    `lam` are AgSpec's lambdas to profile caps for. `split` null takes all sessions."""

    sessions: list[str]
    tokenizer: str
    out: str
    split: str | None = "global"
    limit: int = 0
    lam: list[float] = field(default_factory=lambda: [0.3, 0.5, 0.7])
    max_draft: int = MAX_DRAFT
    cache: str | None = None

    def __post_init__(self) -> None:
        for lam in self.lam:
            if not 0 < lam < 1:
                raise ValueError(f"lam has {lam}; give numbers between 0 and 1")
        if self.max_draft < 1:
            raise ValueError(f"max_draft is {self.max_draft}; give at least 1")


def documents(sessions: Iterable[Sequence[Call]]) -> list[corpus.Document]:
    """What each session's calls generated, one after the other."""
    return [
        corpus.Document(
            f"generated in session {calls[0].session}", [t for call in calls for t in call.output]
        )
        for calls in sessions
    ]


class Walk:
    """A drafter that drafts all it finds, for the sake of what becomes of it.

    Each round the longest match decides where the walk goes on; `outcomes` are those of all
    candidates of the round, `lengths` by agent the accepted tokens of the longest match."""

    name = "walk"
    tap_ids: tuple[int, ...] = ()

    def __init__(self, memory: Memory, outputs: dict[str, list[int]]) -> None:
        self.memory, self.outputs = memory, outputs
        self.outcomes: list[Outcome] = []
        self.lengths: dict[str, list[int]] = {}

    def start(self, request: Request) -> None:
        self.memory.start(request)

    def propose(self, views: list[View]) -> list[Draft]:
        return [self._propose(view) for view in views]

    def _propose(self, view: View) -> Draft:
        found = self.memory.candidates(view)
        if not found:
            return Draft()
        done = len(view.tokens) - len(view.request.prompt)
        truth = self.outputs[view.request.id.partition(" ")[2]][done : done + view.max_draft]
        for draft in found:
            assert draft.evidence is not None
            accepted = agreement(draft.tokens, truth)
            self.outcomes.append(Outcome(draft.evidence, len(draft.tokens), accepted))
        best = max(found, key=_match_length)
        if _match_length(best) >= MIN_MATCH:
            lengths = self.lengths.setdefault(view.request.agent.agent_id, [])
            lengths.append(agreement(best.tokens, truth))
        return best

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        self.memory.observe(request, draft, verdict)

    def finish(self, request: Request) -> None:
        self.memory.finish(request)

    def abort(self, request: Request) -> None:
        self.memory.abort(request)

    def close(self, session: SessionKey) -> None:
        self.memory.close(session)


def _match_length(draft: Draft) -> int:
    return draft.evidence.match_length if draft.evidence else 0


def agreement(draft: Sequence[int], truth: Sequence[int]) -> int:
    """How many leading tokens of the draft are true."""
    for count, (token, other) in enumerate(zip(draft, truth, strict=False)):
        if token != other:
            return count
    return min(len(draft), len(truth))


def cap(lengths: Sequence[int], lam: float, longest: int) -> int:
    """AgSpec's K_max: the last k that a share of at least `lam` of the accepted lengths reaches."""
    at_least = np.array([np.mean(np.array(lengths) >= k) for k in range(1, longest + 1)])
    return int((at_least >= lam).sum()) if lengths else 0


def caps(lengths: dict[str, list[int]], lam: float, longest: int) -> dict[str, Any]:
    """As `dlite.drafters.length.Caps` reads them."""
    everyone = [length for found in lengths.values() for length in found]
    return {
        "shared": cap(everyone, lam, longest),
        "agents": {agent: cap(found, lam, longest) for agent, found in sorted(lengths.items())},
    }


def walk(workload: Workload, tokenizer: Any, max_draft: int) -> Walk:
    """Through both halves of the sessions, each beside a corpus of the other."""
    resources = Resources(None, tokenizer)
    outputs = {call.id: call.output for calls in workload.sessions for call in calls}
    walked = Walk(Memory(), outputs)
    halves: tuple[list[list[Call]], list[list[Call]]] = ([], [])
    for calls in workload.sessions:
        halves[zlib.crc32(calls[0].task.encode()) % 2].append(calls)
    num_tokens = sum(map(len, outputs.values()))
    with tqdm(total=num_tokens, desc="walking", disable=None) as bar:
        for half, other in (halves, halves[::-1]):
            with tempfile.TemporaryDirectory() as folder:
                if other:
                    fingerprint = tokenizer_fingerprint(tokenizer)
                    corpus.build(Path(folder), documents(other), tokenizer=fingerprint)
                walked.memory = resources.memory(MemoryOptions(), folder if other else None)
                if half:
                    replay(
                        half,
                        walked,
                        costs=CostTable.roofline(256),
                        end_id=workload.end_id,
                        max_draft=max_draft,
                        on_tokens=bar.update,
                    )
    return walked


def main(config: Config) -> None:
    out = Path(config.out)
    sessions = read_sessions(config.sessions, config.split, config.limit)
    workload = load_calls(sessions, config.tokenizer, Path(config.cache) if config.cache else None)
    tokenizer = workload.tokenizer
    manifest = corpus.build(
        out / CORPUS_FOLDER,
        tqdm(documents(workload.sessions), "static corpus", disable=None),
        tokenizer=tokenizer_fingerprint(tokenizer),
    )
    walked = walk(workload, tokenizer, config.max_draft)
    found = {lam: caps(walked.lengths, lam, config.max_draft) for lam in config.lam}
    for lam, content in found.items():
        (out / CAPS_FILE.format(lam)).write_text(json.dumps(content, indent=1) + "\n")
    where = f"{len(sessions)} sessions, split {config.split}, of {', '.join(config.sessions)}"
    fit(walked.outcomes).write(out / PRIORS_FILE, where)
    summary = {
        "program": "eval.profile",
        "config": asdict(config),
        **provenance("cpu"),
        "sessions_sha256": workload.sha256,
        "num_sessions": len(sessions),
        "corpus_tokens": manifest.num_tokens,
        "num_drafts": len(walked.outcomes),
        "caps": {str(lam): content for lam, content in found.items()},
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"static corpus: {manifest.num_tokens} tokens of {len(sessions)} sessions")
    for lam, content in found.items():
        agents = ", ".join(f"{agent} {k}" for agent, k in content["agents"].items())
        print(f"caps at lambda {lam}: {content['shared']}; {agents}")
    print(f"survival priors from {len(walked.outcomes)} drafts")
    print(f"written: {out}")


if __name__ == "__main__":
    run(Config, main)
