"""Ragged attention: kernel against reference."""

import itertools
import random

import pytest
import torch

from hf_dspark import kernels
from hf_dspark.kernels import attention, reference

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def case(device, counts, heads, head_dim, size, dtype=torch.float32, padding=0):
    """Arguments with random limits; whatever no token may see is NaN, and the cache is a slice of a larger one."""
    num_heads, num_kv_heads = heads
    num_rows, num_tokens = len(counts), sum(counts) + padding
    query = torch.randn(num_tokens, num_heads, head_dim, dtype=dtype)
    keys, values = torch.randn(2, 3, num_rows, num_kv_heads, size, head_dim, dtype=dtype)[:, 1]
    starts = [0, *itertools.accumulate(counts)]
    limits = torch.randint(-1, size, (num_tokens,))
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        if end > start:
            limits[start:end] = torch.randint(-1, random.randint(0, size), (end - start,))
            behind = int(limits[start:end].max()) + 1
            keys[row, :, behind:] = values[row, :, behind:] = float("nan")
    tensors = query, keys, values, torch.tensor(starts, dtype=torch.int32), limits.int()
    return tuple(tensor.to(device) for tensor in tensors)


def compare(arguments, max_tokens, **options):
    options = {"scale": 0.3, "max_tokens_per_row": max_tokens} | options
    poisoned = torch.full_like(arguments[0], float("nan"))
    result = kernels.ragged_attention(*arguments, out=poisoned, **options)
    expected = reference.ragged_attention(*(t.double() if t.is_floating_point() else t for t in arguments), **options)
    torch.testing.assert_close(
        result.double(), expected, atol=TOLERANCE[arguments[0].dtype], rtol=TOLERANCE[arguments[0].dtype]
    )


SHAPES = [((4, 4), 16), ((4, 2), 64), ((6, 2), 80), ((8, 1), 32), ((9, 3), 128), ((2, 1), 256)]


@pytest.mark.parametrize("seed", range(12))
def test_random_rows(device, seed):
    torch.manual_seed(seed)
    random.seed(seed)
    heads, head_dim = SHAPES[seed % len(SHAPES)]
    counts = [random.choice([0, 1, 2, 5]) for _ in range(random.randint(1, 3))]
    size = random.choice([1, 17, 64, 150])
    dtype = random.choice([torch.float32, torch.float16])
    options = {"window": random.choice([None, 1, 7, 100]), "softcap": random.choice([None, None, 5.0])}
    compare(case(device, counts, heads, head_dim, size, dtype, padding=random.choice([0, 3])), 5, **options)


@pytest.mark.parametrize("seed", range(4))
def test_windows_that_count_back_from_elsewhere(device, seed):
    torch.manual_seed(seed)
    random.seed(seed)
    arguments = case(device, [4, 0, 3], ((4, 2), (6, 2))[seed % 2], 32, 150, padding=2)
    origins = arguments[4] - torch.randint(0, 6, arguments[4].shape, device=device).int()
    compare(arguments, 4, window=(1, 7, 40, 100)[seed], origins=origins)


def test_window_one_and_limit_zero(device):
    query, keys, values, starts, _ = case(device, [4], (2, 1), 32, 90)
    keys, values = torch.randn_like(keys), torch.randn_like(values)
    limits = torch.tensor([0, 1, 63, 89], dtype=torch.int32, device=device)
    result = kernels.ragged_attention(query, keys, values, starts, limits, scale=1.0, window=1, max_tokens_per_row=4)
    expected = values[0, 0, limits.long()]
    torch.testing.assert_close(result, expected[:, None].expand(-1, 2, -1))


def test_no_token_at_all_and_a_token_that_sees_nothing(device):
    arguments = case(device, [0, 0], (2, 1), 16, 20, padding=2)
    assert torch.equal(kernels.ragged_attention(*arguments, scale=1.0, max_tokens_per_row=3), arguments[0] * 0)
    query, keys, values, starts, limits = case(device, [2], (2, 1), 16, 20)
    limits.fill_(-1)
    result = kernels.ragged_attention(query, keys, values, starts, limits, scale=1.0, max_tokens_per_row=2)
    assert torch.equal(result, query * 0)


def in_parts(monkeypatch, splits, block_n=16):
    """Rows are dealt out to `splits` parts, `block_n` slots at a time."""
    tiles = attention._tiles
    monkeypatch.setattr(attention, "_tiles", lambda *shapes: tiles(*shapes)._replace(splits=splits, block_n=block_n))


@pytest.mark.parametrize("splits", [1, 3, 8])
@pytest.mark.parametrize("window", [None, 40])
def test_splits_and_several_blocks_of_tokens(device, monkeypatch, splits, window):
    """The same rows in 1, 3 or 8 parts; 20 tokens of 4 heads need two blocks."""
    in_parts(monkeypatch, splits)
    compare(case(device, [20, 1, 0], (8, 2), 32, 130, padding=1), 20, window=window)


