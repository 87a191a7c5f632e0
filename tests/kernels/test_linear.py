"""Product of few rows: kernel against reference."""

import pytest
import torch

from hf_dspark import kernels
from hf_dspark.kernels import product, reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def case(device, num_tokens, num_columns, size, dtype=torch.float32):
    """x and weight are slices of larger tensors; what lies beside them is NaN."""
    x = torch.full((num_tokens, size + 16), float("nan"), dtype=dtype)
    weight = torch.full((num_columns, size + 16), float("nan"), dtype=dtype)
    x[:, :size], weight[:, :size] = torch.randn(num_tokens, size), torch.randn(num_columns, size) * size**-0.5
    bias = torch.randn(num_columns, dtype=dtype)
    return x.to(device)[:, :size], weight.to(device)[:, :size], bias.to(device)


def compare(x, weight, bias=None, **options):
    poisoned = torch.full((len(x), len(weight) + 3), float("nan"), dtype=x.dtype, device=x.device)
    result = kernels.linear(x, weight, bias, out=poisoned[:, : len(weight)], **options)
    expected = reference.linear(x.double(), weight.double(), None if bias is None else bias.double())
    tolerance = TOLERANCE[x.dtype]
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)
    assert poisoned[:, len(weight) :].isnan().all()
    return result


@pytest.fixture(params=[1, 3])
def splits(request, monkeypatch):
    tiles = product._tiles
    monkeypatch.setattr(product, "_tiles", lambda *shape: tiles(*shape)._replace(splits=request.param))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "num_tokens, num_columns, size", [(1, 64, 768), (8, 130, 768), (5, 33, 70), (17, 200, 400), (64, 16, 1000)]
)
def test_equals_the_reference(device, splits, num_tokens, num_columns, size, dtype):
    x, weight, bias = case(device, num_tokens, num_columns, size, dtype)
    compare(x, weight)
    compare(x, weight, bias)


def test_tile_choice_of_the_kernel(device):
    """Whatever the tiles are for these shapes: with the inner dimension cut or not, columns left over or none."""
    for num_columns, size in ((100, 128), (1030, 200), (576, 1536)):
        compare(*case(device, 3, num_columns, size, torch.float16))


def test_rows_do_not_touch_each_other(device, splits):
    """Bit for bit: alone, among others, among NaN, in another place."""
    x, weight, bias = case(device, 40, 70, 800, torch.float16)
    together = kernels.linear(x, weight, bias)
    for rows in ([3], [3, 20], list(range(3, 20)), [39, 3]):
        assert torch.equal(kernels.linear(x[rows], weight, bias), together[rows])
    x[1] = float("nan")
    poisoned = kernels.linear(x, weight, bias)
    assert poisoned[1].isnan().all() and torch.equal(poisoned[2:], together[2:])


def test_counters_return_to_zero(device, monkeypatch):
    monkeypatch.setattr(product, "_tiles", lambda *shape: product.Tiles(32, 32, 4, stages=3, warps=4))
    x, weight, _ = case(device, 3, 90, 300, torch.float16)
    first = compare(x, weight)
    assert product._counters(x.device).count_nonzero() == 0
    assert torch.equal(compare(x, weight), first)


def test_no_rows_and_too_many(device):
    weight = torch.randn(20, 32, device=device)
    assert kernels.linear(weight[:0], weight).shape == (0, 20)
    with pytest.raises(ValueError, match="up to 64 rows, got 65"):
        kernels.linear(torch.randn(65, 32, device=device), weight)


SHAPES = [(6144, 4096), (4096, 12288), (10240, 4096), (151_936, 1024)]


@pytest.mark.parametrize("num_columns, size", SHAPES)
@pytest.mark.parametrize("pdl", [False, True])
def test_bfloat16_models(cuda, num_columns, size, pdl):
    for num_tokens in (1, 8, 33):
        compare(*case(cuda, num_tokens, num_columns, size, torch.bfloat16), pdl=pdl)


@pytest.mark.parametrize("num_columns, size", SHAPES)
def test_rows_of_models_do_not_touch_each_other(cuda, num_columns, size):
    x, weight, bias = case(cuda, 64, num_columns, size, torch.bfloat16)
    together = kernels.linear(x, weight, bias)
    for count in (1, 8, 16, 17):
        assert torch.equal(kernels.linear(x[:count], weight, bias), together[:count])


def test_offsets_beyond_32_bits(cuda):
    weight = torch.empty(300_000, 8192, dtype=torch.bfloat16, device=cuda)
    weight[-70:].normal_()
    x = torch.randn(3, 8192, dtype=torch.bfloat16, device=cuda)
    torch.testing.assert_close(kernels.linear(x, weight)[:, -70:], x @ weight[-70:].T, atol=1.0, rtol=1.6e-2)


@pytest.mark.parametrize("pdl", [False, True])
def test_graph_replays_a_chain(cuda, splits, pdl):
    """Each product reads the one before; a product that started too early would read the replay before."""
    x, weight, _ = case(cuda, 8, 2048, 2048, torch.bfloat16)
    back = torch.randn(2048, 2048, dtype=torch.bfloat16, device=cuda) / 45

    def chain(rows):
        for _ in range(10):
            rows = kernels.linear(kernels.linear(rows, weight, pdl=pdl), back, pdl=pdl)
        return rows

    chain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(x)
    for seed in range(5):
        torch.manual_seed(seed)
        x.copy_(torch.randn(x.shape))
        graph.replay()
        replayed, expected = captured.clone(), x
        for _ in range(10):
            expected = kernels.linear(kernels.linear(expected, weight), back)
        assert torch.equal(replayed, expected)


def test_inside_torch_compile(cuda):
    x, weight, bias = case(cuda, 4, 200, 512, torch.float16)

    @torch.compile(fullgraph=True)
    def layer(x):
        return kernels.linear(x * 2, weight, bias) + 1

    kernels.linear(x, weight)
    torch.testing.assert_close(layer(x), reference.linear(x * 2, weight, bias) + 1, atol=4e-3, rtol=4e-3)
