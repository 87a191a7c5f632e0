"""`RaggedCache` and `RaggedContext`: preallocated keys and values in which every row has a length of its own.

Tokens of all rows lie on one flat axis. Rolling back is only a smaller length: attention never looks past a token's own
limit, and what lies behind is overwritten. The last row of every store is a spare one that takes what padding writes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import Cache

from .. import kernels
from ..configuration_dspark import DSparkConfig
from ..context import ContextWindow, Rope, check_window
from ..layers import halves
from .ragged_attention import ragged_attention

SPARE = -1


class FlatTokens(NamedTuple):
    """Which row and position each token of the flat axis has; tokens of a row are neighbours, rows in order.

    Attributes:
        rows, positions: [T] int64; keys and values of token t go to slot `positions[t]` of row `rows[t]`. Padding comes
            last and belongs to row `SPARE`.
        limits: [T] int32; token t sees the slots up to `limits[t]` of its row.
        row_starts: [R+1] int32; the tokens of row r are `row_starts[r]..row_starts[r+1]-1`, what follows is padding.
        most: no row has more tokens than this.
        spans: (row, first position, count) of each row with tokens, on the host, where it is known.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    limits: torch.Tensor
    row_starts: torch.Tensor
    most: int
    spans: list[tuple[int, int, int]] | None = None

    @classmethod
    def of(cls, spans: list[tuple[int, int, int]], num_rows: int, device: torch.device) -> "FlatTokens":
        """The tokens of `spans`, rows in ascending order; each token sees what comes before it."""
        # NumPy, since torch may wake threads for a few numbers.
        row, start, count = np.array(spans).T
        behind = np.arange(count.sum()) + (start - count.cumsum() + count).repeat(count)
        index = torch.from_numpy(np.stack((row.repeat(count), behind))).to(device)
        counts = np.zeros(num_rows + 1, np.int32)
        counts[row + 1] = count
        starts = torch.from_numpy(counts.cumsum(dtype=np.int32)).to(device)
        most = int(count.max())
        return cls(index[0], index[1], index[1].int(), starts, most, spans)


def write(store: torch.Tensor, tokens: FlatTokens, states: torch.Tensor) -> None:
    """Put states [1, kv_heads, T, head_dim] into the slots of their tokens in [rows, kv_heads, capacity, head_dim]."""
    store[tokens.rows, :, tokens.positions] = states[0].transpose(0, 1)


def resized(old: torch.Tensor, num_rows: int, capacity: int) -> torch.Tensor:
    """A store [..., rows + 1, kv_heads, capacity, head_dim] of another size that starts with what `old` holds."""
    shape = (*old.shape[:-4], num_rows + 1, old.shape[-3], capacity, old.shape[-1])
    new = old.new_zeros(shape)
    rows, slots = min(num_rows, old.shape[-4] - 1), min(capacity, old.shape[-2])
    new[..., :rows, :, :slots, :] = old[..., :rows, :, :slots, :]
    return new


class RaggedStore:
    """Keys and values [rows + 1, kv_heads, capacity, head_dim] of one target layer; sliding ones are full too."""

    def __init__(self, num_rows: int, capacity: int):
        self.num_rows, self.capacity = num_rows, capacity
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def add(self, tokens: FlatTokens, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1, kv_heads, T, head_dim] to the slots of `tokens`; returns the whole store."""
        if self.keys is None or self.values is None:
            shape = (self.num_rows + 1, keys.shape[1], self.capacity)
            # The store outlives the call, and inference tensors could not be written after that.
            with torch.inference_mode(False):
                self.keys = torch.zeros(*shape, keys.shape[3], dtype=keys.dtype, device=keys.device)
                self.values = torch.zeros(*shape, values.shape[3], dtype=values.dtype, device=values.device)
        write(self.keys, tokens, keys)
        write(self.values, tokens, values)
        return self.keys, self.values

    def resize(self, num_rows: int, capacity: int, keep: bool) -> None:
        self.num_rows, self.capacity = num_rows, capacity
        if not keep:
            self.keys = self.values = None
        if self.keys is not None and self.values is not None:
            self.keys = resized(self.keys, num_rows, capacity)
            self.values = resized(self.values, num_rows, capacity)


class RaggedCache(Cache):
    """The target's cache. `tokens` says where the forward at hand writes and what it may see.

    `update` hands the new states on unchanged: the attention function, which knows its layer's store, writes them. So
    no layer number appears in the code of a layer, and one compiled layer serves all.
    """

    def __init__(self, num_layers: int, num_rows: int, capacity: int):
        super().__init__(layers=[])
        self.num_rows, self.capacity = num_rows, capacity
        self.stores = [RaggedStore(num_rows, capacity) for _ in range(num_layers)]
        self.tokens: FlatTokens

    def update(self, key_states, value_states, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        # Positions are always given; no mask is built from the cache.
        return 0

    @torch.inference_mode(False)
    def resize(self, num_rows: int, capacity: int, keep: bool) -> None:
        """Change the size of every store, with what it holds if `keep`."""
        for store in self.stores:
            store.resize(num_rows, capacity, keep)
        self.num_rows, self.capacity = num_rows, capacity

    def drop(self) -> None:
        """Forget everything; the next `resize` starts anew."""
        self.resize(0, 0, keep=False)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for store in self.stores for tensor in (store.keys, store.values) if tensor is not None]


class RaggedContextLayer:
    """One draft layer's part of a `RaggedContext`: the slots of `tokens` are written and read."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, tokens: FlatTokens):
        self.keys, self.values, self.tokens = keys, values, tokens

    def attend(self, attention: nn.Module, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor):
        """Attention of blocks [B, heads, n, head_dim] over context and themselves; returns [B, n, heads, head_dim]."""
        write(self.keys, self.tokens, keys.transpose(0, 1).flatten(1, 2)[None])
        write(self.values, self.tokens, values.transpose(0, 1).flatten(1, 2)[None])
        flat = queries.transpose(1, 2).flatten(0, 1)
        starts, limits, origins = self.tokens.row_starts, self.tokens.limits, None
        if not attention.sees_all:
            last = limits.unflatten(0, (-1, queries.shape[2]))
            positions = self.tokens.positions.int().view_as(last)
            limits, origins = (x.flatten() for x in attention.sight(positions, positions[:, :1], last))
        output = ragged_attention(
            flat, self.keys, self.values, starts, limits, attention.scaling, attention.window, None, self.tokens.most,
            origins,
        )  # fmt: skip
        return output.unflatten(0, (queries.shape[0], queries.shape[2]))


