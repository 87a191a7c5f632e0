"""The kernels compile for a GPU (sm_90) on a machine without one: the compiler refuses more than the interpreter."""

import importlib.util

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
VOCABULARY = 151_936


class NoDevice:
    """Stands for the CUDA driver as far as compilation asks it."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled(monkeypatch):
    """Launches compile and do not run; the list receives the kernels."""
    from triton import runtime
    from triton.runtime.jit import JITFunction

    run, kernels = JITFunction.run, []

    def compile_only(self, *args, grid, warmup, **options):
        kernels.append(run(self, *args, grid=grid, warmup=True, **options))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(runtime.driver, "_active", NoDevice())
    yield kernels
    assert kernels and all(len(kernel.asm["cubin"]) > 0 for kernel in kernels)


def integers(*shape, dtype=torch.int32):
    return torch.zeros(*shape, dtype=dtype)


def bfloat16(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "heads, head_dim, size, dtype, options",
    [
        ((32, 8), 128, 4096, torch.bfloat16, {}),
        ((32, 8), 128, 40, torch.bfloat16, {"window": 16, "softcap": 30.0}),
        ((9, 3), 64, 1024, torch.float32, {}),
        ((8, 4), 256, 1024, torch.float16, {"window": 512}),
    ],
)
def test_attention(compiled, heads, head_dim, size, dtype, options):
    from hf_dspark.kernels import attention

    query, cache = (
        torch.empty(8, heads[0], head_dim, dtype=dtype),
        torch.empty(1, heads[1], size, head_dim, dtype=dtype),
    )
    attention.ragged_attention(
        query, cache, cache, integers(2), integers(8), scale=0.1, max_tokens_per_row=8, **options
    )  # fmt: skip


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("noisy", [False, True])
def test_markov(compiled, num_rows, noisy):
    from hf_dspark.kernels import markov

    noise = {"noise": (integers(1, dtype=torch.long), 3), "temperature": torch.ones(num_rows)} if noisy else {}
    prev, base = integers(num_rows, dtype=torch.long), torch.empty(num_rows, VOCABULARY)
    w1, w2 = bfloat16(2, VOCABULARY, 256)
    markov.markov_step(prev, w1, w2, base, **noise)
    markov.markov_step(prev, None, None, base, **noise)


@pytest.mark.parametrize("num_tokens", [1, 64])
@pytest.mark.parametrize("shape", [(6144, 4096), (VOCABULARY, 64), (300, 70)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linear(compiled, num_tokens, shape, dtype):
    from hf_dspark.kernels import product

    x, weight = torch.empty(num_tokens, shape[1], dtype=dtype), torch.empty(shape, dtype=dtype)
    product.linear(x, weight)
    product.linear(x, weight, weight[:, 0].contiguous(), pdl=True)


@pytest.mark.parametrize("options", [{}, {"value_from_key": True, "value_norm": True}])
def test_context(compiled, options):
    from hf_dspark.kernels import context

    keys = bfloat16(5, 2, 8, 64, 128)
    projected, weight, rope = bfloat16(8, 5 * 2 * 1024), bfloat16(5, 128), bfloat16(8, 128)
    context.write_context(projected, weight, rope, rope, keys, keys, integers(8), integers(8), eps=1e-6, **options)


@pytest.mark.parametrize("sampled", [False, True])
def test_verify(compiled, sampled):
    from hf_dspark.kernels import verify

    seed = integers(1, dtype=torch.long)
    p, drafts = torch.empty(2, 8, VOCABULARY), integers(2, 7, dtype=torch.long)
    verify.accept_and_sample(drafts, p[:, :7], p, integers(2), seed=seed if sampled else None)
    verify.accept_and_sample(drafts, None, p, integers(2), seed=seed if sampled else None, row_starts=integers(3))
    verify.draw(p[:, 0], (seed, 1))


@pytest.mark.parametrize("top_k", [False, True])
def test_truncation(compiled, top_k):
    from hf_dspark.kernels import truncation

    ones = torch.ones(8)
    k = integers(8) if top_k else None
    truncation.truncated_probabilities(torch.empty(8, VOCABULARY), ones, k, ones.double(), ones)
