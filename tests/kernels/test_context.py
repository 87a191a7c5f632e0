"""Write of the draft's context: kernel against reference."""

import pytest
import torch

from hf_dspark import kernels
from hf_dspark.kernels import reference


def written(function, device, num_kv_heads, head_dim, dtype, rope_dtype, **options):
    torch.manual_seed(1)
    layers, rows, size, tokens = 3, 4, 9, 7
    parts = 1 if options.get("value_from_key") else 2
    projected = torch.randn(tokens, layers * parts * num_kv_heads * head_dim, dtype=dtype)
    weight = torch.rand(layers, head_dim, dtype=dtype) + 0.5
    cos, sin = torch.randn(2, tokens, head_dim, dtype=rope_dtype)
    keys, values = torch.full((2, layers, rows + 1, num_kv_heads, size, head_dim), 7.0, dtype=dtype, device=device)
    place = torch.tensor([[0, 0, 2, -1, 3, 3, -1], [0, 8, 4, 2, 1, 0, 500]], dtype=torch.int32)
    keys, values = keys[:, 1:], values[:, 1:]
    inputs = (tensor.to(device) for tensor in (projected, weight, cos, sin))
    function(*inputs, keys, values, *place.to(device), eps=1e-6, **options)
    return keys, values


@pytest.mark.parametrize("num_kv_heads, head_dim", [(2, 8), (3, 80), (1, 128)])
@pytest.mark.parametrize("options", [{}, {"value_from_key": True}, {"value_from_key": True, "value_norm": True}])
def test_equals_the_reference(device, num_kv_heads, head_dim, options):
    shape = device, num_kv_heads, head_dim, torch.float32, torch.float32
    for here, there in zip(
        written(kernels.write_context, *shape, **options),
        written(reference.write_context, *shape, **options),
        strict=True,
    ):
        torch.testing.assert_close(here, there, atol=2e-6, rtol=2e-6)
        assert (here == 7).any(dim=-1).float().mean() > 0.5  # everything else is untouched


@pytest.mark.parametrize("dtype, unit", [(torch.float16, 2**-10), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("rope", ["own", "float32"])
def test_rounds_like_the_layer(device, dtype, unit, rope):
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter cuts bfloat16 instead of rounding it")
    shape = device, 2, 128, dtype, dtype if rope == "own" else torch.float32
    results = (written(module.write_context, *shape, value_norm=True) for module in (kernels, reference))
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(here, there, atol=4 * unit, rtol=2 * unit)
        assert (here != there).float().mean() < 0.01  # where 1/sqrt differs in the last place


def test_no_tokens(device):
    keys, values = torch.zeros(2, 1, 1, 1, 4, 8, device=device)
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    empty = torch.empty(0, 16, device=device)
    kernels.write_context(
        empty, torch.ones(1, 8, device=device), empty[:, :8], empty[:, :8], keys, values, nothing, nothing, eps=1e-6
    )
    assert keys.abs().max() == 0