class RaggedContext:
    """The draft's context of many rows; the ragged twin of `DraftContext`.

    With a window the slots behind the sinks are a ring with room for the recent tokens and a block, in which each
    position takes the place of one that has just left the window. Keys are rotated when they are written, so attention
    does not mind where a token lies.

    Attributes:
        window: `None` to keep all tokens.
        committed: where `append` writes.
        blocks: the blocks that the backbone works on. Every slot sees as far as the last one of its block.
    """

    def __init__(
        self,
        config: DSparkConfig,
        num_rows: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
        window: ContextWindow | None = None,
    ):
        check_window(config, window)
        self.config, self.window = config, window
        self._ring = 0 if window is None else window.recent + config.block_size
        self._most = None if window is None else window.sinks + self._ring
        self.committed: FlatTokens
        self._blocks: FlatTokens
        capacity = capacity if self._most is None else min(capacity, self._most)
        shape = (config.num_hidden_layers, num_rows + 1, config.num_key_value_heads, capacity, config.head_dim)
        # The context outlives the call, and inference tensors could not be written after that.
        with torch.inference_mode(False):
            self.keys = torch.zeros(shape, device=device, dtype=dtype)
            self.values = torch.zeros(shape, device=device, dtype=dtype)
            self._layers = list(zip(self.keys, self.values, strict=True))

    @torch.inference_mode(False)
    def resize(self, num_rows: int, capacity: int, keep: bool) -> None:
        """Change the size, with what is held if `keep`."""
        capacity = capacity if self._most is None else min(capacity, self._most)
        self._layers = []
        if not keep:
            self.keys, self.values = (x.new_empty(*x.shape[:3], 0, x.shape[4]) for x in (self.keys, self.values))
        self.keys, self.values = resized(self.keys, num_rows, capacity), resized(self.values, num_rows, capacity)
        self._layers = list(zip(self.keys, self.values, strict=True))

    def drop(self) -> None:
        """Forget everything; the next `resize` starts anew."""
        self._layers = []
        self.keys, self.values = (x.new_empty(*x.shape[:3], 0, x.shape[4]) for x in (self.keys, self.values))

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for pair in self._layers for tensor in pair]

    def holds_all(self, length: int) -> bool:
        """Whether nothing of a row of `length` tokens, and of the block behind it, has left the window."""
        return self._most is None or length + self.config.block_size < self._most

    @property
    def blocks(self) -> FlatTokens:
        return self._blocks

    @blocks.setter
    def blocks(self, tokens: FlatTokens) -> None:
        if self._most is not None:
            limits = tokens.limits.clamp(max=self._most - 1)
            tokens = tokens._replace(positions=self._slots(tokens.positions), limits=limits)
        self._blocks = tokens

    def _slots(self, positions: torch.Tensor) -> torch.Tensor:
        """Where tokens lie: at their positions, or behind the sinks around the ring."""
        if self.window is None:
            return positions
        sinks = self.window.sinks
        return torch.where(positions < sinks, positions, sinks + (positions - sinks) % self._ring)

    def _kept_rows(self, tokens: FlatTokens) -> torch.Tensor:
        """Rows of the tokens; those of a prompt whose place a later one takes go to the spare row."""
        if self.window is None or tokens.spans is None:
            return tokens.rows
        ends = torch.tensor([start + count for _, start, count in tokens.spans for _ in range(count)])
        leaves = tokens.positions + self._ring < ends.to(tokens.positions.device)
        return torch.where(leaves & (tokens.positions >= self.window.sinks), SPARE, tokens.rows)

    def append(self, layers: Sequence[nn.Module], projected: torch.Tensor, rope: Rope) -> None:
        """Write the context of the tokens `committed`; `projected` is [1, T, ·], see `DraftContext.append`."""
        config, tokens = self.config, self.committed
        rows, slots = self._kept_rows(tokens), self._slots(tokens.limits)  # a committed token sees as far as itself
        weights = torch.stack([layer.self_attn.k_norm.weight for layer in layers])
        if config.rope_interleaved:
            weights = halves(weights)
            keys, values = projected.unflatten(-1, (len(layers), 2, -1, config.head_dim)).unbind(3)
            projected = torch.stack((halves(keys), values), dim=3).flatten(2)
        kernels.write_context(
            projected[0], weights, rope[0][0], rope[1][0], self.keys, self.values, rows.int(), slots,
            eps=config.rms_norm_eps, value_from_key=config.value_from_key, value_norm=config.value_norm,
        )  # fmt: skip

    def layer(self, index: int) -> RaggedContextLayer:
        return RaggedContextLayer(*self._layers[index], self.blocks)
