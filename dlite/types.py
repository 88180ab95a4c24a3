"""The words that cross a border: requests, views, drafts, verdicts, rounds.

Shape letters, used as suffixes of tensor names all over the project: B requests, A anchors,
S sequence, K draft positions, L taps, W history window, D hidden size, R rank of the sequential
head, N heads, H head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from dlite.drafters.structure import Structure


@dataclass(frozen=True, slots=True)
class SessionKey:
    """Whose private corpora a request may read and feed. Explicit: never derived from content."""

    tenant: str
    session: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target's next token is chosen. `temperature == 0` is greedy.

    Raises ValueError for values outside their range.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; give a number >= 0 (0: greedy)")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; give an integer >= 0 (0: off)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; give a number in (0, 1] (1: off)")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """A file that the session itself opened, as its tool showed it."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class AgentContext:
    """What an agent says about its call. `structure` None: one block; `files`: newly opened ones,
    for the session's workspace corpus."""

    agent_id: str = ""
    query_id: str = ""
    structure: Structure | None = None
    files: tuple[OpenedFile, ...] = ()


@dataclass(slots=True)
class Request:
    """One call of the target: its prompt and the rules under which it ends."""

    id: str
    prompt: list[int]
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    sampling: Sampling = Sampling()
    session: SessionKey | None = None
    agent: AgentContext = AgentContext()


@dataclass(slots=True)
class View:
    """What a drafter may see of a running request at the start of a round.

    `tokens` is prompt + committed tokens; the last one is the anchor. `taps_LD` are the target's
    hidden states at the position before the anchor (None when the loop captures none), layers in
    the drafter's `tap_ids` order. At most `max_draft` tokens are of use.
    """

    request: Request
    tokens: Sequence[int]
    max_draft: int
    taps_LD: Tensor | None = None


class SourceClass(IntEnum):
    """Where a retrieved continuation was found."""

    SAME_BLOCK = 0  # generated in the session: the same block and query
    OTHER_QUERY = 1  # generated in the session: the same block, another query
    OTHER_BLOCK = 2  # generated in the session: another block
    PROMPT = 3  # prompts and tool outputs of the session
    WORKSPACE = 4  # a form of a file that the session opened
    GLOBAL = 5  # the static corpus


@dataclass(frozen=True, slots=True)
class Evidence:
    """What speaks for a retrieved continuation: the counts are the engine's (`Continuation`)."""

    source: SourceClass
    match_length: int
    support: int
    votes: int
    agreed: int = 0


@dataclass(slots=True)
class Draft:
    """Proposed tokens. `probs_KV` are the distributions that they were drawn from, over target
    ids; None says that each token is a point mass (retrieval, or drafted by argmax).
    `survival[k]` is the estimated probability that more than k of them are accepted.
    `confidence[k]` is a drafter's own probability of its token k, where it has one."""

    tokens: list[int] = field(default_factory=list)
    probs_KV: Tensor | None = None
    survival: list[float] | None = None
    source: str = ""
    evidence: Evidence | None = None
    confidence: list[float] | None = None

    def cut(self, length: int) -> Draft:
        """The first `length` tokens and what belongs to them; itself if it isn't longer."""
        if len(self.tokens) <= length:
            return self
        return Draft(
            self.tokens[:length],
            None if self.probs_KV is None else self.probs_KV[:length],
            None if self.survival is None else self.survival[:length],
            self.source,
            self.evidence,
            None if self.confidence is None else self.confidence[:length],
        )


class Choice(NamedTuple):
    """The draft that is verified, and the name of the drafter that proposed it."""

    drafter: str
    draft: Draft


@dataclass(frozen=True, slots=True)
class Verdict:
    """`num_accepted` draft tokens stand; `next_token` is the correction, or the bonus token."""

    num_accepted: int
    next_token: int


@dataclass(frozen=True, slots=True)
class Round:
    """One draft and its verification, as counted by the metrics.

    `emitted` tokens were committed. `cut` says that a stop token or the length limit ended the
    request inside this round: its tokens count, its acceptance is left out of per-position rates.
    """

    request_id: str
    drafted: int
    accepted: int
    emitted: int
    cut: bool
    source: str = ""


def tokens_per_step(rounds: Iterable[Round]) -> float:
    """tau over all steps: committed tokens per target forward, bonus counted.

    Pooled over rounds; the prefill's token is not counted. Raises ValueError without rounds.
    """
    emitted = [r.emitted for r in rounds]
    if not emitted:
        raise ValueError("no rounds to average: every request ended with the prefill's token")
    return sum(emitted) / len(emitted)
