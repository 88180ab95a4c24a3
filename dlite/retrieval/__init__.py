"""Retrieval engines: native where the extension is built, their pure-Python twins elsewhere.

`NATIVE` says which. Both give the same results, bit for bit; the twins are slower, and can't wipe
memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlite.retrieval.base import END, NOTHING, Continuation, Cursor, Index, Rule, Source

if TYPE_CHECKING:
    from dlite.retrieval.automaton import Automaton
    from dlite.retrieval.base import step
    from dlite.retrieval.chain import HashChain
    from dlite.retrieval.frozen import Frozen

    NATIVE: bool
else:
    try:
        from dlite.retrieval._native import Automaton, Frozen, HashChain, step

        NATIVE = True
    except ImportError:
        from dlite.retrieval.automaton import Automaton
        from dlite.retrieval.base import step
        from dlite.retrieval.chain import HashChain
        from dlite.retrieval.frozen import Frozen

        NATIVE = False

__all__ = [
    "END",
    "NATIVE",
    "NOTHING",
    "Automaton",
    "Continuation",
    "Cursor",
    "Frozen",
    "HashChain",
    "Index",
    "Rule",
    "Source",
    "step",
]
