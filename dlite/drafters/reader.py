"""How far a call has been read, in pure Python: the twin of `Reader` in
`retrieval/native/reading.hpp`, which drafts for a whole batch in one call.

`NATIVE` says whether that one is built. Without it, `Memory.look` does the work call by call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlite import retrieval
from dlite.drafters.block_tracker import BlockTracker

if TYPE_CHECKING:
    from dlite.drafters.marks import Marks

NATIVE = retrieval.NATIVE


@dataclass
class Reader:
    """`seen` tokens are known, `own` of them to the call's own index. `block` is the one that is
    written now, `label` says who writes it (`Session.label`)."""

    tracker: BlockTracker | None
    own: int = 0
    seen: int = 0
    block: int = 0
    label: int = 0


def make_reader(tracker: BlockTracker | None) -> Any:
    if not NATIVE:
        return Reader(tracker)
    from dlite.retrieval import _native

    return _native.Reader(tracker)


def make_marks() -> Marks:
    if NATIVE:
        from dlite.retrieval import _native

        return _native.Marks()  # pyright: ignore[reportReturnType]
    from dlite.drafters.marks import Marks

    return Marks()
