"""T(N, B) in serving: measured within its time, kept, and corrected by the steps that follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlite.vllm_plugin import timing
from dlite.vllm_plugin.timing import StepTimes, measure


class Clock:
    """Time that only a step of n tokens and a draft spend."""

    def __init__(self) -> None:
        self.now, self.steps = 0.0, 0

    def step(self, num_tokens: int) -> None:
        self.steps += 1
        self.now += max(1.0, num_tokens / 32) / 100

    def draft(self, batch: int) -> None:
        self.now += 0.002 * batch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    return clock


def test_the_table_is_the_devices_and_the_ridge_lies_at_its_knee(clock: Clock) -> None:
    times = StepTimes(clock.step, clock.draft, max_batch=16, num_draft=7)
    assert times.costs.step_seconds(4, 8)[-1] == pytest.approx(0.01)
    assert times.costs.step_seconds(16, 128)[-1] == pytest.approx(0.04)
    assert times.costs.draft_seconds(8) == pytest.approx(0.016)
    assert times.ridge_tokens == pytest.approx(32, abs=1)


def test_measuring_ends_in_time_on_a_slow_machine(clock: Clock) -> None:
    table = measure(clock.step, None, max_batch=256, num_draft=7, limit_seconds=0.2)
    assert clock.now < 0.5
    assert len(table.num_tokens) == len(table.seconds[0]) > 2


def test_the_next_start_reads_what_the_first_measured(clock: Clock, tmp_path: Path) -> None:
    file = tmp_path / "costs" / "one.json"
    first = StepTimes(clock.step, None, max_batch=4, num_draft=3, cache=file)
    steps = clock.steps
    again = StepTimes(clock.step, None, max_batch=4, num_draft=3, cache=file)
    assert clock.steps == steps and again.costs.seconds == first.costs.seconds


def test_steps_that_take_longer_than_measured_correct_the_table(clock: Clock) -> None:
    """Attention to long contexts is in no start-up step; one hiccup is no trend."""
    times = StepTimes(clock.step, None, max_batch=4, num_draft=3)
    times.observe(16, 4, 1000.0)
    assert times.costs.step_seconds(4, 16)[-1] < 0.02
    for _ in range(200):
        times.observe(16, 4, 0.03)
    assert times.costs.step_seconds(4, 16)[-1] == pytest.approx(0.03, rel=0.05)
    assert times.costs.step_seconds(1, 16)[-1] < 0.02
