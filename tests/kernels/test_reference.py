"""The torch references against the modules they stand for; what the kernels are then compared with."""

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
import warpers

import tiny
from hf_dspark import kernels, sampling
from hf_dspark.kernels import reference
from hf_dspark.layers import DSparkAttention


def test_attention_equals_sdpa():
    query, keys, values = torch.randn(5, 8, 32), torch.randn(1, 2, 40, 32), torch.randn(1, 2, 40, 32)
    limits = torch.tensor([30, 31, 32, 33, 34], dtype=torch.int32)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    slots = torch.arange(40)
    for window in (None, 6):
        visible = slots <= limits[:, None]
        if window is not None:
            visible &= slots > limits[:, None] - window
        expected = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys, values, attn_mask=visible, scale=0.2, enable_gqa=True
        )
        result = reference.ragged_attention(
            query, keys, values, starts, limits, scale=0.2, window=window, max_tokens_per_row=5
        )
        torch.testing.assert_close(result, expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"value_from_key": True}, {"value_from_key": True, "value_norm": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_context_equals_the_layer(options, dtype):
    config = tiny.random_draft(tiny.random_target()).config
    for name, value in options.items():
        setattr(config, name, value)
    layers = [DSparkAttention(config, i).to(dtype) for i in range(2)]
    for layer in layers:
        layer.k_norm.weight.data.uniform_(0.5, 1.5)
    parts, tokens, heads, head_dim = (
        len(layers[0].key_value_projections()),
        6,
        config.num_key_value_heads,
        config.head_dim,
    )
    projected = torch.randn(1, tokens, 2 * parts * heads * head_dim, dtype=dtype)
    cos, sin = torch.randn(2, 1, tokens, head_dim, dtype=dtype)
    keys, values = torch.zeros(2, 2, 1, heads, tokens, head_dim, dtype=dtype)
    reference.write_context(
        projected[0], torch.stack([layer.k_norm.weight.detach() for layer in layers]), cos[0], sin[0], keys, values,
        torch.zeros(tokens, dtype=torch.int32), torch.arange(tokens, dtype=torch.int32),
        eps=config.rms_norm_eps, **options,
    )  # fmt: skip
    for i, (layer, part) in enumerate(zip(layers, projected.chunk(2, dim=-1), strict=True)):
        expected = layer.keys_values(part, (cos, sin))
        assert torch.equal(keys[i], expected[0]) and torch.equal(values[i], expected[1])


# ---- random numbers


def test_philox_known_answers():
    """Known-answer vectors of Random123 for Philox4x32-10."""

    def words(key, *counters):
        return [int(word) for word in reference.philox(torch.tensor([key]), *(torch.tensor([c]) for c in counters))]

    full = 0xFFFFFFFF
    assert words(0, 0, 0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words(-1, full, full, full, full) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_noise_is_exponential_and_streams_differ():
    seed = torch.tensor([11])
    noise = reference.exponential(seed, 0, reference.DRAFT, 50, 400)
    assert scipy.stats.kstest(noise.flatten().double().numpy(), "expon").pvalue > 1e-3
    others = [
        reference.exponential(seed, 1, reference.DRAFT, 50, 400),
        reference.exponential(seed, 0, reference.RESIDUAL, 50, 400),
        reference.exponential(seed + 1, 0, reference.DRAFT, 50, 400),
        noise.roll(1, 0),
        noise.roll(1, 1),
    ]
    for other in others:
        assert abs(torch.corrcoef(torch.stack((noise.flatten(), other.flatten())))[0, 1]) < 0.03


def committed(shared: bool, num_rows: int = 40_000):
    """Counts of the first committed token over rounds whose residual noise is, or is not, the draft's own."""
    q = torch.tensor([0.5, 0.2, 0.2, 0.1]).expand(num_rows, -1)
    p = torch.tensor([0.1, 0.4, 0.2, 0.3]).expand(num_rows, 2, -1)
    seed = torch.tensor([3])
    drafts = reference.draw(q, (seed, 0))
    lengths = torch.ones(num_rows, dtype=torch.int32)
    accepted, tokens = reference.accept_and_sample(drafts[:, None], q[:, None], p, lengths, seed=seed)
    if shared:
        residual = sampling.next_distribution(p[:, 0], q)
        tokens = (residual / reference.exponential(seed, 0, reference.DRAFT, num_rows, 4)).argmax(-1)
    first = torch.where(accepted > 0, drafts, tokens)
    expected = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64) * num_rows
    return scipy.stats.chisquare(first.bincount(minlength=4), expected).pvalue


def test_independent_streams_are_lossless_and_shared_noise_is_not():
    assert committed(shared=False) > 1e-3
    assert committed(shared=True) < 1e-6


def test_greedy_acceptance():
    scores = torch.tensor([[[0.0, 1, 0], [1, 0, 1], [0, 0, 2]]]).expand(4, -1, -1)
    drafts = torch.tensor([[1, 0], [1, 2], [0, 0], [1, 0]])
    lengths = torch.tensor([2, 2, 2, 1], dtype=torch.int32)
    accepted, tokens = kernels.accept_and_sample(drafts, None, scores, lengths)
    assert accepted.tolist() == [2, 1, 0, 1] and tokens.tolist() == [2, 0, 1, 0]


# ---- truncation

ROWS = [
    {},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"top_k": 50},
    {"top_p": 0.9},
    {"min_p": 0.1, "temperature": 1.5},
    {"top_k": 7, "top_p": 0.5, "min_p": 0.2},
    {"top_p": 0.0},
    {"min_p": 1.0},
]


@pytest.mark.parametrize("ties", [False, True])
def test_truncation_equals_the_warpers(ties):
    logits = 3 * torch.randn(len(ROWS), 2000)
    logits = logits.round() if ties else logits

    def column(name, off, dtype):
        return torch.tensor([row.get(name, off) for row in ROWS], dtype=dtype)

    probabilities = reference.truncated_probabilities(
        logits, column("temperature", 1.0, torch.float32), column("top_k", 0, torch.int64),
        column("top_p", 1.0, torch.float64), column("min_p", 0.0, torch.float32),
    )  # fmt: skip
    for p, x, row in zip(probabilities, logits, ROWS, strict=True):
        warpers.check(p, x, **row)
        expected = warpers.warped(x, **row).softmax(-1)
        torch.testing.assert_close(p.sort().values, expected.sort().values)  # which of equal ones stay is open
