"""Truncation without sorting keeps exactly the tokens that transformers' warpers keep."""

import random

import pytest
import torch
import warpers

from hf_dspark import kernels
from hf_dspark.kernels.reference import truncated_probabilities as reference


def truncated(device, logits, rows):
    """`rows`: per row of `logits` a dict of options."""

    def column(name, off, dtype):
        return torch.tensor([row.get(name, off) for row in rows], dtype=dtype, device=device)

    return kernels.truncated_probabilities(
        logits.to(device), column("temperature", 1.0, torch.float32), column("top_k", 0, torch.int32),
        column("top_p", 1.0, torch.float64), column("min_p", 0.0, torch.float32),
    )  # fmt: skip


def check(device, logits, rows):
    return [warpers.check(p, x, **row) for p, x, row in zip(truncated(device, logits, rows), logits, rows, strict=True)]


KINDS = {
    "peaked": lambda size: 4 * torch.randn(size),
    "flat": lambda size: 0.2 * torch.randn(size),
    "wide": lambda size: 60 * torch.randn(size),
    "ties": lambda size: (2 * torch.randn(size)).round(),
    "heavy ties": lambda size: torch.randn(size).clamp(0.3, 0.4).round(decimals=1),
    "masked": lambda size: torch.where(torch.rand(size) < 0.9, float("-inf"), torch.randn(size)),
}


def options(size):
    return {
        "temperature": random.choice([0.1, 0.6, 1.0, 1.7]),
        "top_k": random.choice([0, 1, 5, 50, size // 3, 2 * size]),
        "top_p": random.choice([1.0, 0.95, 0.8, 0.5, 0.03, 0.9999]),
        "min_p": random.choice([0.0, 0.0, 0.05, 0.3, 1.0]),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [50, 2300])
def test_random_rows_keep_what_the_warpers_keep(device, kind, size):
    random.seed(f"{kind} {size}")
    rows = [options(size) for _ in range(6 if device == "cpu" else 100)]
    check(device, torch.stack([KINDS[kind](size) for _ in rows]), rows)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_one_filter_alone(device, name):
    random.seed(name)
    values = {"top_k": [1, 7, 400], "top_p": [0.02, 0.7, 0.99], "min_p": [0.01, 0.2, 0.9]}[name]
    logits = torch.stack([2 * torch.randn(1000), torch.randn(1000).round(), 30 * torch.randn(1000)])
    for value in values:
        rows = [{name: value}] * 3
        check(device, logits, rows)
        argument = torch.full((3,), value, device=device, dtype=torch.float64 if name == "top_p" else None)
        alone = kernels.truncated_probabilities(logits.to(device), torch.ones(3, device=device), **{name: argument})
        assert torch.equal(alone, truncated(device, logits, rows))


HARD = {
    "equal": lambda size: torch.zeros(size),
    "two values": lambda size: (torch.rand(size) < 0.3).float(),
    "one huge": lambda size: torch.randn(size).index_fill(0, torch.tensor([size // 2]), 80.0),
    "masked": lambda size: torch.randn(size).masked_fill(torch.rand(size) < 0.99, float("-inf")),
    "one left": lambda size: torch.full((size,), float("-inf")).index_fill(0, torch.tensor([size - 1]), -3.0),
    "lattice": lambda size: -torch.arange(size) / 256 - 1000,  # far from 0, and scores on edges of bins
}


@pytest.mark.parametrize("num_rows", [7, 15])  # few rows are cut into other slices than many
def test_hard_rows(device, num_rows):
    torch.manual_seed(num_rows)
    kinds, values = list(HARD.values()), [1e-6, 0.95, 0.5, 0.999999, 0.3]
    logits = torch.stack([kinds[row % 6](4501) for row in range(num_rows)])  # a list that registers do not hold
    rows = [{"top_p": values[row % 5]} for row in range(num_rows)]
    check(device, logits, rows)
    top_p = torch.tensor([row["top_p"] for row in rows], dtype=torch.float64, device=device)
    alone = kernels.truncated_probabilities(logits.to(device), torch.ones(num_rows, device=device), top_p=top_p)
    assert torch.equal(alone, truncated(device, logits, rows))
    assert torch.equal(alone > 0, reference(logits, torch.ones(num_rows), top_p=top_p.cpu()).to(device) > 0)


def test_ties_at_the_top_p_limit_keep_the_highest_ids(device):
    """Eight equal tokens share 0.8, ten others 0.2: p = 0.45 keeps four and a half eighths of 0.8, so five."""
    logits = torch.full((1, 18), 0.02).log()
    logits[0, 3:11] = torch.tensor(0.1).log()
    kept = truncated(device, logits, [{"top_p": 0.45}])[0] > 0
    assert kept.nonzero()[:, 0].tolist() == [6, 7, 8, 9, 10]
    assert check(device, logits, [{"top_p": 0.45}]) == [5]


@pytest.mark.parametrize("size", [10, 4501])
def test_all_equal(device, size):
    logits = torch.zeros(4, size)
    rows = [{"top_p": 0.3005}, {"top_k": 3}, {"top_k": 3, "top_p": 0.0}, {"min_p": 1.0, "top_p": 0.9999}]
    assert check(device, logits, rows) == [round(0.3005 * size + 0.5), size, 1, size]


def test_zero_and_minus_zero_are_equal(device):
    logits = torch.tensor([[0.0, -0.0, -1.0, 0.0, -0.0, -3.0]])
    assert check(device, logits, [{"top_k": 1}]) == [4]
    assert check(device, logits, [{"top_p": 0.3}]) == [2]


def test_everything_off_is_the_softmax(device):
    logits = torch.randn(3, 700, device=device)
    heat = torch.tensor([0.5, 1.0, 2.0], device=device)
    expected = (logits / heat[:, None]).softmax(-1)
    torch.testing.assert_close(kernels.truncated_probabilities(logits, heat), expected)
    torch.testing.assert_close(truncated(device, logits, [{"temperature": t} for t in heat.tolist()]), expected)


def test_rows_of_a_larger_buffer_in_half_precision(device):
    block = torch.randn(2, 3, 300).half()
    out = torch.full((2, 400), -1.0, device=device)
    heat, k = torch.ones(2, device=device), torch.tensor([5, 9], device=device)
    kernels.truncated_probabilities(block[:, 1].to(device), heat, k, out=out[:, :300])
    assert (out[:, 300:] == -1).all()
    for row in range(2):
        warpers.check(out[row, :300], block[row, 1], top_k=int(k[row]))


@pytest.mark.parametrize("scale", [0.3, 1.3, 6.0])
def test_a_model_s_vocabulary(cuda, scale):
    random.seed(scale)
    rows = [options(151_936) for _ in range(24)] + [{"top_k": 20, "top_p": 0.95, "temperature": 0.6}] * 4
    logits = scale * torch.randn(len(rows), 151_936)
    logits[::3] = logits[::3].bfloat16().float()  # as a bfloat16 head gives them: full of ties
    check(cuda, logits, rows)


def test_graph_replays_with_other_options(cuda):
    logits, heat = torch.randn(2, 5000, device=cuda), torch.ones(2, device=cuda)
    top_p = torch.full((2,), 0.5, dtype=torch.float64, device=cuda)
    kernels.truncated_probabilities(logits, heat, top_p=top_p)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernels.truncated_probabilities(logits, heat, top_p=top_p)
    for p in (0.9, 0.1, 1.0):
        top_p.fill_(p)
        logits.normal_()
        graph.replay()
        for row in range(2):
            warpers.check(captured[row], logits[row], top_p=p)
