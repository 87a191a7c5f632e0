"""Acceptance and draws: kernel against reference, and samples against their distribution."""

import pytest
import scipy.stats
import torch

from hf_dspark import kernels
from hf_dspark.kernels import reference


def case(device, num_rows, gamma, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_rows, gamma, size, generator=generator).softmax(-1)
    p = torch.randn(num_rows, gamma + 1, size, generator=generator).softmax(-1)
    p[:, :-1] = 0.1 * p[:, :-1] + 0.9 * q
    drafts = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(num_rows, gamma)
    lengths = torch.randint(-1, gamma + 1, (num_rows,), generator=generator).int()
    return tuple(tensor.to(device) for tensor in (drafts, q, p, lengths))


def compare(*arguments, **options):
    accepted, tokens = kernels.accept_and_sample(*arguments, **options)
    expected = reference.accept_and_sample(*arguments, **options)
    assert accepted.tolist() == expected[0].tolist()
    assert tokens.tolist() == expected[1].tolist()
    return accepted, tokens


@pytest.mark.parametrize("gamma, size", [(1, 40), (4, 333), (7, 2500)])
@pytest.mark.parametrize("one_hot", [False, True])
def test_sampling(device, gamma, size, one_hot):
    drafts, q, p, lengths = case(device, 8, gamma, size)
    accepted, _ = compare(drafts, None if one_hot else q, p, lengths, seed=torch.tensor([2**35 + 1], device=device))
    assert (accepted <= lengths.clamp(min=0)).all()


@pytest.mark.parametrize("greedy", [False, True])
def test_flat_axis_of_verified_tokens(device, greedy):
    """Finished rows have no scores, others one more than their drafts."""
    drafts, q, p, lengths = case(device, 6, 4, 50, seed=3)
    lengths[:3] = torch.tensor([-1, 4, 0])
    counts = lengths + 1
    flat = torch.cat([p[row, : int(count)] for row, count in enumerate(counts)])
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0).int()))
    seed = None if greedy else torch.tensor([4], device=device)
    result = compare(drafts, q, flat, lengths, seed=seed, row_starts=starts)
    for here, there in zip(result, kernels.accept_and_sample(drafts, q, p, lengths, seed=seed), strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("size", [30, 2500])
def test_greedy_with_ties(device, size):
    scores = torch.randint(0, 3, (12, 5, size), device=device).float()
    drafts = scores[:, :4].argmax(-1)
    for row in range(8):
        drafts[row, row % 4] = (drafts[row, row % 4] + 1 + row) % size
    lengths = torch.tensor([4, 4, 4, 4, 2, 0, 1, -1, 4, 3, 0, -1], dtype=torch.int32, device=device)
    accepted, _ = compare(drafts, None, scores, lengths)
    assert accepted.tolist() == [0, 1, 2, 3, 0, 0, 1, 0, 4, 3, 0, 0]
    compare(drafts, None, scores.half(), lengths)


def test_certain_cases(device):
    """p = q accepts everything, a draft of probability 0 nothing, and the residual gives what p allows."""
    drafts, q, p, _ = case(device, 8, 3, 20)
    seed = torch.tensor([0], device=device)
    lengths = torch.full((8,), 3, dtype=torch.int32, device=device)
    same = torch.cat((q, p[:, 3:]), dim=1)
    assert compare(drafts, q, same, lengths, seed=seed)[0].tolist() == [3] * 8
    never = same.clone()
    never.scatter_(2, drafts[:, :1, None].expand(-1, 3, -1).contiguous(), 0.0)
    accepted, tokens = compare(drafts, q, never, lengths, seed=seed)
    assert accepted.tolist() == [0] * 8 and (tokens != drafts[:, 0]).all()
    # A rejected draft whose residual is empty: the token comes from p.
    point = torch.zeros(8, 4, 20, device=device)
    point[:, :, 5] = 0.5
    doubled = point[:, :3] * 2
    accepted, tokens = compare(torch.full_like(drafts, 5), doubled, point, lengths, seed=seed)
    assert (tokens == 5).all() and accepted.min() < 3


def test_draw(device):
    _, q, p, _ = case(device, 9, 1, 2500)
    noise = torch.tensor([123], device=device), 3
    assert kernels.draw(p[:, 0], noise).tolist() == reference.draw(p[:, 0], noise).tolist()
    sparse = torch.where(q[:, 0] > q[:, 0].quantile(0.99), q[:, 0], 0.0)
    tokens = kernels.draw(sparse, noise)
    assert (sparse.gather(1, tokens[:, None]) > 0).all()
    assert tokens.tolist() == reference.draw(sparse / 7, noise).tolist()  # weights need no sum of 1


def test_first_token_follows_the_target(cuda):
    """Drafts drawn with the same seed, accepted and corrected: the committed token has distribution p.

    Telling the kernel a q that the drafts were not drawn from must fail the same test. Without a GPU the reference
    stands for it (`test_reference.py`), which the kernel equals token for token.
    """
    num_rows, seed = 40_000, torch.tensor([7], device=cuda)
    q = torch.tensor([0.5, 0.2, 0.2, 0.1], device=cuda).expand(num_rows, 1, -1).contiguous()
    p = torch.tensor([0.1, 0.4, 0.2, 0.3], device=cuda).expand(num_rows, 2, -1).contiguous()
    drafts = reference.draw(q[:, 0], (seed, 0))[:, None]
    lengths = torch.ones(num_rows, dtype=torch.int32, device=cuda)

    def p_value(claimed_q):
        accepted, tokens = kernels.accept_and_sample(drafts, claimed_q, p, lengths, seed=seed)
        first = torch.where(accepted > 0, drafts[:, 0], tokens)
        expected = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64) * num_rows
        return scipy.stats.chisquare(first.cpu().bincount(minlength=4), expected).pvalue

    assert p_value(q) > 1e-3
    assert p_value(torch.full_like(q, 0.25)) < 1e-6


def test_graph_replays_with_a_new_seed(cuda):
    drafts, q, p, lengths = case(cuda, 8, 7, 30_000)
    seed = torch.tensor([1], device=cuda)
    kernels.accept_and_sample(drafts, q, p, lengths, seed=seed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernels.accept_and_sample(drafts, q, p, lengths, seed=seed)
    for value in range(5):
        seed.fill_(value)
        graph.replay()
        for here, there in zip(captured, reference.accept_and_sample(drafts, q, p, lengths, seed=seed), strict=True):
            assert torch.equal(here, there)
