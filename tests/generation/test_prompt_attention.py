"""Attention of prompts on the fast path: several rows at a time give what each gives alone."""

import copy
import math

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import checks
import hf_dspark
import tiny
from hf_dspark.generation import attention
from hf_dspark.generation.attention import grouped, prompt_attention
from hf_dspark.generation.ragged_cache import FlatTokens

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def by_definition(query, keys, values, start, window, softcap):
    """[n, heads, HEAD_DIM] of tokens from position `start` on; softmax over the slots each of them sees."""
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (keys, values))
    scores = query @ keys.transpose(1, 2) * 0.3
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    behind = start + torch.arange(query.shape[1])[:, None] - torch.arange(keys.shape[1])
    seen = (behind >= 0) & (behind < (window or math.inf))
    return (scores.masked_fill(~seen, -math.inf).softmax(-1) @ values).transpose(0, 1)


@pytest.mark.parametrize("window, softcap", [(None, None), (5, None), (64, None), (None, 2.0)])
@pytest.mark.parametrize(
    "spans, calls",
    [
        ([(0, 0, 9), (1, 0, 9), (2, 0, 9)], 1),
        ([(0, 4, 5), (1, 0, 9), (2, 0, 3), (3, 0, 7)], 2),
        ([(0, 0, 30), (1, 0, 1), (2, 0, 1), (3, 0, 2)], 2),
        ([(1, 3, 4), (2, 2, 6)], 2),
    ],
)
def test_rows_together_equal_rows_alone(spans, calls, window, softcap, monkeypatch):
    torch.manual_seed(0)
    tokens, ends = FlatTokens.of(spans, 4, torch.device("cpu")), {row: start + n for row, start, n in spans}
    num_tokens, asked = len(tokens.rows), []
    query = torch.randn(HEADS, num_tokens, HEAD_DIM)
    stores = [torch.full((5, KV_HEADS, 40, HEAD_DIM), math.nan) for _ in range(2)]
    for row, end in ends.items():
        for store in stores:
            store[row, :, :end] = torch.randn(KV_HEADS, end, store.shape[-1])
    key, value = (store[tokens.rows, :, tokens.positions].transpose(0, 1) for store in stores)
    for name in ("_padded_attention", "_row_attention"):
        own = getattr(attention, name)
        monkeypatch.setattr(attention, name, lambda *args, own=own: asked.append(None) or own(*args))
    found = prompt_attention(query, key, value, tuple(stores), tokens, 0.3, window, softcap)
    parts = query.split([count for _, _, count in spans], dim=1)
    expected = [
        by_definition(part, *(store[row, :, : ends[row]] for store in stores), start, window, softcap)
        for part, (row, start, _) in zip(parts, spans, strict=True)
    ]
    torch.testing.assert_close(found, torch.cat(expected))
    assert len(asked) == (calls if window != 5 and softcap is None else len(spans))


def test_padding_is_never_longer_than_the_texts():
    lengths = torch.randint(1, 200, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    spans = [(row, 0, length) for row, length in enumerate(lengths)]
    groups = grouped(spans)
    assert [span for group in groups for span in group] == spans
    for group in groups:
        counts = [count for _, _, count in group]
        assert len(group) * max(counts) <= 2 * sum(counts)
    assert len(groups) < 30
    assert grouped([(0, 0, 5), (2, 0, 5)]) == [[(0, 0, 5)], [(2, 0, 5)]], "rows of a group are consecutive"


def test_a_soft_cap_that_the_target_goes_without_is_left_out_here_too(monkeypatch):
    """sdpa of older transformers takes `softcap` and ignores it; plain generate() is the measure."""
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def drops_softcap(*args, softcap=None, **kwargs):
        return sdpa(*args, **kwargs)

    target = copy.deepcopy(tiny.random_target("gemma2", layers=2))
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.q_proj.weight.mul_(30)  # scores that a cap changes
    draft = tiny.random_draft(target, taps=(-1, 0))
    inputs = checks.batch([list(range(1, 50)), [7, 5], list(range(9, 44))])
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    target.config._attn_implementation = "eager"
    capped = target.generate(**inputs, **options)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", drops_softcap)
    attention._drops_softcap.cache_clear()
    try:
        target.config._attn_implementation = "sdpa"
        expected = target.generate(**inputs, **options)
        with hf_dspark.record() as stats:
            found = target.generate(**inputs, **options, assistant_model=draft)
    finally:
        attention._drops_softcap.cache_clear()
    assert stats.path == "ragged" and torch.equal(found, expected)
    assert not torch.equal(expected, capped)
