"""Targets with recurrent states (linear attention, state-space layers): their caches cannot be cut, only put back."""

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from .._compat import CACHE_KEY

# Whether a class of targets can go on from a recurrent state with several tokens: a matter of its code.
_TRIED: dict[tuple, str | None] = {}


class RecurrentStates:
    """Copies of the recurrent and convolution states of cache layers, from one point of the text.

    Layers of transformers' caches that have neither are left out; without any, an instance is false.
    """

    def __init__(self, layers: list[Any]):
        self._kept = [
            (states, i, state.clone())
            for layer in layers
            if any(getattr(layer, "is_recurrent_states_initialized", {}).values())
            for states in (layer.recurrent_states, layer.conv_states)
            for i, state in states.items()
            if state is not None
        ]

    def __bool__(self) -> bool:
        return bool(self._kept)

    def restore(self) -> None:
        """Put the states back. A convolution may have kept more columns since, so it gets a new tensor."""
        for states, i, state in self._kept:
            if states[i].shape == state.shape:
                states[i].copy_(state)
            else:
                states[i] = state.clone()


def has_recurrent_layers(cache: Any) -> bool:
    return any(hasattr(layer, "recurrent_states") for layer in cache.layers)


@torch.no_grad()
def why_not_rewound(target: PreTrainedModel) -> str | None:
    """What keeps a target with recurrent layers from verifying drafts; `None` when nothing does.

    Tried once for each class of targets, with a few short forwards: several tokens behind a state that was put back
    must give what plain decoding gives one by one. Families that start such blocks from an empty state, or whose step
    is not quite the recurrence of their prompts, fail here.
    """
    key = type(target), target.device.type, target.dtype, target.training
    if key not in _TRIED:
        # Vision-language models keep the position offset of their last prompt in an attribute.
        kept = [(module, module.rope_deltas) for module in target.modules() if "rope_deltas" in vars(module)]
        try:
            _TRIED[key] = None if _goes_on(target) else "gives something else for several tokens behind a state"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a model's own code raises is the answer
            _TRIED[key] = f"cannot go on from a state with several tokens ({type(error).__name__}: {error})"
        finally:
            for module, deltas in kept:
                module.rope_deltas = deltas
    why_not = _TRIED[key]
    return why_not and f"{type(target).__name__} {why_not}"


def _goes_on(target: PreTrainedModel) -> bool:
    from .target_cache import TargetCache

    text = target.config.get_text_config(decoder=True)
    prompt, rejected, block = (torch.arange(1, 15, device=target.device) % text.vocab_size)[None].split((8, 3, 3), -1)

    def forward(ids: torch.Tensor, cache: DynamicCache) -> Any:
        return target(input_ids=ids, use_cache=True, **{CACHE_KEY: cache})

    cache = DynamicCache(config=text)
    forward(prompt, cache)
    expected = torch.cat([forward(token, cache).logits for token in block.split(1, -1)], dim=1).float()
    cache = DynamicCache(config=text)
    rewound = TargetCache(cache, text)
    rewound.start(forward(prompt, cache))
    if not rewound.croppable:
        return False
    forward(rejected, cache)
    rewound.forget(3)
    found = forward(block, cache).logits.float()
    tolerance = 1e-4 if target.dtype == torch.float32 else 0.1
    return bool((found - expected).norm() <= tolerance * expected.norm())
