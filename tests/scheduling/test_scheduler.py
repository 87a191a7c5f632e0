"""`PrefixScheduler`: against brute force, the lagged mode, gains, parking, arguments."""

import itertools
import math
import random
import time

import numpy as np
import pytest
import torch

from hf_dspark.scheduling.scheduler import MOST_PARKED_ROUNDS, PARKED_ROUNDS, PROBE_ROUNDS, PrefixScheduler


class Table:
    """A cost model that is nothing but `steps_per_second`."""

    def __init__(self, speed):
        self.speed = speed
        self.asked = []

    def steps_per_second(self, batch_tokens):
        self.asked.append(batch_tokens)
        return self.speed(batch_tokens)


class PairTable(Table):
    """One that also knows the speed without drafts."""

    def __init__(self, speed, plain):
        super().__init__(speed)
        self.plain = plain

    def plain_steps_per_second(self, num_rows):
        return self.plain


def random_survival(rng, rows, gamma):
    return [list(itertools.accumulate((rng.random() for _ in range(gamma)), lambda a, c: a * c)) for _ in range(rows)]


def theta(cost, survival, lengths):
    tau = len(survival) + sum(sum(a[:n]) for a, n in zip(survival, lengths, strict=True))
    return tau * cost.speed(len(survival) + sum(lengths))


def brute_force(cost, survival):
    choices = itertools.product(range(len(survival[0]) + 1), repeat=len(survival))
    return max(choices, key=lambda lengths: theta(cost, survival, lengths))


# ---- Algorithm 1


def test_equals_brute_force_where_theta_has_one_top():
    """Costs linear in the tokens: Θ rises, then falls, because survivals are taken in falling order."""
    rng = random.Random(0)
    lengths_seen = set()
    for _ in range(1000):
        rows, gamma = rng.randint(1, 3), rng.randint(1, 4)
        base, slope = rng.uniform(0.2, 5), rng.choice([0.01, 0.3, 1.0]) * rng.random()
        cost = Table(lambda b, base=base, slope=slope: 1 / (base + slope * b))
        survival = random_survival(rng, rows, gamma)
        expected = brute_force(cost, survival)
        found = PrefixScheduler(cost).schedule(survival)
        assert theta(cost, survival, found) == pytest.approx(theta(cost, survival, expected), rel=1e-12)
        assert tuple(found) == expected
        assert cost.asked == list(range(rows, rows * (1 + gamma) + 1)), "each size once, as a single integer"
        lengths_seen.update(found)
        lagged = PrefixScheduler(cost, lagged=True)
        for _ in range(2):
            lagged.update(survival)
        assert lagged.budget() == sum(expected) and tuple(lagged.schedule(survival)) == expected
    assert lengths_seen == {0, 1, 2, 3, 4}


def test_stops_at_the_first_draft_that_does_not_raise_theta():
    """A staircase: the scan stops before the step, the lagged mode finds the better place behind it."""
    stairs = Table(lambda b: 1 / (1 + 0.5 * (b > 2)))  # 3 tokens and more cost half as much again
    survival = [[0.9, 0.7, 0.7, 0.6]]
    assert PrefixScheduler(stairs).schedule(survival) == [1]
    assert brute_force(stairs, survival) == (4,)
    lagged = PrefixScheduler(stairs, lagged=True)
    lagged.update(survival), lagged.update(survival)
    assert lagged.budget() == 4


def test_equal_theta_is_no_gain():
    assert PrefixScheduler(Table(lambda b: 1 / b)).schedule([[1.0, 1.0]]) == [0]
    assert PrefixScheduler(Table(lambda b: 1.0)).schedule([[0.5, 0.0]]) == [1]


def test_flat_costs_verify_everything():
    survival = random_survival(random.Random(1), 5, 7)
    assert PrefixScheduler(Table(lambda b: 3.0)).schedule(survival) == [7] * 5


def test_ties_go_to_the_lower_row():
    scheduler = PrefixScheduler(Table(lambda b: 1.0))
    assert scheduler.schedule([[0.5, 0.5]] * 3, budget=1) == [1, 0, 0]
    assert scheduler.schedule([[0.5, 0.5]] * 3, budget=4) == [2, 2, 0]
    assert scheduler.schedule([[0.5, 0.4], [0.9, 0.5], [0.5, 0.5]], budget=2) == [1, 1, 0]


