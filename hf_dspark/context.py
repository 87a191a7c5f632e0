"""`DraftContext`: the draft's memory of committed tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from .configuration_dspark import DSparkConfig

if TYPE_CHECKING:
    from .layers import DSparkAttention

STEP = 256

Rope = tuple[torch.Tensor, torch.Tensor]


class ContextLayer(Protocol):
    """What one draft layer sees of a context."""

    def attend(
        self, attention: "DSparkAttention", queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor: ...


class Context(Protocol):
    """What the backbone needs of a draft's memory."""

    def append(self, layers: Sequence[nn.Module], projected: torch.Tensor, rope: Rope) -> None: ...

    def layer(self, index: int) -> ContextLayer: ...


class DraftContext:
    """Keys and values of every draft layer for the committed tokens before the anchor.

    Both live in one buffer [layers, B, kv_heads, capacity, head_dim] that grows in steps. A block's own keys and values
    are written behind the last token, where the next `append` overwrites them: rolling back costs nothing.
    """

    def __init__(self, config: DSparkConfig, batch_size: int, device: torch.device, dtype: torch.dtype):
        shape = (config.num_hidden_layers, batch_size, config.num_key_value_heads, 0, config.head_dim)
        # A context may outlive the call that made it, and inference tensors could not be written after that.
        with torch.inference_mode(False):
            self.keys = torch.empty(shape, device=device, dtype=dtype)
            self.values = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    @property
    def device(self) -> torch.device:
        return self.keys.device

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    def append(self, layers: Sequence[nn.Module], projected: torch.Tensor, rope: Rope) -> None:
        """Add n tokens: `projected` [B, n, ·] holds the key and value projections of all draft layers one after the
        other, `rope` the rotary tables of their positions."""
        added = projected.shape[1]
        self._reserve(added)
        for i, (layer, states) in enumerate(zip(layers, projected.chunk(len(layers), dim=-1), strict=True)):
            self.write(i, *layer.self_attn.keys_values(states, rope))
        self.length += added

    def layer(self, index: int) -> "DraftContextLayer":
        return DraftContextLayer(self, index)

    def crop(self, length: int) -> None:
        """Forget tokens past `length`."""
        self.length = min(self.length, length)

    def write(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Put keys and values [B, kv_heads, n, head_dim] of one layer behind the last token; returns where they end."""
        self._reserve(keys.shape[2])
        end = self.length + keys.shape[2]
        self.keys[index, :, :, self.length : end] = keys
        self.values[index, :, :, self.length : end] = values
        return end

    def _reserve(self, added: int) -> None:
        capacity, needed = self.keys.shape[3], self.length + added
        if needed <= capacity:
            return
        capacity = max(2 * capacity, -(-needed // STEP) * STEP)
        with torch.inference_mode(False), torch.no_grad():
            self.keys, self.values = self._grown(self.keys, capacity), self._grown(self.values, capacity)

    def _grown(self, old: torch.Tensor, capacity: int) -> torch.Tensor:
        shape = (*old.shape[:3], capacity, old.shape[4])
        new = old.new_empty(shape)
        new[:, :, :, : self.length] = old[:, :, :, : self.length]
        return new


@dataclass(frozen=True)
class DraftContextLayer:
    """One layer of a `DraftContext`."""

    context: DraftContext
    index: int

    def attend(
        self, attention: "DSparkAttention", queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Attention of a block over the context and itself.

        `queries` [B, heads, n, head_dim], `keys` and `values` [B, kv_heads, n, head_dim] of the block -> [B, n, heads,
        head_dim]. The context keeps its length.
        """
        end = self.context.write(self.index, keys, values)
        stores = self.context.keys[self.index], self.context.values[self.index]
        return attention.attend(queries, *(store[:, :, :end] for store in stores))
