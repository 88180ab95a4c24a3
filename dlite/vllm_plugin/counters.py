"""Prometheus counters beside vLLM's. They hold names of drafters and of agents' roles, no content.

In vLLM the workers are processes of their own; `dlite serve` makes them share a metrics folder, so
that the server's /metrics shows theirs.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from dlite.types import Draft

MAX_ROLES = 64  # further ones are counted as "other": labels are never unbounded
ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Counters:
    """Counts for nobody; `PrometheusCounters` exports them."""

    def judged(self, role: str, draft: Draft, num_accepted: int) -> None: ...

    def proposed(self, drafter: str, seconds: float) -> None: ...

    def budget(self, limit: int, used: int) -> None: ...

    def flush(self) -> None:
        """The step is over."""


@functools.cache
def prometheus() -> Counters:
    """The same for all engines of a process: a metric's name is taken once."""
    return PrometheusCounters()


class PrometheusCounters(Counters):
    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge

        def counter(name: str, text: str, *labels: str) -> Any:
            return Counter(f"dlite:{name}", text, labels)

        self._roles: set[str] = set()
        # Of this step, by (source, role): steps, drafted, accepted. A metric's own call is slow.
        self._judged: dict[tuple[str, str], list[int]] = {}
        by = ("source", "role")
        self._steps = counter("steps", "Steps of requests that decode", "role")
        self._drafted = counter("drafted_tokens", "Draft tokens verified", *by)
        self._accepted = counter("accepted_tokens", "Draft tokens accepted", *by)
        self._rejected = counter("rejected_tokens", "Draft tokens rejected", *by)
        self._seconds = counter("draft_seconds", "Time spent drafting", "drafter")
        self._calls = counter("drafts", "Calls of a drafter, one a step", "drafter")
        self._used = counter("budget_used_tokens", "Draft tokens planned")
        self._limit = Gauge(
            "dlite:budget_tokens", "M(b) of the last step", multiprocess_mode="mostrecent"
        )

    def judged(self, role: str, draft: Draft, num_accepted: int) -> None:
        counts = self._judged.setdefault((draft.source, role), [0, 0, 0])
        counts[0] += 1
        counts[1] += len(draft.tokens)
        counts[2] += num_accepted

    def flush(self) -> None:
        for (source, role), (steps, drafted, accepted) in self._judged.items():
            role = self._role(role)
            self._steps.labels(role).inc(steps)
            if drafted:
                labels = (source_label(source), role)
                self._drafted.labels(*labels).inc(drafted)
                self._accepted.labels(*labels).inc(accepted)
                self._rejected.labels(*labels).inc(drafted - accepted)
        self._judged.clear()

    def proposed(self, drafter: str, seconds: float) -> None:
        self._seconds.labels(drafter).inc(seconds)
        self._calls.labels(drafter).inc()

    def budget(self, limit: int, used: int) -> None:
        self._limit.set(limit)
        self._used.inc(used)

    def _role(self, role: str) -> str:
        if role in self._roles:
            return role
        if not ROLE.fullmatch(role) or len(self._roles) >= MAX_ROLES:
            return "other" if role else "none"
        self._roles.add(role)
        return role


def source_label(source: str) -> str:
    return source if ROLE.fullmatch(source.replace(":", ".")) else "other"
