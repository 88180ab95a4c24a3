"""Several drafters and a planner: exact at any temperature, in every loop."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch
from oracle import OracleDrafter, requests
from test_verify import (
    Conditional,
    Joint,
    ScriptedRow,
    V,
    assert_same,
    conditional,
    joint,
    scripts,
)

from dlite.budget import Budget, agentspec, uniform
from dlite.costs import CostTable
from dlite.decode import decode, judge
from dlite.drafters.base import Drafter
from dlite.drafters.memory import Memory
from dlite.drafters.ngram import NgramDrafter
from dlite.drafters.survival import SurvivalDrafter, SurvivalOptions
from dlite.hybrid import Hybrid
from dlite.planner import Chooser, Planner
from dlite.survival import Outcome, fit
from dlite.target import TargetModel
from dlite.types import Draft, Evidence, Request, Sampling, SourceClass, Verdict, View

COSTS = CostTable.roofline(5, per_token=0.01, neural=(0.05, 0.0))
PROMPTS = ([0, 1, 0, 1, 0], [2, 3, 3, 2, 3])


class Scripted:
    """Drafts by a pure function of the tokens so far."""

    def __init__(
        self, name: str, draft: Callable[[tuple[int, ...]], Draft], tap_ids: tuple[int, ...] = ()
    ) -> None:
        self.name, self.draft, self.tap_ids = name, draft, tap_ids
        self.seen: list[Draft] = []

    def start(self, request: Request) -> None: ...

    def propose(self, views: list[View]) -> list[Draft]:
        return [self.draft(tuple(view.tokens)).cut(view.max_draft) for view in views]

    def observe(self, request: Request, draft: Draft, verdict: Verdict) -> None:
        self.seen.append(draft)

    def finish(self, request: Request) -> None: ...

    def abort(self, request: Request) -> None: ...

    def close(self, session: object) -> None: ...


def retrieved(tokens: tuple[int, ...]) -> Draft:
    """As a retrieval drafter: a function of the past, with survival and evidence."""
    length = sum(tokens) % 3
    found = [(tokens[-1] + k) % V for k in range(1, length + 1)]
    evidence = Evidence(SourceClass.PROMPT, 4, 2, 1 + tokens[-1] % 2, 1)
    return Draft(found, survival=[0.6, 0.5][:length], source="sam", evidence=evidence)


def modelled(q: Conditional) -> Callable[[tuple[int, ...]], Draft]:
    """As a draft model by argmax, with its confidence."""

    def draft(tokens: tuple[int, ...]) -> Draft:
        found, confidence = [], []
        for _ in range(2):
            q_V = q((*tokens, *found))
            found.append(int(q_V.argmax()))
            confidence.append(float(q_V.max()))
        return Draft(found, confidence=confidence, source="dlite")

    return draft


class Sampled:
    """A draft model that samples: every draft that it can produce, one after the other."""

    def __init__(self, q: Conditional) -> None:
        self.q = q

    def drafts(self, tokens: tuple[int, ...]) -> Iterator[tuple[float, Draft]]:
        for token, chance in enumerate(self.q(tokens).tolist()):
            yield chance, Draft([token], self.q(tokens)[None], source="dlite")


def targets_own(p: Conditional, length: int) -> Joint:
    """Of two independent requests."""
    pairs = [joint(lambda s, a=a: p((*a, *s)), length).items() for a in map(tuple, PROMPTS)]
    return {(*x, *y): a * b for (x, a), (y, b) in itertools.product(*pairs)}


def enumerate_rounds(p: Conditional, make: Callable[[], Drafter], length: int) -> Joint:
    """Distribution of `length` tokens of two requests decoded in one batch, by rounds of the real
    drafting, planning, verifying and learning, over all that chance can do."""
    result: Joint = defaultdict(float)
    full = [len(prompt) + length for prompt in PROMPTS]

    def follow(history: list[dict[int, Verdict]], texts: list[list[int]], weight: float) -> None:
        live = [i for i in (0, 1) if len(texts[i]) < full[i]]
        if not live:
            result[tuple(t for i in (0, 1) for t in texts[i][len(PROMPTS[i]) :])] += weight
            return
        drafts = propose(make(), history)
        p_NVs = {
            i: torch.stack([p((*texts[i], *d.tokens[:k])) for k in range(len(d.tokens) + 1)])
            for i, d in drafts.items()
        }
        logits_NV = torch.cat(list(p_NVs.values())).log()
        for outcome in itertools.product(*(list(scripts(p_NVs[i], drafts[i])) for i in live)):
            batch = [ScriptedRow(list(uniforms)) for _, uniforms in outcome]
            verdicts = dict(zip(live, judge(batch, [*drafts.values()], logits_NV), strict=True))
            after = [
                [*texts[i], *drafts[i].tokens[: v.num_accepted], v.next_token]
                if (v := verdicts.get(i))
                else texts[i]
                for i in (0, 1)
            ]
            chance = math.prod(share for share, _ in outcome)
            follow([*history, verdicts], after, weight * chance)

    def propose(drafter: Drafter, history: list[dict[int, Verdict]]) -> dict[int, Draft]:
        """What is drafted after `history`, replayed on a new drafter: nothing else may matter."""
        asked = [Request(str(i), list(t), 9, sampling=Sampling(1.0)) for i, t in enumerate(PROMPTS)]
        texts = [list(prompt) for prompt in PROMPTS]
        for request in asked:
            drafter.start(request)
        drafts: dict[int, Draft] = {}
        for verdicts in [*history, None]:
            live = [i for i in (0, 1) if len(texts[i]) < full[i]]
            views = [View(asked[i], texts[i], full[i] - len(texts[i]) - 1) for i in live]
            drafts = dict(zip(live, drafter.propose(views), strict=True))
            if verdicts is None:
                break
            for i, draft in drafts.items():
                drafter.observe(asked[i], draft, verdicts[i])
                texts[i] += [*draft.tokens[: verdicts[i].num_accepted], verdicts[i].next_token]
        return drafts

    follow([], [list(prompt) for prompt in PROMPTS], 1.0)
    return result


CHOOSERS: dict[str, Callable[[], Chooser]] = {
    "planner": lambda: Planner(COSTS, guard=0.0),
    "planner, no cost": Planner,
    "uniform": lambda: Budget(uniform, 5),
    "agentspec": lambda: Budget(agentspec(), 5),
}


def test_retrieval_from_a_session_changes_the_distribution() -> None:
    """The survival policy over its memory beside a draft model; both learn between rounds."""
    p, model = conditional(23), Scripted("dlite", modelled(conditional(22)), (0,))
    matched = [Evidence(SourceClass.PROMPT, m, 1, 1) for m in (1, 2, 3, 4)]
    trusting = fit(Outcome(evidence, 1, 1) for evidence in matched * 500)

    def make() -> Hybrid:
        policy = SurvivalDrafter(Memory(), SurvivalOptions(), trusting)
        return Hybrid([policy, model], Planner(COSTS, guard=0.0))

    first = make()
    request = Request("r", PROMPTS[0], 9, sampling=Sampling(1.0))
    first.start(request)
    assert first.propose([View(request, PROMPTS[0], 1)])[0].evidence is not None

    found = enumerate_rounds(p, make, 2)
    assert_same(found, targets_own(p, 2))


@pytest.mark.parametrize("name", CHOOSERS)
def test_planned_rounds_of_a_batch_emit_another_distribution_than_the_targets(name: str) -> None:
    """Hybrid, planner or budget, verification and what they learn on the way, enumerated over
    rounds at batch 2 and temperature 1."""
    length, never = (3, (3, 4)) if name == "planner" else (2, ())
    p, q = conditional(21, zero=never), conditional(22)
    model = Scripted("dlite", modelled(q), (0,))
    drafters = [Scripted("sam", retrieved), *([] if name == "agentspec" else [model])]
    found = enumerate_rounds(p, lambda: Hybrid(drafters, CHOOSERS[name]()), length)
    assert_same(found, targets_own(p, length))
    assert any(draft.tokens for d in drafters for draft in d.seen)


def first_tokens(p: Conditional, keeps: Callable[[Draft, Draft], list[bool]]) -> Joint:
    """Of two requests whose sampled drafts a chooser keeps or drops after they were drawn."""
    model = Sampled(conditional(32))
    found: Joint = defaultdict(float)
    prompts = [tuple(prompt) for prompt in PROMPTS]
    for (a, one), (b, two) in itertools.product(*(model.drafts(t) for t in prompts)):
        kept = [d if k else Draft() for d, k in zip((one, two), keeps(one, two), strict=True)]
        p_NVs = [
            torch.stack([p((*t, *d.tokens[:k])) for k in range(len(d.tokens) + 1)])
            for t, d in zip(prompts, kept, strict=True)
        ]
        both = [scripts(p_NV, draft) for p_NV, draft in zip(p_NVs, kept, strict=True)]
        for (x, u), (y, v) in itertools.product(*both):
            verdicts = judge([ScriptedRow(u), ScriptedRow(v)], kept, torch.cat(p_NVs).log())
            first = [
                (*d.tokens[: r.num_accepted], r.next_token)[0]
                for d, r in zip(kept, verdicts, strict=True)
            ]
            found[tuple(first)] += a * b * x * y
    return found


def test_the_enumeration_misses_a_chooser_that_looks_at_the_drawn_token() -> None:
    p = conditional(31)
    own = [p(tuple(prompt)) for prompt in PROMPTS]
    wanted = {(x, y): float(own[0][x] * own[1][y]) for x in range(V) for y in range(V)}

    def q_of(draft: Draft) -> float:
        assert draft.probs_KV is not None
        return float(draft.probs_KV[0, draft.tokens[0]])

    assert_same(first_tokens(p, lambda one, two: [True, False]), wanted)
    looks = [
        lambda one, two: [q_of(one) >= 0.3, True],
        lambda one, two: [q_of(one) >= q_of(two), q_of(two) > q_of(one)],  # one slot for both
    ]
    for look in looks:
        with pytest.raises(AssertionError):
            assert_same(first_tokens(p, look), wanted)


# ---- in the decoding loop ----------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("costs", [None, COSTS, CostTable.roofline(64, neural=(0.2, 0.0))])
def test_planned_drafts_change_greedy_output(
    tiny_target: TargetModel,
    answers: dict[str, list[int]],
    batch_size: int,
    costs: CostTable | None,
) -> None:
    drafters = [NgramDrafter(), OracleDrafter(answers, (0, 2))]
    result = decode(
        tiny_target, requests(), drafters, planner=Planner(costs), batch_size=batch_size
    )
    assert [done.tokens for done in result.completions] == list(answers.values())
    sources = {r.source for done in result.completions for r in done.rounds if r.accepted}
    assert "oracle" in sources


def test_several_drafters_need_no_planner(
    tiny_target: TargetModel, answers: dict[str, list[int]]
) -> None:
    result = decode(tiny_target, requests(), [NgramDrafter(), OracleDrafter(answers)])
    assert [done.tokens for done in result.completions] == list(answers.values())


def test_one_drafter_without_costs_drafts_less_under_a_planner(
    tiny_target: TargetModel, answers: dict[str, list[int]]
) -> None:
    alone, planned = (
        decode(tiny_target, requests(), OracleDrafter(answers), planner=planner)
        for planner in (None, Planner())
    )
    rounds = [[done.rounds for done in result.completions] for result in (alone, planned)]
    assert rounds[0] == rounds[1]


def test_a_drafter_observes_another_ones_draft() -> None:
    q = conditional(5)
    drafters = [Scripted("sam", retrieved), Scripted("dlite", modelled(q), (0,))]
    hybrid = Hybrid(drafters, Planner(COSTS, guard=0.0))
    request = Request("r", [0, 1], 99)
    tokens = [0, 1]
    hybrid.start(request)
    for _ in range(12):
        (draft,) = hybrid.propose([View(request, tokens, 2)])
        hybrid.observe(request, draft, Verdict(0, (sum(tokens) * 7) % V))
        tokens.append((sum(tokens) * 7) % V)
    hybrid.finish(request)
    for drafter in drafters:
        assert {draft.source for draft in drafter.seen} == {drafter.name}


@pytest.mark.parametrize(
    "drafters",
    [
        [],
        [NgramDrafter(), NgramDrafter()],
        [Scripted("a", retrieved, (0,)), Scripted("b", retrieved, (1,))],
    ],
)
def test_a_list_that_no_planner_can_choose_from_is_refused(drafters: list[Drafter]) -> None:
    with pytest.raises(ValueError, match="give at least one, each name once, at most one draft"):
        Hybrid(drafters, Planner())
