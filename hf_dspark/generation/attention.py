"""Attention over a `RaggedCache`, through transformers' own extension points."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from .ragged_cache import FlatTokens, RaggedCache

NAME = "dspark_ragged"


def ragged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tokens: FlatTokens,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of flat tokens over the cached rows they belong to.

    Args:
        query: [heads, T, head_dim].
        keys, values: [rows, kv_heads, capacity, head_dim], the tokens' own entries included.
        window: a token sees only the last `window` positions.
        softcap: scores are capped to ±softcap.

    Returns:
        [T, heads, head_dim].
    """
    groups = query.shape[0] // keys.shape[1]
    outputs, start = [], 0
    for row, count in tokens.counts:
        positions = tokens.positions[start : start + count]
        end = int(positions[-1]) + 1
        slots = torch.arange(end, device=query.device)
        seen = slots <= positions[:, None]
        if window is not None:
            seen &= slots > positions[:, None] - window
        key, value = (store[row, :, :end].repeat_interleave(groups, 0) for store in (keys, values))
        part = query[:, start : start + count]
        if softcap is None:
            output = F.scaled_dot_product_attention(part[None], key[None], value[None], seen, scale=scale)[0]
        else:
            scores = torch.tanh(part @ key.transpose(1, 2) * scale / softcap) * softcap
            output = scores.masked_fill(~seen, float("-inf")).softmax(-1, dtype=torch.float32).to(value.dtype) @ value
        outputs.append(output.transpose(0, 1))
        start += count
    return torch.cat(outputs)


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
    """transformers' attention interface: `query` [1, heads, T, head_dim], `key` and `value` the whole store."""
    cache: RaggedCache = module.ragged_cache[0]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = ragged_attention(query[0], key, value, cache.tokens, scale=scale, window=sliding_window, softcap=softcap)
    return output[None], None


AttentionInterface.register(NAME, attention_function)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
