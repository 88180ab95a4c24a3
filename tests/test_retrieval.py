"""Every engine against brute force, and each native one against its Python twin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite.retrieval import automaton, chain, frozen
from dlite.retrieval.base import END, Continuation, Index, Rule
from dlite.retrieval.choose import choose
from tests.oracle import (
    CappedStrings,
    continuation,
    longest_match,
    match_among_newest,
)

RULES = list(Rule)
K = 6