def test_forms_of_survival():
    values = [[0.9, 0.5], [0.6, 0.1]]
    scheduler = PrefixScheduler(Table(lambda b: 1 / (5 + b)))
    tensor = torch.tensor(values)
    forms = values, np.array(values), np.array(values, dtype=np.float32), tensor, tensor.bfloat16(), tensor.half()
    assert {tuple(scheduler.schedule(form)) for form in forms} == {(2, 1)}
    assert scheduler.schedule(torch.zeros(0, 3)) == []
    # The product of a long row may rise by rounding; a kept length is still a prefix.
    assert scheduler.schedule([[0.9, 0.5, 0.5 + 1e-7]], budget=2) == [2]


def test_a_cost_model_may_ask_for_the_number_of_rows():
    class ByRows:
        def steps_per_second(self, batch_tokens, num_rows=None):
            seen.append(num_rows)
            return 1.0

    seen = []
    PrefixScheduler(ByRows()).schedule([[0.5, 0.5]] * 3)
    assert set(seen) == {3}


def test_256_rows_take_less_than_a_millisecond():
    survival = torch.rand(256, 7, generator=torch.Generator().manual_seed(0)).cumprod(-1)
    scheduler = PrefixScheduler(Table(lambda b: 1 / (1 + 0.002 * b)))
    scheduler.schedule(survival)
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        lengths = scheduler.schedule(survival)
        seconds.append(time.perf_counter() - started)
    assert 0 < sum(lengths) < 256 * 7
    # The best of 20, as other processes may use the machine.
    assert min(seconds) < 1e-3


# ---- lagged mode


def test_lagged_budget_comes_from_two_updates_ago():
    cost = Table(lambda b: 1 / (1 + 0.3 * b))
    scheduler = PrefixScheduler(cost, lagged=True)
    rng = random.Random(2)
    history = [random_survival(rng, 4, 5) for _ in range(6)]
    best = [sum(PrefixScheduler(cost).schedule(survival)) for survival in history]
    assert len(set(best)) > 2
    budgets = []
    for survival in history:
        budgets.append(scheduler.budget())
        lengths = scheduler.schedule(survival)
        assert sum(lengths) == (20 if budgets[-1] is None else budgets[-1])
        scheduler.update(survival)
    assert budgets == [None, None, *best[:4]]


def test_current_survivals_choose_who_gets_the_budget():
    scheduler = PrefixScheduler(Table(lambda b: 1.0), lagged=True)
    rng = random.Random(3)
    for _ in range(50):
        survival = random_survival(rng, 4, 3)
        budget = rng.randint(0, 15)
        lengths = scheduler.schedule(survival, budget=budget)
        assert sum(lengths) == min(budget, 12), "never more than rows × γ"
        kept = [a[j] for a, n in zip(survival, lengths, strict=True) for j in range(n)]
        cut = [a[j] for a, n in zip(survival, lengths, strict=True) for j in range(n, 3)]
        assert min(kept, default=1) >= max(cut, default=0)


def test_rows_may_end_between_updates():
    scheduler = PrefixScheduler(Table(lambda b: 1.0), lagged=True)
    scheduler.update([[0.5, 0.5]] * 4)
    scheduler.update([[0.5, 0.5]] * 2)
    assert scheduler.budget() == 8
    assert scheduler.schedule([[0.5, 0.5]]) == [2]


def test_fresh_has_no_history_and_keeps_the_costs():
    cost = Table(lambda b: 1 / b)
    scheduler = PrefixScheduler(cost, lagged=True, min_gain=0.1)
    scheduler.update([[0.5]]), scheduler.update([[0.5]])
    asked = len(cost.asked)
    new = scheduler.fresh()
    assert (new.lagged, new.min_gain, new.budget()) == (True, 0.1, None)
    new.update([[0.5]])
    assert scheduler.budget() is not None and len(cost.asked) == asked


# ---- minimum gain, parking


def test_min_gain_drops_drafts_only_where_that_pays():
    """Θ of 0..3 drafts: 1, 0.98, 0.97, 0.7; a loss below 5 % of the best is borne, a larger one is not."""
    tau = [1, 1.9, 2.7, 3.4]
    speeds = {b: value / tau[b - 1] for b, value in zip((1, 2, 3, 4), (1, 0.98, 0.97, 0.7), strict=True)}
    survival = [[0.9, 0.8, 0.7]]
    assert PrefixScheduler(Table(speeds.get)).schedule(survival) == [0]
    assert PrefixScheduler(Table(speeds.get), min_gain=0.05).schedule(survival) == [2]


