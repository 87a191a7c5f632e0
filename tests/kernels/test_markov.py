"""Markov step: kernel against reference, and its samples against their distribution."""

import pytest
import scipy.stats
import torch

from hf_dspark import kernels
from hf_dspark.kernels import reference


def case(device, num_rows, size, rank, dtype=torch.float32, embeddings=None):
    embeddings = embeddings or size
    w1 = torch.randn(embeddings, rank, dtype=dtype, device=device)
    w2 = torch.randn(size, rank, dtype=dtype, device=device)
    base = torch.randn(num_rows, 3, size, device=device)[:, 1]  # rows of a block's logits
    prev = torch.randint(0, embeddings, (num_rows, 4), device=device)[:, 1]  # a column of the drafts so far
    return prev, w1, w2, base


def compare(arguments, **options):
    tokens, logits = kernels.markov_step(*arguments, **options)
    expected_tokens, expected = reference.markov_step(*arguments, **options)
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=2e-5)
    assert tokens.tolist() == expected_tokens.tolist()
    return tokens, logits


@pytest.mark.parametrize(
    "num_rows, size, rank", [(1, 300, 16), (1, 70, 256), (3, 1000, 64), (17, 129, 24), (64, 50, 256)]
)
def test_greedy(device, num_rows, size, rank):
    compare(case(device, num_rows, size, rank, embeddings=size + 5))


@pytest.mark.parametrize("num_rows", [1, 5])
def test_the_lowest_of_equal_maxima(device, num_rows):
    size = 500
    w1, w2 = torch.zeros(2, size, 16, device=device)
    base = torch.zeros(num_rows, size, device=device)
    for row in range(num_rows):
        base[row, [499, 3 + 70 * row, 130 + 70 * row]] = 2.0
    tokens, _ = compare((torch.zeros(num_rows, dtype=torch.long, device=device), w1, w2, base))
    assert tokens.tolist() == [3 + 70 * row for row in range(num_rows)]
    base.fill_(float("-inf"))
    assert kernels.markov_step(tokens, w1, w2, base)[0].tolist() == [0] * num_rows


def test_without_head(device):
    prev, _, _, base = case(device, 4, 300, 16)
    tokens, logits = kernels.markov_step(prev, None, None, base)
    assert logits is base and torch.equal(tokens, base.argmax(-1))
    out = torch.empty(4, 300, device=device)
    compare((prev, None, None, base.half()), out=out)
    assert torch.equal(out, base.half().float())


def test_logits_into_a_block_of_a_larger_vocabulary(device):
    prev, w1, w2, base = case(device, 2, 90, 16)
    block = torch.full((2, 4, 100), float("-inf"), device=device)
    _, logits = compare((prev, w1, w2, base), out=block[:, 2, :90])
    assert logits.data_ptr() == block[:, 2].data_ptr()
    assert block[:, 2, 90:].max() == float("-inf") and block[:, [0, 1, 3]].max() == float("-inf")


def test_previous_token_beyond_the_vocabulary_and_nan(device):
    prev, w1, w2, base = case(device, 3, 90, 16)
    prev[1] = 1000
    compare((prev, w1, w2, base))
    base[2] = float("nan")
    assert 0 <= int(kernels.markov_step(prev, w1, w2, base)[0][2]) < 90


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("offset", [0, 1, 6])
def test_sampling_uses_the_keyed_noise(device, num_rows, offset):
    arguments = case(device, num_rows, 700, 16)
    seed = torch.tensor([2**40 + 77], device=device)
    temperature = torch.tensor([0.7, 0.0, 1.0, 30.0, 1e-3], device=device)[:num_rows]
    compare(arguments, noise=(seed, offset), temperature=temperature)


def test_samples_follow_the_softmax(device):
    """Chi-squared over 64 rows × 12 slots; a distribution of another temperature must fail the same test."""
    base = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 1.5], device=device).expand(64, -1).contiguous()
    temperature = torch.full((64,), 0.8, device=device)
    seed, prev = torch.tensor([5], device=device), torch.zeros(64, dtype=torch.long, device=device)
    counts = torch.zeros(6)
    for offset in range(12):
        tokens, _ = kernels.markov_step(prev, None, None, base, noise=(seed, offset), temperature=temperature)
        counts += tokens.cpu().bincount(minlength=6)

    def p_value(heat: float) -> float:
        expected = (base[0].cpu() / heat).double().softmax(-1) * counts.sum()
        return scipy.stats.chisquare(counts.double(), expected).pvalue

    assert p_value(0.8) > 1e-3
    assert p_value(2.0) < 1e-6


@pytest.mark.parametrize("num_rows", [1, 8, 32])
def test_bfloat16_model(cuda, num_rows):
    prev, w1, w2, base = case(cuda, num_rows, 151_936, 256, torch.bfloat16)
    tokens, logits = kernels.markov_step(prev, w1, w2, base)
    expected = reference.markov_step(prev, w1, w2, base)[1]
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)
    assert torch.equal(tokens, logits.argmax(-1))
    noise, heat = (torch.tensor([9], device=cuda), 3), torch.full((num_rows,), 0.9, device=cuda)
    tokens, logits = kernels.markov_step(prev, w1, w2, base, noise=noise, temperature=heat)
    scores = logits / 0.9 - reference.exponential(*noise, reference.DRAFT, *logits.shape).log()
    assert (scores.amax(-1) - scores.gather(1, tokens[:, None])[:, 0]).max() < 1e-3  # the device's log is approximate


def test_graph_replays_the_walk(cuda):
    """Seven captured steps, each reading the token of the one before; a new seed gives new tokens."""
    prev, w1, w2, base = case(cuda, 4, 5000, 64)
    seed, heat = torch.tensor([1], device=cuda), torch.ones(4, device=cuda)

    def walk():
        token, tokens = prev, []
        for k in range(7):
            token, _ = kernels.markov_step(token, w1, w2, base, noise=(seed, k), temperature=heat)
            tokens.append(token)
        return torch.stack(tokens)

    walk()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = walk()
    seen = []
    for value in (5, 6):
        seed.fill_(value)
        graph.replay()
        assert torch.equal(captured, walk())
        seen.append(captured.clone())
    assert not torch.equal(*seen)
