"""What a memory looks into, and by which engine and rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dlite import retrieval
from dlite.drafters.emission import DEFAULT_FORMS, check_forms
from dlite.drafters.workspace import SECRET_FILES
from dlite.retrieval import base
from dlite.retrieval.base import Continuation, Index, Rule, Source
from dlite.retrieval.suffix_tree import SuffixTree

Step = Callable[[list[Source], list[Any], int, int], list[Continuation]]
ENGINES: dict[str, tuple[Callable[[], Index], Step]] = {
    "automaton": (retrieval.Automaton, retrieval.step),
    "chain": (retrieval.HashChain, retrieval.step),
    "arctic": (lambda: SuffixTree(own_length=True), base.step),
}
HISTORIES = ("own", "call", "session", "blocks")
RULES = {rule.name.lower(): rule for rule in Rule}


@dataclass(kw_only=True)
class MemoryOptions:
    """`history`: what a call looks into beside files and the static corpus. `own`: its own
    output; `call`: its prompt, too; `session`: all that its session read and wrote; `blocks`:
    what was generated in the same block of the same agent and query (AgentSpec).

    The rules say which occurrence is copied: recency beats the vote by 1.2 % on live text and
    loses to it by 0.5 to 1 % on a static corpus (replay of 65 real sessions)."""

    history: str = "session"
    engine: str = "automaton"
    live_rule: str = "recent"
    workspace_rule: str = "recent"
    static_rule: str = "vote"
    workspace: bool = True
    forms: list[str] = field(default_factory=lambda: list(DEFAULT_FORMS))
    secret_files: list[str] = field(default_factory=lambda: list(SECRET_FILES))
    idle_seconds: float = 1800.0
    max_session_tokens: int = 2**20  # some 64 MB
    max_tokens: int = 2**25  # of all sessions; the one that was idle longest goes first

    def __post_init__(self) -> None:
        for name, known in (
            ("history", HISTORIES),
            ("engine", ENGINES),
            *((rule, RULES) for rule in ("live_rule", "workspace_rule", "static_rule")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose {', '.join(known)}")
        check_forms(self.forms)
        for name in ("idle_seconds", "max_session_tokens", "max_tokens"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 2")
