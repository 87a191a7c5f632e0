"""Attention over a `RaggedCache`, through transformers' own extension points."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from .ragged_attention import ragged_attention
from .ragged_cache import FlatTokens, RaggedCache

NAME = "dspark_ragged"
# The decode kernel holds all tokens of a row in one tile; longer stretches are prompts.
MOST_DECODED = 32


def prompt_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tokens: FlatTokens,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of whole prompts, row by row: `query` [heads, T, head_dim] -> [T, heads, head_dim]."""
    outputs, start = [], 0
    for row, count in enumerate(tokens.counts or []):
        if not count:
            continue
        positions = tokens.positions[start : start + count]
        end = int(positions[-1]) + 1
        key, value = keys[row, :, :end], values[row, :, :end]
        part = query[:, start : start + count]
        slots = torch.arange(end, device=query.device)
        seen = slots <= positions[:, None]
        if window is not None:
            seen &= slots > positions[:, None] - window
        causal = end == count and (window is None or window >= end)
        if softcap is None:
            output = F.scaled_dot_product_attention(
                part[None],
                key[None],
                value[None],
                None if causal else seen,
                is_causal=causal,
                scale=scale,
                enable_gqa=True,
            )[0]
        else:
            groups = query.shape[0] // keys.shape[1]
            key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
            scores = softcap * torch.tanh(part @ key.transpose(1, 2) * scale / softcap)
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
    """transformers' attention interface: `query`, `key`, `value` [1, heads, T, head_dim] of the tokens at hand."""
    tokens = module.ragged_cache.tokens
    keys, values = module.ragged_store.add(tokens, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if tokens.most > MOST_DECODED:
        return prompt_attention(query[0], keys, values, tokens, scale, sliding_window, softcap)[None], None
    output = ragged_attention(
        query[0].transpose(0, 1).contiguous(),
        keys,
        values,
        tokens.row_starts,
        tokens.positions.int(),
        scale,
        sliding_window,
        softcap,
        tokens.most,
    )
    return output[None], None


def attend_raggedly(model: PreTrainedModel, cache: RaggedCache) -> None:
    """Make every attention module of `model` read and write its layer's store of `cache`."""
    model.set_attn_implementation(NAME)
    for module in model.modules():
        if isinstance(index := getattr(module, "layer_idx", None), int):
            module.ragged_cache, module.ragged_store = cache, cache.stores[index]
            module.layer_idx = 0  # see RaggedCache


AttentionInterface.register(NAME, attention_function)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
