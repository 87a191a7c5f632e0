"""The layers of the DFlash backbone: Qwen3-style blocks, or Gemma4-style ones where the config says so.

Parameter names are DeepSpec's.
"""

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from .configuration_dspark import DSparkConfig
from .context import ContextLayer, Rope


def apply_rope(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotate x [B, n, heads, head_dim] by cos and sin [B or 1, n, head_dim]."""
    cos, sin = rope[0].unsqueeze(2), rope[1].unsqueeze(2)
    return x * cos + rotate_half(x) * sin


class DSparkRotaryEmbedding(Qwen3RotaryEmbedding):
    """Rotary tables whose frequencies stay float32 when the draft is moved to another dtype.

    Rounded to bfloat16 they are off by up to 0.4 %, which is a whole turn a few thousand positions later.
    """

    def _apply(self, fn, recurse=True):
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, moved in dict(self.named_buffers()).items():
            if moved.dtype != before[name].dtype:
                setattr(self, name, before[name].to(moved.device))
        return self


def halves(x: torch.Tensor) -> torch.Tensor:
    """Neighbouring pairs (2i, 2i+1) of the last axis moved to (i, i + half), where `apply_rope` turns them.

    Queries and keys are moved alike, so their products stay as they are.
    """
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


class DSparkAttention(nn.Module):
    """Attention of a block over the context and over itself: both ways and without a window, unless config says so."""

    is_causal = False

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        slides = config.layer_types is not None and config.layer_types[layer_idx] == "sliding_attention"
        self.window = config.sliding_window if slides else None
        self.causal = bool(config.causal_layers and config.causal_layers[layer_idx])
        self.scaling = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        if not config.value_from_key:
            self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def key_value_projections(self) -> list[nn.Linear]:
        return [self.k_proj] if self.config.value_from_key else [self.k_proj, self.v_proj]

    def keys_values(self, projected: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Output of the key and value projections [B, n, ·] -> keys, values [B, kv_heads, n, head_dim]."""
        heads = projected.unflatten(-1, (-1, self.config.num_key_value_heads, self.head_dim))
        keys, values = heads[..., 0, :, :], heads[..., -1, :, :]
        if self.config.value_norm:
            values = F.rms_norm(values, (self.head_dim,), eps=self.config.rms_norm_eps)
        return self._rotate(self.k_norm(keys), rope).transpose(1, 2), values.transpose(1, 2)

    def _rotate(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        return apply_rope(halves(x) if self.config.rope_interleaved else x, rope)

    @property
    def sees_all(self) -> bool:
        """Whether every slot of a block sees the whole context and the whole block."""
        return self.window is None and not self.causal

    def sight(
        self, positions: torch.Tensor, anchors: torch.Tensor, last: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What slots see: everything up to `limits`, and if there is a window, only what lies above `origins` - window.

        Args:
            positions, anchors, last: of the slots themselves, of their anchors and of the last slots of their blocks.

        Returns:
            `limits` and `origins`, shaped like `positions`.
        """
        limits = positions if self.causal else last
        if self.window is None or self.config.window_from_anchor:
            return limits.expand_as(positions), anchors.expand_as(positions)
        return torch.minimum(limits, positions + self.window - 1), positions

    def forward(self, hidden: torch.Tensor, rope: Rope, context: ContextLayer) -> torch.Tensor:
        """`hidden` [B, n, H] -> [B, n, H]; the block's own keys and values are only scratch in `context`."""
        queries = self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, self.head_dim)))
        queries = self._rotate(queries, rope).transpose(1, 2)
        projected = torch.cat([projection(hidden) for projection in self.key_value_projections()], dim=-1)
        output = context.attend(self, queries, *self.keys_values(projected, rope))
        return self.o_proj(output.flatten(2))

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """transformers' attention of the configured kind: [B, heads, n, head_dim] -> [B, n, heads, head_dim].

        `mask` is additive, or bool for sdpa. Kinds that take no mask give way to sdpa where one is needed.
        """
        kind = self.config._attn_implementation
        if mask is not None and kind not in ("sdpa", "eager"):
            kind = "sdpa"
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(kind, eager_attention_forward)
        return attention(self, queries, keys, values, mask, dropout=0.0, scaling=self.scaling)[0]


class DSparkMLP(nn.Module):
    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))


class DSparkLayer(nn.Module):
    """One draft layer. With `sandwich_norms` the sub-layers' outputs are normed too and a scalar closes the layer."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.sandwich_norms = config.sandwich_norms
        self.self_attn = DSparkAttention(config, layer_idx)
        self.mlp = DSparkMLP(config)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if config.sandwich_norms:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
            self.register_buffer("layer_scalar", torch.ones(1))
        for name in norms:
            setattr(self, name, Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(self, hidden: torch.Tensor, rope: Rope, context: ContextLayer) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(hidden), rope, context)
        if not self.sandwich_norms:
            hidden = hidden + attended
            return hidden + self.mlp(self.post_attention_layernorm(hidden))
        hidden = hidden + self.post_attention_layernorm(attended)
        hidden = hidden + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))
        return hidden * self.layer_scalar


def is_plain(linear: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether a module is nothing but its weight: no adapter, quantisation, sharding, offloading or hook."""
    return (
        isinstance(linear, nn.Linear)
        and type(linear) is nn.Linear
        and type(linear.weight) is nn.Parameter  # quantised and distributed tensors are other classes
        and "forward" not in vars(linear)
        and linear.weight.device.type != "meta"
        and not (linear._forward_hooks or linear._forward_pre_hooks or hasattr(linear, "_hf_hook"))
    )
