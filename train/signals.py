"""SIGTERM and Ctrl-C end a run after the step in hand, with a state to go on from."""

from __future__ import annotations

import signal
from types import FrameType


class Interrupted(Exception):
    """A signal ended the run; its state is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name}: state saved; the same command goes on")
        self.number = number


class Stop:
    """While entered, notes the first SIGTERM or SIGINT in `number`; a second one acts as ever."""

    number = 0

    def __enter__(self) -> Stop:
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
