"""ECE, AUROC and Brier score against their definitions, written out, and on cases known by hand."""

import math
import random

import numpy as np
import pytest
import torch

from hf_dspark.evaluation.metrics import auroc, brier, ece


def slow_ece(predicted, observed, num_bins):
    bins = [[] for _ in range(num_bins)]
    for p, y in zip(predicted, observed, strict=True):
        bins[min(int(p * num_bins), num_bins - 1)].append((p, y))
    total = 0.0
    for members in filter(None, bins):
        mean_p, mean_y = (sum(column) / len(members) for column in zip(*members, strict=True))
        total += len(members) / len(predicted) * abs(mean_p - mean_y)
    return total


def slow_auroc(scores, labels):
    won, pairs = 0.0, 0.0
    for s, y in zip(scores, labels, strict=True):
        for t, z in zip(scores, labels, strict=True):
            won += y * (1 - z) * ((s > t) + 0.5 * (s == t))
            pairs += y * (1 - z)
    return won / pairs


@pytest.mark.parametrize("soft", [False, True])
def test_equal_to_the_definitions(soft):
    rng = random.Random(3)
    for _ in range(20):
        n = rng.randint(2, 40)
        predicted = [rng.choice([0.0, 0.2, 1.0, rng.random()]) for _ in range(n)]
        observed = [rng.random() if soft else float(rng.random() < 0.5) for _ in range(n - 2)] + [0.0, 1.0]
        assert ece(predicted, observed, num_bins=10) == pytest.approx(slow_ece(predicted, observed, 10))
        # A label is a share of an accepted and of a rejected draft, also in pairs with itself.
        assert auroc(predicted, observed) == pytest.approx(slow_auroc(predicted, observed))
        expected = sum((p - y) ** 2 for p, y in zip(predicted, observed, strict=True)) / n
        assert brier(predicted, observed) == pytest.approx(expected)


def test_known_cases():
    assert ece([0.9] * 10, [1] * 9 + [0]) == pytest.approx(0)
    assert ece([0.9] * 10, [0] * 10) == pytest.approx(0.9)
    assert ece([1.0], [0]) == 1.0, "1 belongs to the last bin"
    assert auroc([0.1, 0.2, 0.8], [0, 0, 1]) == 1.0
    assert auroc([0.8, 0.2, 0.1], [0, 0, 1]) == 0.0
    assert auroc([0.5, 0.5], [0, 1]) == 0.5
    assert auroc([0.5, 0.7], [1, 1]) is None
    assert brier([0.0, 1.0], [0, 1]) == 0.0


def test_a_temperature_moves_ece_and_brier_but_not_auroc():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(5000, generator=generator, dtype=torch.float64)
    labels = (torch.rand(5000, generator=generator) < logits.sigmoid()).double()
    assert ece(logits.sigmoid(), labels) < 0.03, "0.025 is the noise of 0/1 labels at this number"
    assert ece((3 * logits).sigmoid(), labels) > 0.05
    assert brier((3 * logits).sigmoid(), labels) > brier(logits.sigmoid(), labels)
    assert auroc(3 * logits, labels) == auroc(logits, labels) == pytest.approx(auroc(logits.sigmoid(), labels))


def test_takes_lists_arrays_and_tensors():
    values = [0.25, 0.75]
    forms = values, np.array(values), torch.tensor(values, dtype=torch.bfloat16), torch.tensor(values).requires_grad_()
    assert {ece(form, [0, 1]) for form in forms} == {0.25}


@pytest.mark.parametrize("metric", [ece, auroc, brier])
def test_wrong_numbers_are_refused(metric):
    for predicted, observed, text in (
        ([], [], "at least one"),
        ([0.5], [0.5, 0.5], "differ in number"),
        ([[0.5]], [[0.5]], "shape"),
        ([math.nan], [0.5], "finite"),
        ([0.5], [1.5], "0, 1"),
    ):
        with pytest.raises(ValueError, match=text):
            metric(predicted, observed)
    with pytest.raises(ValueError, match="num_bins"):
        ece([0.5], [1], num_bins=0)
