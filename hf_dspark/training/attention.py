"""Attention of many anchor blocks of a sequence at once: each sees the tokens before its anchor, and itself."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ..compiling import compiled, many_shapes
from ..context import Rope

if TYPE_CHECKING:
    from ..layers import DSparkAttention

# (row, head, query, key) -> whether the key is visible; indices are tensors that broadcast.
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def visibility(anchor_positions: torch.Tensor, keep_mask: torch.Tensor, block_size: int) -> Rule:
    """Which keys the slots of anchor blocks see; the only place where this is written.

    Queries are the slots of all blocks of a row, block after block. Keys are the same slots, then the row's tokens: in
    this order the rule is the same for texts of all lengths, and compiled once. A slot sees all slots of its block and
    the tokens strictly before the block's anchor, which itself is the first slot. Dummies (keep 0) see no token.
    """
    slots = anchor_positions.shape[1] * block_size
    anchors = anchor_positions.int()  # as the indices on CUDA are

    def visible(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        block = query // block_size
        before = (key - slots < anchors[row, block]) & keep_mask[row, block]
        return ((key < slots) & (key // block_size == block)) | ((key >= slots) & before)

    return visible


def dense_mask(rule: Rule, rows: int, queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """The rule as a bool tensor [B, 1, queries, keys]."""
    row, query, key = (torch.arange(n, device=device) for n in (rows, queries, keys))
    return rule(row[:, None, None], row.new_zeros(()), query[:, None], key).unsqueeze(1)


def uses_flex(device: torch.device) -> bool:
    """flex_attention has a backward on CUDA only."""
    return device.type == "cuda"


class BlockContext:
    """A draft's memory (`Context`) while it trains: B sequences, A blocks each.

    The backbone runs over B·A rows of one block; here the blocks of a sequence are laid side by side, so that its keys
    and values are computed and read once. On CUDA the mask is a block mask of flex_attention, which skips what no
    block sees; elsewhere it is dense, B · A·n · (A·n + S) bytes for blocks of n slots.
    """

    def __init__(self, anchor_positions: torch.Tensor, keep_mask: torch.Tensor, length: int, block_size: int):
        self.num_rows, self.num_blocks = anchor_positions.shape
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        rule = visibility(anchor_positions, keep_mask.bool(), block_size)
        queries = self.num_blocks * block_size
        sizes = (self.num_rows, queries, queries + length)
        self.mask: torch.Tensor | BlockMask
        if uses_flex(anchor_positions.device):
            device = anchor_positions.device
            with many_shapes():  # uncompiled, it would write the whole mask first
                self.mask = compiled(create_block_mask)(rule, sizes[0], None, *sizes[1:], device=device)
        else:
            self.mask = dense_mask(rule, *sizes, device=anchor_positions.device)

    def append(self, layers: Sequence[nn.Module], projected: torch.Tensor, rope: Rope) -> None:
        """Keep keys and values of all tokens; `projected` [B, S, ·] holds the projections of all layers in a row."""
        states = projected.chunk(len(layers), dim=-1)
        self._layers = [layer.self_attn.keys_values(x, rope) for layer, x in zip(layers, states, strict=True)]

    def layer(self, index: int) -> "BlockLayer":
        return BlockLayer(self, *self._layers[index])

    def side_by_side(self, blocks: torch.Tensor) -> torch.Tensor:
        """[B·A, heads, n, d] -> [B, heads, A·n, d]."""
        return blocks.unflatten(0, (self.num_rows, self.num_blocks)).transpose(1, 2).flatten(2, 3)


class BlockLayer(NamedTuple):
    """One layer of a `BlockContext`; `keys` and `values` [B, kv_heads, S, head_dim] are of the tokens."""

    context: BlockContext
    keys: torch.Tensor
    values: torch.Tensor

    def attend(
        self, attention: "DSparkAttention", queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Attention of the blocks [B·A, (kv_)heads, n, head_dim] -> [B·A, n, heads, head_dim]."""
        queries, keys, values = (self.context.side_by_side(x) for x in (queries, keys, values))
        keys = torch.cat((keys, self.keys), dim=2)
        values = torch.cat((values, self.values), dim=2)
        mask = self.context.mask
        if isinstance(mask, BlockMask):
            output = _flex(attention, queries, keys, values, mask)
        else:
            output = attention.attend(queries, keys, values, _for_kind(attention, mask, queries))
        return output.unflatten(1, (self.context.num_blocks, -1)).flatten(0, 1)


def _for_kind(attention: "DSparkAttention", mask: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """The mask in the form that the draft's attention implementation takes.

    Raises:
        ValueError: for an implementation that takes no mask.
    """
    kind = attention.config._attn_implementation
    if kind == "sdpa":
        return mask
    if kind == "eager":
        return torch.zeros_like(mask, dtype=queries.dtype).masked_fill(~mask, float("-inf"))
    raise ValueError(f'Training takes drafts with `attn_implementation="sdpa"` or "eager", got {kind!r}.')


def _flex(
    attention: "DSparkAttention", queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: BlockMask
) -> torch.Tensor:
    # Norms in float32 leave queries and keys wider than the values under autocast, which only sdpa evens out.
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else values.dtype
    with many_shapes():
        output = compiled(flex_attention)(
            queries.to(dtype),
            keys.to(dtype),
            values.to(dtype),
            block_mask=mask,
            scale=attention.scaling,
            enable_gqa=attention.num_key_value_groups > 1,
            # Few slots would select the decoding kernel, which has no backward and wants groups of a power of 2.
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        )
    return output.transpose(1, 2)
