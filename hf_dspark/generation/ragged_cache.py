"""`RaggedCache` and `RaggedContext`: preallocated keys and values in which every row has a length of its own.

Tokens of all rows lie on one flat axis. Rolling back is only a smaller length: attention never looks past a token's own
position, and what lies behind is overwritten.
"""

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, StaticLayer

from ..configuration_dspark import DSparkConfig


@dataclass(frozen=True)
class FlatTokens:
    """Which row and position each token of the flat axis has; tokens of a row are neighbours, in order.

    Attributes:
        rows, positions: [T] int64; a token's keys and values go to slot `positions[t]` of row `rows[t]`.
        counts: tokens of each row in turn, on the host.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    counts: list[tuple[int, int]]

    @classmethod
    def of(cls, rows: list[int], starts: list[int], counts: list[int], device: torch.device) -> "FlatTokens":
        """`counts[i]` tokens of row `rows[i]` from position `starts[i]` on."""
        row_of = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
        position_of = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
        index = torch.tensor([row_of, position_of], device=device)
        return cls(index[0], index[1], list(zip(rows, counts, strict=True)))


class RaggedLayer(StaticLayer):
    """Keys and values [rows, kv_heads, capacity, head_dim] of one target layer; sliding layers are full layers too."""

    def __init__(self, cache: "RaggedCache"):
        super().__init__(max_cache_len=cache.capacity)
        self._cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        shape = (self._cache.num_rows, key_states.shape[1], self._cache.capacity)
        self.keys = key_states.new_zeros(*shape, key_states.shape[3])
        self.values = value_states.new_zeros(*shape, value_states.shape[3])
        self.device = key_states.device
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1, kv_heads, T, head_dim] to the slots of the current tokens; returns the whole store."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens = self._cache.tokens
        self.keys[tokens.rows, :, tokens.positions] = key_states[0].transpose(0, 1)
        self.values[tokens.rows, :, tokens.positions] = value_states[0].transpose(0, 1)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        # Positions are always given; no mask is built from the cache.
        return 0


class RaggedCache(Cache):
    """The target's cache. `tokens` says where the forward at hand writes and what it may see."""

    def __init__(self, num_layers: int, num_rows: int, capacity: int):
        self.num_rows = num_rows
        self.capacity = capacity
        self.tokens: FlatTokens
        super().__init__(layers=[RaggedLayer(self) for _ in range(num_layers)])

    @property
    def num_bytes(self) -> int:
        stores = [store for layer in self.layers if layer.is_initialized for store in (layer.keys, layer.values)]
        return sum(store.numel() * store.element_size() for store in stores)


class RaggedContext:
    """The draft's context of many rows; the ragged twin of `DraftContext`.

    `tokens` places what `append` writes; `rows` and `lengths` say which rows the blocks at hand belong to.
    """

    def __init__(self, config: DSparkConfig, num_rows: int, capacity: int, device: torch.device, dtype: torch.dtype):
        shape = (config.num_hidden_layers, num_rows, config.num_key_value_heads, capacity, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.tokens: FlatTokens
        self.rows: torch.Tensor
        self.lengths: torch.Tensor
        self.longest = 0

    def open_blocks(self, rows: list[int], lengths: list[int]) -> None:
        """The next blocks are those of `rows`, which hold `lengths` tokens of context."""
        index = torch.tensor([rows, lengths], device=self.keys.device)
        self.rows, self.lengths, self.longest = index[0], index[1], max(lengths)

    def append(self, layers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Write keys and values [1, kv_heads, T, head_dim] of each layer to the slots of `tokens`."""
        rows, positions = self.tokens.rows, self.tokens.positions
        for i, (keys, values) in enumerate(layers):
            self.keys[i][rows, :, positions] = keys[0].transpose(0, 1)
            self.values[i][rows, :, positions] = values[0].transpose(0, 1)

    def with_block(
        self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values [B, kv_heads, S, head_dim] of the open rows, blocks included, and a mask [B, 1, n, S]."""
        slots = self.lengths[:, None] + torch.arange(keys.shape[2], device=keys.device)
        self.keys[layer_idx][self.rows[:, None], :, slots] = keys.transpose(1, 2)
        self.values[layer_idx][self.rows[:, None], :, slots] = values.transpose(1, 2)
        end = self.longest + keys.shape[2]
        seen = torch.arange(end, device=keys.device) <= slots[:, -1:]
        mask = seen[:, None, None].expand(-1, 1, keys.shape[2], -1)
        return self.keys[layer_idx][self.rows, :, :end], self.values[layer_idx][self.rows, :, :end], mask