@pytest.mark.parametrize("splits, block_n", [(1, 16), (4, 16), (3, 64), (16, 16)])
def test_parts_of_rows_of_all_lengths(device, monkeypatch, splits, block_n):
    """Rows of no slot, one slot, exactly full parts and one slot more, in one call, with padded tokens."""
    in_parts(monkeypatch, splits, block_n)
    lengths = [0, 1, 16, 17, 48, 49, 150]
    query, keys, values, starts, limits = case(device, [2] * len(lengths), (4, 2), 32, 150, padding=5)
    keys, values = torch.randn_like(keys), torch.randn_like(values)
    for row, length in enumerate(lengths):
        keys[row, :, length:] = values[row, :, length:] = float("nan")
        limits[2 * row], limits[2 * row + 1] = length - 2, length - 1
    compare((query, keys, values, starts, limits), 2)


def test_parts_of_an_earlier_call_are_not_merged(device, monkeypatch):
    """Long rows leave their parts in the workspace; short rows after them have fewer. Equal calls give equal bits."""
    in_parts(monkeypatch, 8)
    query, keys, values, starts, _ = case(device, [2, 2], (4, 2), 32, 140)
    keys, values = torch.randn_like(keys), torch.randn_like(values)
    long, short = (
        (query, keys, values, starts, torch.tensor(limits, dtype=torch.int32, device=device))
        for limits in ([139, 139, 139, 139], [20, 0, 3, 17])
    )
    workspace = kernels.attention_workspace(long[0], long[1], 2)
    options = {"scale": 0.3, "max_tokens_per_row": 2, "workspace": workspace}
    fresh = kernels.ragged_attention(*short, **options)
    kernels.ragged_attention(*long, **options)
    assert torch.equal(kernels.ragged_attention(*short, **options), fresh)
    compare(short, 2, workspace=workspace)


def test_row_is_the_same_bits_in_any_company(device, monkeypatch):
    in_parts(monkeypatch, 4)
    arguments = case(device, [3, 4, 2], (4, 2), 32, 120, torch.float16)
    query, keys, values, starts, limits = arguments
    alone = torch.tensor([0, 0, 4, 4], dtype=torch.int32, device=device)
    together = kernels.ragged_attention(*arguments, scale=0.3, max_tokens_per_row=4)
    result = kernels.ragged_attention(query[3:7], keys, values, alone, limits[3:7], scale=0.3, max_tokens_per_row=4)
    assert torch.equal(result, together[3:7])


def test_workspace_is_shared(device):
    arguments = case(device, [3, 2], (4, 2), 32, 100)
    workspace = kernels.attention_workspace(arguments[0], arguments[1], 3)
    workspace.fill_(float("nan"))
    compare(arguments, 3, workspace=workspace)
    compare(arguments, 3, workspace=workspace, window=9)


@pytest.mark.parametrize(
    "heads, head_dim, max_tokens", [((32, 8), 128, 8), ((40, 8), 128, 8), ((9, 3), 64, 8), ((8, 4), 256, 17)]
)
@pytest.mark.parametrize("size", [1024, 5000])
def test_bfloat16_models(cuda, heads, head_dim, max_tokens, size):
    counts = [max_tokens, 0, 3, 1]
    compare(case(cuda, counts, heads, head_dim, size, torch.bfloat16), max_tokens, scale=head_dim**-0.5)
    compare(
        case(cuda, counts, heads, head_dim, size, torch.bfloat16, padding=5),
        max_tokens, scale=head_dim**-0.5, window=512, softcap=50.0,
    )  # fmt: skip


def test_offsets_beyond_32_bits(cuda):
    cache = torch.empty(3, 1, 9_000_000, 128, dtype=torch.bfloat16, device=cuda)
    cache[2, :, :300].normal_()
    query = torch.randn(2, 4, 128, dtype=torch.bfloat16, device=cuda)
    starts = torch.tensor([0, 0, 0, 2], dtype=torch.int32, device=cuda)
    limits = torch.tensor([200, 299], dtype=torch.int32, device=cuda)
    options = {"scale": 0.1, "max_tokens_per_row": 2}
    result = kernels.ragged_attention(query, cache, cache, starts, limits, **options)
    torch.testing.assert_close(
        result, reference.ragged_attention(query, cache, cache, starts, limits, **options), atol=1e-2, rtol=1e-2
    )


def test_graph_replays_with_other_rows(cuda):
    arguments = case(cuda, [2, 4, 0], (8, 2), 64, 700, torch.float16, padding=2)
    options = {"scale": 0.2, "max_tokens_per_row": 4}
    out = torch.empty_like(arguments[0])
    kernels.ragged_attention(*arguments, out=out, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.ragged_attention(*arguments, out=out, **options)
    for counts in ([4, 0, 4], [0, 0, 1], [1, 1, 1]):
        padding = len(out) - sum(counts)
        for there, here in zip(arguments, case(cuda, counts, (8, 2), 64, 700, torch.float16, padding), strict=True):
            there.copy_(here)
        graph.replay()
        torch.testing.assert_close(out, reference.ragged_attention(*arguments, **options), atol=4e-3, rtol=4e-3)


def test_inside_torch_compile(cuda):
    arguments = case(cuda, [3, 1], (4, 2), 64, 300, torch.float16)

    @torch.compile(fullgraph=True)
    def layer(query, *others):
        return kernels.ragged_attention(query * 2, *others, scale=0.2, max_tokens_per_row=3) + 1

    expected = reference.ragged_attention(arguments[0] * 2, *arguments[1:], scale=0.2, max_tokens_per_row=3) + 1
    torch.testing.assert_close(layer(*arguments), expected, atol=4e-3, rtol=4e-3)