def test_min_gain_keeps_a_lagged_budget_until_another_pays():
    def slower(b):
        return 1 / (1 + 0.02 * b)

    scheduler = PrefixScheduler(Table(slower), lagged=True, min_gain=0.05)
    budgets = []
    # Whole blocks first; survivals that want 3 of 4 by little, then 0 by much, then the first ones again.
    for survival in ([[0.9, 0.5, 0.1, 0.01]], [[0.01, 0.0, 0.0, 0.0]], [[0.03, 0.0, 0.0, 0.0]]):
        scheduler.update(survival), scheduler.update(survival)
        budgets.append(scheduler.budget())
    assert budgets == [4, 0, 0]
    free = PrefixScheduler(Table(slower), lagged=True)
    free.update([[0.9, 0.5, 0.1, 0.01]]), free.update([[0.03, 0.0, 0.0, 0.0]])
    assert free.budget() == 3
    free.update([[0.03, 0.0, 0.0, 0.0]])
    assert free.budget() == 1


def rounds(scheduler, survival, count):
    """Which of `count` rounds had a draft."""
    drafted = []
    for _ in range(count):
        drafted.append(scheduler.should_draft())
        if drafted[-1]:
            scheduler.schedule(survival)
            if scheduler.lagged:
                scheduler.update(survival)
    return drafted


@pytest.mark.parametrize("is_lagged", [False, True])
def test_parks_and_probes_while_drafting_loses(is_lagged):
    # A round costs twice a plain step, and half a draft survives.
    scheduler = PrefixScheduler(PairTable(lambda b: 1.0, plain=2.0), lagged=is_lagged)
    count = 4 * (PROBE_ROUNDS + MOST_PARKED_ROUNDS)
    runs = [(drafted, len(list(run))) for drafted, run in itertools.groupby(rounds(scheduler, [[0.5, 0.1]], count))]
    pauses = [length for drafted, length in runs[:-1] if not drafted]
    assert pauses[:3] == [PARKED_ROUNDS, 2 * PARKED_ROUNDS, 4 * PARKED_ROUNDS]
    assert max(pauses) == MOST_PARKED_ROUNDS
    assert all(length == PROBE_ROUNDS for drafted, length in runs[:-1] if drafted)
    # Easier text: the next probe ends it.
    later = rounds(scheduler, [[0.9, 0.8]], MOST_PARKED_ROUNDS + 10 * PROBE_ROUNDS)
    assert all(later[MOST_PARKED_ROUNDS:]) and all(rounds(scheduler, [[0.9, 0.8]], 100))


def test_never_parks_while_drafting_wins_on_average():
    scheduler = PrefixScheduler(PairTable(lambda b: 1.0, plain=1.2))
    for survival in [[[0.9]], [[0.05]]] * 50:
        assert scheduler.should_draft()
        scheduler.schedule(survival)


def test_parks_when_nothing_is_verified_for_long():
    scheduler = PrefixScheduler(Table(lambda b: 1 / b))
    assert sum(rounds(scheduler, [[0.5]], PROBE_ROUNDS + PARKED_ROUNDS)) == PROBE_ROUNDS


# ---- arguments

WRONG = {
    "1-D": [0.5],
    "no slots": [[], []],
    "above 1": [[1.5]],
    "negative": [[-0.1]],
    "NaN": [[math.nan]],
    "conditional": [[0.5, 0.9]],
    "ragged": [[0.5], [0.5, 0.4]],
    "none": None,
    "text": "abc",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_survivals_are_refused(name):
    scheduler = PrefixScheduler(Table(lambda b: 1.0), lagged=True)
    for call in (scheduler.schedule, scheduler.update):
        with pytest.raises(ValueError):
            call(WRONG[name])


def test_wrong_arguments_are_refused():
    cost = Table(lambda b: 1.0)
    for gain in (-0.1, 1, math.nan, "0.1", True, None):
        with pytest.raises(ValueError, match="min_gain"):
            PrefixScheduler(cost, min_gain=gain)
    with pytest.raises(ValueError, match="steps_per_second"):
        PrefixScheduler(None)
    scheduler = PrefixScheduler(cost)
    for budget in (-1, 1.5, "2", True):
        with pytest.raises(ValueError, match="budget"):
            scheduler.schedule([[0.5]], budget=budget)
    for call in (scheduler.budget, lambda: scheduler.update([[0.5]])):
        with pytest.raises(ValueError, match="lagged=True"):
            call()
    with pytest.raises(ValueError, match="`pending` must be 0 or 1, got 2"):
        PrefixScheduler(cost, lagged=True).budget(pending=2)
    for speed in (0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="speed"):
            PrefixScheduler(Table(lambda b, speed=speed: speed)).schedule([[0.5]])
