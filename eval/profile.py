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
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dlite.config import run
from dlite.costs import CostTable
from dlite.drafters.memory import Memory, MemoryOptions
from dlite.drafters.registry import Resources
from dlite.drafters.structure import Structure, parse_structure
from dlite.files import writable
from dlite.fingerprint import tokenizer_fingerprint
from dlite.retrieval import corpus
from dlite.survival import Outcome, fit
from dlite.types import Draft, Request, SessionKey, SourceClass, Verdict, View
from eval.provenance import provenance
from eval.rendering import Call, Workload, load_calls
from eval.replay import MAX_DRAFT, replay
from eval.report import write_report
from eval.traces import read_sessions

CORPUS_FOLDER, CAPS_FILE = "corpus", "caps-{}.json"
PRIORS_FILE, ONE_BLOCK_PRIORS_FILE = "survival.json", "survival-one-block.json"
STRUCTURE = '[[["<tool_call>", "</tool_call>"]], [["```", "```"]]]'
SPANS = (1, 2, 4, 8, 16, 32)
MATCHES = (1, 2, 3, 4, 5, 7, 10, 15, 25, 50)
AGREEMENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
MIN_MATCH = 3  # shorter matches are many and nearly worthless: with them every cap becomes 0


@dataclass(kw_only=True)
class Config:
    """python -m eval.profile key=value ...: what drafters learn offline from recorded sessions.

    `lam` are AgSpec's lambdas to profile caps for. `split` null takes all sessions; `structure`
    are the blocks whose text is told apart."""

    sessions: list[str]
    tokenizer: str
    out: str
    split: str | None = "global"
    limit: int = 0
    lam: list[float] = field(default_factory=lambda: [0.3, 0.5, 0.7])
    max_draft: int = MAX_DRAFT
    structure: str = STRUCTURE
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

    Each round the longest match decides where the walk goes on: `chosen` are its outcomes,
    `outcomes` those of all candidates of the round, `lengths` by agent what was accepted of the
    longest match."""

    name = "walk"
    tap_ids: tuple[int, ...] = ()

    def __init__(self, memory: Memory, outputs: dict[str, list[int]]) -> None:
        self.memory, self.outputs = memory, outputs
        self.outcomes: list[Outcome] = []
        self.chosen: list[Outcome] = []
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
        best = max(range(len(found)), key=lambda row: _match_length(found[row]))
        self.chosen.append(self.outcomes[best - len(found)])
        if _match_length(found[best]) >= MIN_MATCH:
            lengths = self.lengths.setdefault(view.request.agent.agent_id, [])
            lengths.append(self.chosen[-1].accepted)
        return found[best]

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


def repeated_spans(chosen: Iterable[Outcome], num_tokens: int) -> dict[str, list[float]]:
    """By where they are from: the share of generated tokens in accepted spans of at least each of
    SPANS tokens (AgentSpec's Figure 5, on a walk)."""
    shares: dict[str, list[float]] = {}
    for outcome in chosen:
        of_class = shares.setdefault(outcome.evidence.source.name, [0.0] * len(SPANS))
        for place, span in enumerate(SPANS):
            if outcome.accepted >= span:
                of_class[place] += outcome.accepted / num_tokens
    return dict(sorted(shares.items()))


def acceptance_table(outcomes: Iterable[Outcome]) -> list[dict[str, float]]:
    """How often the first token stands, and how many do, by match length and by the share c / n of
    occurrences that agree (AgentSpec's Figure 6)."""
    cells: dict[tuple[int, float], list[int]] = {}
    for evidence, _, accepted in outcomes:
        match = MATCHES[bisect_right(MATCHES, evidence.match_length) - 1]
        share = evidence.votes / evidence.support
        agreed = AGREEMENTS[bisect_right(AGREEMENTS, share) - 1]
        cell = cells.setdefault((match, agreed), [0, 0, 0])
        for place, value in enumerate((1, int(accepted > 0), accepted)):
            cell[place] += value
    return [
        {"match": match, "agreement": agreed, "count": n, "first": first / n, "accepted": sum_ / n}
        for (match, agreed), (n, first, sum_) in sorted(cells.items())
    ]


def one_block(outcome: Outcome) -> Outcome:
    """As if no blocks were known."""
    if outcome.evidence.source in (SourceClass.WORKSPACE, SourceClass.GLOBAL):
        return outcome
    return outcome._replace(evidence=replace(outcome.evidence, source=SourceClass.PROMPT))


def walk(workload: Workload, tokenizer: Any, max_draft: int, structure: Structure) -> Walk:
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
                        structure=structure,
                        on_tokens=bar.update,
                    )
    return walked


def main(config: Config) -> None:
    out = writable(Path(config.out), "out")
    sessions = read_sessions(config.sessions, config.split, config.limit)
    workload = load_calls(sessions, config.tokenizer, Path(config.cache) if config.cache else None)
    tokenizer = workload.tokenizer
    manifest = corpus.build(
        out / CORPUS_FOLDER,
        tqdm(documents(workload.sessions), "static corpus", disable=None),
        tokenizer=tokenizer_fingerprint(tokenizer),
    )
    walked = walk(workload, tokenizer, config.max_draft, parse_structure(config.structure))
    found = {lam: caps(walked.lengths, lam, config.max_draft) for lam in config.lam}
    for lam, content in found.items():
        (out / CAPS_FILE.format(lam)).write_text(json.dumps(content, indent=1) + "\n")
    where = f"{len(sessions)} sessions, split {config.split}, of {', '.join(config.sessions)}"
    fit(walked.outcomes).write(out / PRIORS_FILE, where)
    fit(map(one_block, walked.outcomes)).write(out / ONE_BLOCK_PRIORS_FILE, where)
    num_tokens = sum(len(call.output) for calls in workload.sessions for call in calls)
    spans = repeated_spans(walked.chosen, num_tokens)
    summary = {
        "program": "eval.profile",
        "config": asdict(config),
        **provenance("cpu"),
        "sessions_sha256": workload.sha256,
        "num_sessions": len(sessions),
        "corpus_tokens": manifest.num_tokens,
        "num_drafts": len(walked.outcomes),
        "caps": {str(lam): content for lam, content in found.items()},
        "spans": {"lengths": SPANS, "shares": spans},
        "acceptance": acceptance_table(walked.outcomes),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    write_report([summary], out / "report.html")
    print(f"static corpus: {manifest.num_tokens} tokens of {len(sessions)} sessions")
    for lam, content in found.items():
        agents = ", ".join(f"{agent} {k}" for agent, k in content["agents"].items())
        print(f"caps at lambda {lam}: {content['shared']}; {agents}")
    print(f"survival priors from {len(walked.outcomes)} drafts")
    print(f"written: {out}")


if __name__ == "__main__":
    run(Config, main)
