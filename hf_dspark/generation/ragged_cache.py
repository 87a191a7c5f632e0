"""`RaggedCache` and `RaggedContext`: preallocated keys and values in which every row has a length of its own.

Tokens of all rows lie on one flat axis. Rolling back is only a smaller length: attention never looks past a token's own
position, and what lies behind is overwritten. One row more than the batch has takes what padding tokens write.
"""

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

from ..configuration_dspark import DSparkConfig
from ..layers import DSparkAttention
from .ragged_attention import ragged_attention


@dataclass(frozen=True)
class FlatTokens:
    """Which row and position each token of the flat axis has; tokens of a row are neighbours, in order.

    Attributes:
        rows, positions: [T] int64; keys and values of token t go to slot `positions[t]` of row `rows[t]`.
        row_starts: [R+1] int32; the tokens of row r are `row_starts[r]..row_starts[r+1]-1`, what follows is padding.
        most: no row has more tokens than this.
        counts: tokens of each row on the host, where it is known.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    row_starts: torch.Tensor
    most: int
    counts: list[int] | None = None

    @classmethod
    def of(cls, starts: list[int], counts: list[int], device: torch.device) -> "FlatTokens":
        """`counts[r]` tokens of each row r (0 is fine), from position `starts[r]` on."""
        rows = [row for row, count in enumerate(counts) for _ in range(count)]
        positions = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
        index = torch.tensor([rows, positions], device=device)
        ends = torch.tensor([0, *counts]).cumsum(0).to(device=device, dtype=torch.int32)
        return cls(index[0], index[1], ends, max(counts), counts)


def write(store: torch.Tensor, tokens: FlatTokens, states: torch.Tensor) -> None:
    """Put states [1, kv_heads, T, head_dim] into the slots of their tokens in [rows, kv_heads, capacity, head_dim]."""
    store[tokens.rows, :, tokens.positions] = states[0].transpose(0, 1)


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
            self.keys = keys.new_zeros(*shape, keys.shape[3])
            self.values = values.new_zeros(*shape, values.shape[3])
        write(self.keys, tokens, keys)
        write(self.values, tokens, values)
        return self.keys, self.values


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

    @property
    def num_bytes(self) -> int:
        tensors = [tensor for store in self.stores for tensor in (store.keys, store.values) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class RaggedContext:
    """The draft's context of many rows; the ragged twin of `DraftContext`."""

    def __init__(self, config: DSparkConfig, num_rows: int, capacity: int, device: torch.device, dtype: torch.dtype):
        shape = (num_rows + 1, config.num_key_value_heads, capacity, config.head_dim)
        # One tensor a layer: a compiled backbone would copy a common one whenever a layer writes its part.
        self.keys, self.values = (
            [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_hidden_layers)] for _ in range(2)
        )
        self.committed: FlatTokens  # where `append` writes
        self.blocks: FlatTokens  # the blocks that `attend` works on, all slots of a row in order

    def append(self, layers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Write keys and values [1, kv_heads, T, head_dim] of each layer to the slots of `committed`."""
        for i, (keys, values) in enumerate(layers):
            write(self.keys[i], self.committed, keys)
            write(self.values[i], self.committed, values)

    def attend(
        self, layer: DSparkAttention, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Attention of blocks [B, heads, n, head_dim] over context and themselves, as in `DraftContext`."""
        stores = self.keys[layer.layer_idx], self.values[layer.layer_idx]
        for store, states in zip(stores, (keys, values), strict=True):
            write(store, self.blocks, states.transpose(0, 1).flatten(1, 2)[None])
        num_blocks, slots = queries.shape[0], queries.shape[2]
        # Both ways: every slot sees as far as the last one of its block.
        limits = self.blocks.positions.view(num_blocks, slots)[:, -1:].expand(-1, slots).flatten().int()
        flat = queries.transpose(1, 2).flatten(0, 1)
        starts = self.blocks.row_starts
        output = ragged_attention(flat, *stores, starts, limits, layer.scaling, None, None, slots)
        return output.unflatten(0, (num_blocks, slots))
