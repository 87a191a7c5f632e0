"""`DraftContext`: the draft's memory of committed tokens."""

from typing import TYPE_CHECKING, Protocol

import torch

from .configuration_dspark import DSparkConfig

if TYPE_CHECKING:
    from .layers import DSparkAttention

STEP = 256


class Context(Protocol):
    """What the backbone needs of a draft's memory."""

    def append(self, layers: list[tuple[torch.Tensor, torch.Tensor]]) -> None: ...

    def attend(
        self, layer: "DSparkAttention", queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor: ...


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

    def append(self, layers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Add n tokens: for each layer keys and values [B, kv_heads, n, head_dim], rotary positions applied."""
        added = layers[0][0].shape[2]
        self._reserve(added)
        for i, (keys, values) in enumerate(layers):
            self._write(i, keys, values)
        self.length += added

    def attend(
        self, layer: "DSparkAttention", queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Attention of a block over the context and itself.

        `queries` [B, heads, n, head_dim], `keys` and `values` [B, kv_heads, n, head_dim] of the block -> [B, n, heads,
        head_dim]. The context keeps its length.
        """
        self._reserve(keys.shape[2])
        self._write(layer.layer_idx, keys, values)
        end = self.length + keys.shape[2]
        return layer.attend(queries, self.keys[layer.layer_idx, :, :, :end], self.values[layer.layer_idx, :, :, :end])

    def crop(self, length: int) -> None:
        """Forget tokens past `length`."""
        self.length = min(self.length, length)

    def _write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        end = self.length + keys.shape[2]
        self.keys[layer_idx, :, :, self.length : end] = keys
        self.values[layer_idx, :, :, self.length : end] = values

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
