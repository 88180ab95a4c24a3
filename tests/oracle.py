"""A drafter that knows the answer, for tests of the decoding loop."""

from __future__ import annotations

import random

from dlite.types import Draft, Request, SessionKey, Verdict, View

PROMPT_LENGTHS = [5, 12, 3, 9, 30, 4, 7]
LIMITS = [20, 33, 1, 2, 15, 26, 20]


def requests(**changes: object) -> list[Request]:
    pairs = enumerate(zip(PROMPT_LENGTHS, LIMITS, strict=True))
    return [
        Request(f"r{i}", [(7 * i + 11 * j) % 300 + 3 for j in range(n)], limit, **changes)  # pyright: ignore
        for i, (n, limit) in pairs
    ]


class OracleDrafter:
    """Drafts the true continuation up to a random point and wrong tokens behind it."""

    name = "oracle"

    def __init__(self, answers: dict[str, list[int]], tap_ids: tuple[int, ...] = ()) -> None:
        self.answers = answers
        self.tap_ids = tap_ids
        self.random = random.Random(0)
        self.right: dict[str, list[int]] = {}  # how many tokens of each draft were right
        self.seen: list[View] = []
        self.log: list[tuple[str, str]] = []

    def start(self, request: Request) -> None:
        self.log.append(("start", request.id))
        self.right[request.id] = []

    def propose(self, views: list[View]) -> list[Draft]:
        drafts = []
        for view in views:
            request = view.request
            done = len(view.tokens) - len(request.prompt)
            truth = self.answers[request.id][done : done + view.max_draft]
            right = self.random.randint(0, len(truth))
            wrong = [(token + 1) % 512 for token in truth[right:]]
            drafts.append(Draft([*truth[:right], *wrong], source="oracle"))
            self.right[request.id].append(right)
            self.seen.append(View(request, list(view.tokens), view.max_draft, view.taps_LD))
            self.log.append(("propose", request.id))
        return drafts

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        right = min(self.right[request.id][-1], len(draft.tokens))  # a planner may cut drafts
        assert verdict.num_accepted == right
        self.log.append(("observe", request.id))

    def finish(self, request: Request) -> None:
        self.log.append(("finish", request.id))

    def abort(self, request: Request) -> None:
        self.log.append(("abort", request.id))

    def close(self, session: SessionKey) -> None:
        raise AssertionError("a decoding loop ends calls, never sessions")


class TruthDrafter(OracleDrafter):
    """Drafts the true continuation only, past any stop token."""

    def propose(self, views: list[View]) -> list[Draft]:
        self.random.randint = lambda low, high: high  # pyright: ignore
        return super().propose(views)
