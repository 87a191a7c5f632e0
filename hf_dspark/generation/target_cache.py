"""The target's cache on the plain path: rollback, attention views, and the draft context that travels with it."""

from typing import Any

import torch
from transformers.utils import ModelOutput

from .._compat import CACHE_KEY
from ..context import DraftContext
from ..modeling_dspark import DSparkForCausalLM
from .recurrent import RecurrentStates


class TargetCache:
    """One transformers cache during one call.

    Recurrent states cannot be cut. After a rejection the whole cache goes back to where all fed tokens were committed
    last, and the committed ones since then are `pending`: the next forward has to begin with them.
    """

    def __init__(self, cache: Any, text_config: Any):
        self.cache = cache
        kinds, window = getattr(text_config, "layer_types", None), getattr(text_config, "sliding_window", None)
        # Without stated kinds every layer has the window, where there is one.
        kinds = kinds or ["sliding_attention"] * text_config.num_hidden_layers
        self._windows = [window if kind == "sliding_attention" else None for kind in kinds]
        self.croppable = True
        self.pending = 0
        self._states = RecurrentStates([])
        self._recording: list[Any] = []
        self._committed = 0

    def length(self) -> int:
        """Tokens in the cache."""
        return int(self.cache.get_seq_length())

    def start(self, outputs: ModelOutput) -> None:
        """After prefill: layers that drop old states must keep them until each `forget`.

        Before prefill this would keep the states of the whole prompt in sliding layers.
        """
        self.cache = outputs.get(CACHE_KEY, self.cache)
        self._states = RecurrentStates(self.cache.layers)
        others = [layer for layer in self.cache.layers if not RecurrentStates([layer])]
        self.croppable = self.cache.is_croppable or (bool(self._states) and all(o.is_croppable for o in others))
        if self.croppable:
            self._recording = [layer for layer in self.cache.layers if getattr(layer, "record_past", None) is False]
            self.cache.activate_past_recording()
        self._committed = self.length()

    def forget(self, num_tokens: int) -> None:
        """Roll back the last tokens; 0 still lets sliding layers shrink to their window."""
        if not self.croppable:
            return
        if self._states and num_tokens:
            fed = self.length() - self._committed
            self.pending = fed - num_tokens
            self.cache.crop(-fed)
            self._states.restore()
            return
        self.cache.crop(-num_tokens)
        self._committed, self.pending = self.length(), 0
        if self._states:
            self._states = RecurrentStates(self.cache.layers)

    def attention_step(self, attentions: tuple, i: int, drafts: int) -> tuple:
        """Attentions of slot i of a block as the one-token step of plain generate() would have given them."""
        return tuple(self._attention_slice(layer, index, i, drafts) for index, layer in enumerate(attentions))

    def _attention_slice(self, attention: torch.Tensor | None, index: int, i: int, drafts: int) -> torch.Tensor | None:
        if attention is None:
            return None
        query, end = attention.shape[-2] - 1 - drafts + i, attention.shape[-1] - drafts + i
        window = self._windows[index] if index < len(self._windows) else None
        return attention[:, :, query : query + 1, max(0, end - window) if window else 0 : end]

    def draft_context(self, draft: DSparkForCausalLM) -> tuple[DraftContext | None, list[int] | None]:
        """The context that an earlier call of this draft left with the cache, and its text if it is known.

        Copies of a cache carry both along.
        """
        owner, context, text = getattr(self.cache, "_dspark_context", (None, None, None))
        if context is None or owner != draft.context_owner.key:
            return None, None
        wanted = draft.dtype, draft.device, draft.context_window
        return (context, text) if (context.dtype, context.device, context.window) == wanted else (None, None)

    def close(self) -> None:
        """End of the call, also by an exception: no unverified token stays, and layers drop old states again."""
        extra = 0
        for layer in reversed(self.cache.layers) if self._committed and self.croppable else ():
            # Each by itself: an interrupted forward has reached the first layers only. A layer that holds a state
            # instead of keys has no length; it goes with the next one that has.
            if hasattr(layer, "get_seq_length"):
                extra = max(0, int(layer.get_seq_length()) - self._committed)
            layer.crop(-extra)
        if self._states and self.croppable:
            self._states.restore()
        for layer in self._recording:
            layer.record_past = False

    def keep_draft_context(self, draft: DSparkForCausalLM, context: DraftContext, text: list[int] | None) -> None:
        """Leave the draft's context with the cache, for the next turn; `text` holds the ids of the real tokens."""
        self.cache._dspark_context = (draft.context_owner.key, context, text)
