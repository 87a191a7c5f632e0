"""`DraftContext`: the draft's memory of committed tokens, all of them or those of a `ContextWindow`."""

import copy
import uuid
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


@dataclass(frozen=True)
class ContextWindow:
    """What a draft remembers of a long text, set as `draft.context_window`: its first and its last tokens.

    Tokens keep their positions. Memory and time of the draft stop growing with the text; the text stays the target's,
    what changes is how much is accepted.

    Attributes:
        sinks: first tokens of the text that are kept.
        recent: last tokens before the anchor that are kept.

    Raises:
        ValueError: for numbers that leave no window.
    """

    sinks: int = 4
    recent: int = 2048

    def __post_init__(self) -> None:
        for name, least in (("sinks", 0), ("recent", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"`{name}` of a context window must be an integer of {least} or more, got {value!r}.")


def check_window(config: DSparkConfig, window: ContextWindow | None) -> None:
    """Raise ValueError for a context window on a draft whose layers look at distances by themselves."""
    partial = config.sliding_window is not None or any(config.causal_layers or ())
    if window is not None and partial:
        raise ValueError("`draft.context_window` is for drafts with full attention; layers of this one have windows.")


def common_length(one: list, other: list) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Owner:
    """Name of one draft object; a copy of the draft, whose weights may come to differ, gets another."""

    def __init__(self):
        self.key = uuid.uuid4().hex

    def __deepcopy__(self, memo: dict) -> "Owner":
        return Owner()


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

    Attributes:
        window: `None` to keep all tokens.
        length: tokens that it has seen.
        end: the position behind the last of them; larger than `length` where tokens were cached without the draft.
    """

    def __init__(
        self,
        config: DSparkConfig,
        batch_size: int,
        device: torch.device,
        dtype: torch.dtype,
        window: ContextWindow | None = None,
    ):
        shape = (config.num_hidden_layers, batch_size, config.num_key_value_heads, 0, config.head_dim)
        # A context may outlive the call that made it, and inference tensors could not be written after that.
        with torch.inference_mode(False):
            self.keys = torch.empty(shape, device=device, dtype=dtype)
            self.values = torch.empty(shape, device=device, dtype=dtype)
        check_window(config, window)
        self.window = window
        self.length = self.end = self._dropped = 0

    @property
    def held(self) -> int:
        """Tokens that are kept."""
        return self.length - self._dropped

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
        if self.window is not None:
            projected, rope = self._slide(self.window, projected, rope)
        kept = projected.shape[1]
        self.reserve(kept)
        for i, (layer, states) in enumerate(zip(layers, projected.chunk(len(layers), dim=-1), strict=True)):
            self.write(i, *layer.self_attn.keys_values(states, rope))
        self.length += added
        self.end += added
        self._dropped += added - kept

    def _slide(self, window: ContextWindow, projected: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, Rope]:
        """Drop what falls out of the window: of the tokens held, and of the n that come, which are returned."""
        added = projected.shape[1]
        sinks = min(added, max(0, window.sinks - self.length))  # of those that come
        skipped = max(0, added - sinks - window.recent)
        held = max(0, self.held - window.sinks)
        out = max(0, held + added - sinks - skipped - window.recent)
        if out:
            first, end = window.sinks, self.held
            for store in (self.keys, self.values):
                store[:, :, :, first : end - out] = store[:, :, :, first + out : end].clone()
            self._dropped += out
        if skipped:
            kept = torch.cat((torch.arange(sinks), torch.arange(sinks + skipped, added))).to(projected.device)
            projected, rope = projected[:, kept], (rope[0][:, kept], rope[1][:, kept])
        return projected, rope

    def layer(self, index: int) -> "DraftContextLayer":
        return DraftContextLayer(self, index)

    def crop(self, end: int) -> None:
        """Forget tokens from position `end` on; what a window has dropped before it does not come back."""
        length = max(0, self.length - max(0, self.end - end))
        sinks = 0 if self.window is None else min(self.window.sinks, length)
        self._dropped = length - max(sinks, length - self._dropped)
        self.length, self.end = length, min(self.end, end)

    def gathered(self, rows: torch.Tensor) -> "DraftContext":
        """A context of A sequences of W tokens each, from the tokens `rows` [A, W] of this one (of one sequence)."""
        context = copy.copy(self)
        context.keys, context.values = (
            store[:, 0][:, :, rows].transpose(1, 2).contiguous() for store in (self.keys, self.values)
        )
        context.length, context._dropped, context.window = rows.shape[1], 0, None
        return context

    def write(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Put keys and values [B, kv_heads, n, head_dim] of one layer behind the last token; returns where they end."""
        self.reserve(keys.shape[2])
        start, end = self.held, self.held + keys.shape[2]
        self.keys[index, :, :, start:end] = keys
        self.values[index, :, :, start:end] = values
        return end

    def reserve(self, added: int) -> None:
        """Make room for `added` more tokens; a buffer that is too small grows by a quarter at least."""
        capacity, needed = self.keys.shape[3], self.held + added
        if needed <= capacity:
            return
        capacity = -(-max(needed, capacity + capacity // 4) // STEP) * STEP
        with torch.inference_mode(False), torch.no_grad():
            self.keys, self.values = self._grown(self.keys, capacity), self._grown(self.values, capacity)

    def _grown(self, old: torch.Tensor, capacity: int) -> torch.Tensor:
        shape = (*old.shape[:3], capacity, old.shape[4])
        new = old.new_empty(shape)
        new[:, :, :, : self.held] = old[:, :, :, : self.held]
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
        keys, values = (store[self.index][:, :, :end] for store in (self.context.keys, self.context.values))
        mask = None if attention.sees_all else block_mask(attention, queries, end)
        return attention.attend(queries, keys, values, mask)


def block_mask(attention: "DSparkAttention", queries: torch.Tensor, end: int) -> torch.Tensor:
    """Additive mask [1, 1, n, end] of a block of n slots, the last of `end` tokens without gaps; dtype of `queries`."""
    tokens = torch.arange(end, device=queries.device)
    slots = tokens[end - queries.shape[2] :]
    limits, origins = attention.sight(slots, slots[:1], slots[-1:])
    seen = tokens <= limits[:, None]
    if attention.window is not None:
        seen &= tokens > origins[:, None] - attention.window
    return torch.zeros_like(seen, dtype=queries.dtype).masked_fill(~seen, float("-inf"))[None, None]
