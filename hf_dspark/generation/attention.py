"""Attention over a `RaggedCache`, through transformers' own extension points."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..kernels import use_kernels
from .ragged_attention import ragged_attention
from .ragged_cache import FlatTokens, RaggedCache

NAME = "dspark_ragged"
# Longer stretches are prompts. The kernel for rounds takes them too, all rows in one launch, but it reads a key once
# for every 64 pairs of token and head.
MOST_DECODED = 32
SHORT = 512  # slots of prompts that it takes nonetheless: there, launches are what costs
Span = tuple[int, int, int]  # row, first position, count
MOST_SCORES = 2**22  # of a head in a group of rows: float32 on a GPU materialises them
PART = 1024  # query tokens of a prompt that are scored at once where the scores are materialised


def prompt_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    stores: tuple[torch.Tensor, torch.Tensor],
    tokens: FlatTokens,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of long stretches: `query`, `key`, `value` [heads, T, head_dim] -> [T, heads, head_dim].

    stores: keys and values [rows, kv_heads, capacity, head_dim], those of the tokens at hand included.
    """
    assert tokens.spans is not None
    outputs, first = [], 0
    simple = softcap is None and (window is None or window >= tokens.most)
    for spans in grouped(tokens.spans) if simple else [[span] for span in tokens.spans]:
        part = slice(first, first + sum(count for _, _, count in spans))
        first = part.stop
        if len(spans) > 1:
            states = [tensor[:, part] for tensor in (query, key, value)]
            rows = tokens.rows[part] - spans[0][0]
            outputs.append(_padded_attention(states, rows, tokens.positions[part], spans, scale))
        else:
            keys, values = (store[spans[0][0]] for store in stores)
            outputs.append(_row_attention(query[:, part], keys, values, spans[0], scale, window, softcap))
    return torch.cat(outputs)


def grouped(spans: list[Span]) -> list[list[Span]]:
    """Spans in groups of neighbours that begin their texts; their padding is no longer than they are."""
    groups: list[list[Span]] = []
    longest = total = 0
    for span in spans:
        row, start, count = span
        longest, total = max(longest, count), total + count
        follows = bool(groups) and groups[-1][-1][:2] == (row - 1, 0) and start == 0
        padded = (len(groups[-1]) + 1) * longest if follows else 0
        if 0 < padded <= 2 * total and padded * longest <= MOST_SCORES:
            groups[-1].append(span)
        else:
            groups.append([span])
            longest = total = count
    return groups


def _padded_attention(
    states: list[torch.Tensor], rows: torch.Tensor, places: torch.Tensor, spans: list[Span], scale: float
) -> torch.Tensor:
    """One launch for several rows that begin their texts; a causal mask hides the padding, which comes last.

    states: query, key, value [heads, T, head_dim] of the tokens at `places` [T] of `rows` [T], which count from 0.
    """
    padded, longest = [], max(count for _, _, count in spans)
    for tensor in states:
        new = tensor.new_zeros(len(spans), longest, tensor.shape[0], tensor.shape[2])
        new[rows, places] = tensor.transpose(0, 1)
        padded.append(new.transpose(1, 2))
    query, key, value = padded
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return output.transpose(1, 2)[rows, places]


def _row_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    span: Span,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    _, start, count = span
    end = start + count
    keys, values = keys[:, :end], values[:, :end]
    if softcap is None and (window is None or window >= end):
        # Of the backends that take a causal mask aligned at the end, none expands the KV heads.
        mask = None if start == 0 else causal_lower_right(count, end)
        output = F.scaled_dot_product_attention(
            query[None], keys[None], values[None], mask, is_causal=start == 0, scale=scale, enable_gqa=True
        )[0]
    else:
        output = _masked_attention(query, keys, values, start, scale, window, softcap)
    return output.transpose(0, 1)


def _masked_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of the tokens from position `start` on with a window or a soft-cap: [heads, n, head_dim] in and out."""
    count, end = query.shape[1], keys.shape[1]
    slots = torch.arange(end, device=query.device)
    positions = slots[start:, None]
    seen = slots <= positions
    if window is not None:
        seen &= slots > positions - window
    if softcap is None:
        return F.scaled_dot_product_attention(
            query[None], keys[None], values[None], seen, scale=scale, enable_gqa=True
        )[0]
    groups = query.shape[0] // keys.shape[0]
    output = torch.empty_like(query)
    for i in range(0, count, PART):  # [heads, n, n] scores of a long prompt would not fit
        rows = slice(i, i + PART)
        key, value = (x.repeat_interleave(groups, 0) for x in (keys, values))
        scores = softcap * torch.tanh(query[:, rows] @ key.transpose(1, 2) * scale / softcap)
        weights = scores.masked_fill(~seen[rows], float("-inf")).softmax(-1, dtype=torch.float32)
        output[:, rows] = weights.to(value.dtype) @ value
    return output


def attention_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: `query`, `key`, `value` [1, heads, T, head_dim] of the tokens at hand."""
    if (unknown := kwargs.get("s_aux")) is not None:
        raise NotImplementedError(f"attention sinks ({type(unknown).__name__} s_aux) are not supported")
    tokens = module.ragged_cache.tokens
    module.ragged_window = sliding_window
    softcap = None if module.ragged_drops_softcap else softcap
    stores = module.ragged_store.add(tokens, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    most = tokens.most
    if tokens.spans is not None and most > MOST_DECODED:
        if not _is_short(query, tokens.spans):
            states = query[0], key[0], value[0]
            return prompt_attention(*states, stores, tokens, scale, sliding_window, softcap)[None], None
        most = SHORT  # one bound for all: the kernel is compiled for the number of parts that follows from it
    output = ragged_attention(
        query[0].transpose(0, 1),
        *stores,
        tokens.row_starts,
        tokens.limits,
        scale,
        sliding_window,
        softcap,
        most,
    )
    return output[None], None


def _is_short(query: torch.Tensor, spans: list[Span]) -> bool:
    """Whether the kernel for rounds takes these prompts, too; its reference would go token by token."""
    return use_kernels(query) and max(start + count for _, start, count in spans) <= SHORT


def attend_raggedly(model: PreTrainedModel, cache: RaggedCache) -> None:
    """Make every attention module of `model` read and write its layer's store of `cache`."""
    drops_softcap = _drops_softcap(model.config.get_text_config(decoder=True)._attn_implementation)
    model.set_attn_implementation(NAME)
    for module in model.modules():
        if isinstance(index := getattr(module, "layer_idx", None), int):
            module.ragged_cache, module.ragged_store = cache, cache.stores[index]
            module.layer_idx = 0  # see RaggedCache
            module.ragged_drops_softcap = drops_softcap
            # A layer that was put in from elsewhere has a config of its own.
            if getattr(getattr(module, "config", None), "_attn_implementation", NAME) != NAME:
                module.config._attn_implementation = NAME


@functools.cache
def _drops_softcap(implementation: str) -> bool:
    """Whether a target's own attention is given a soft-cap and goes without: sdpa of older transformers does."""
    if implementation != "sdpa":
        return False
    states = torch.arange(8.0).view(1, 1, 4, 2)
    attend = ALL_ATTENTION_FUNCTIONS[implementation]
    try:
        outputs = [attend(nn.Module(), states, states, states, None, softcap=cap)[0] for cap in (0.1, None)]
    except ValueError:  # newer ones refuse
        return False
    return torch.equal(*outputs)


AttentionInterface.register(NAME, attention_function)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
