"""The paper's Appendix A: a decision to verify x_k must not look at x_k, or the text is biased."""

import numpy as np
import scipy.stats
import torch

from hf_dspark import sampling
from hf_dspark.scheduling.scheduler import PrefixScheduler

SPS = {1: 1.0, 2: 0.5, 3: 0.45}
P, Q, TOKENS = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5]), 6_000


class PaperCosts:
    def steps_per_second(self, batch_tokens):
        return SPS[batch_tokens]


def hindsight(scheduler, survival):
    """The anticipating variant: the best number of drafts by current survivals."""
    survival = torch.tensor(survival)
    values = [(1 + float(survival[0, :n].sum())) * SPS[1 + n] for n in range(3)]
    return [values.index(max(values))]


def lagged(scheduler, survival):
    lengths = scheduler.schedule(survival)
    scheduler.update(survival)
    return lengths


def threshold(scheduler, survival):
    """Static truncation of c_k at 0.5."""
    c = torch.tensor(survival[0]) / torch.tensor([1.0, *survival[0][:-1]])
    return [int((c >= 0.5).long().cumprod(0).sum())]


def first_tokens(decide, is_lagged=False, seed=0) -> tuple[torch.Tensor, set[int]]:
    """Counts of the first token of rounds whose second draft is promising after x_1 = 0 only; the lengths seen."""
    scheduler = PrefixScheduler(PaperCosts(), lagged=is_lagged)
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.multinomial(Q, TOKENS, replacement=True, generator=generator)
    own = torch.multinomial(P, TOKENS, replacement=True, generator=generator)
    uniform = torch.rand(TOKENS, generator=generator)
    residual = int(sampling.next_distribution(P[None], Q[None]).argmax())  # all of it lies on one token
    counts, lengths = torch.zeros(2), set()
    for x, alone, u in zip(drafts.tolist(), own.tolist(), uniform, strict=True):
        (length,) = decide(scheduler, [[0.8, 0.8 * (0.9 if x == 0 else 0.1)]])
        lengths.add(length)
        if length == 0:
            token = alone
        else:
            accepted = sampling.accept(torch.tensor([[x]]), Q[None, None], P[None, None], u[None, None])
            token = x if int(accepted) else residual
        counts[token] += 1
    return counts, lengths


def p_value(counts, probabilities):
    return float(scipy.stats.chisquare(counts.numpy(), TOKENS * np.array(probabilities)).pvalue)


RIGHT, BIASED = (0.7, 0.3), (0.85, 0.15)


def test_algorithm_1_keeps_the_distribution():
    counts, lengths = first_tokens(lambda scheduler, survival: scheduler.schedule(survival))
    assert lengths == {0}, "one draft lowers Θ from 1 to 0.9, so the second, after which it might rise, is never read"
    assert p_value(counts, RIGHT) > 1e-3 and p_value(counts, BIASED) < 1e-6


def test_lagged_budgets_keep_the_distribution():
    counts, lengths = first_tokens(lagged, is_lagged=True)
    assert lengths == {0, 2}
    assert p_value(counts, RIGHT) > 1e-3


def test_thresholds_keep_the_distribution():
    counts, lengths = first_tokens(threshold)
    assert lengths == {1, 2}
    assert p_value(counts, RIGHT) > 1e-3


def test_the_best_number_in_hindsight_does_not():
    counts, lengths = first_tokens(hindsight)
    assert lengths == {0, 2}
    assert p_value(counts, BIASED) > 1e-3 and p_value(counts, RIGHT) < 1e-6
