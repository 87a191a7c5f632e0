"""Memory of the fast path's caches, from the configs of a pair alone."""

import copy
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel

from .._compat import CACHE_KEY
from ..configuration_dspark import DSparkConfig
from ..target import check_pair
from .engine import whole_slots
from .layout import bucket
from .pair import why_not_target


@dataclass(frozen=True)
class CacheMemory:
    """Bytes that a token of a row takes in the target's cache and in the draft's context, both of `dtype`."""

    target: int
    draft: int
    dtype: torch.dtype

    def num_bytes(self, num_rows: int, length: int) -> int:
        """What an engine allocates that first serves `num_rows` rows of `length` tokens, its spare row included."""
        return (bucket(num_rows) + 1) * whole_slots(length) * (self.target + self.draft)


def cache_memory(target: PreTrainedConfig, draft: DSparkConfig, dtype: torch.dtype | None = None) -> CacheMemory:
    """Memory of the fast path of a pair.

    Args:
        target, draft: the configs; no weight is loaded.
        dtype: of the pair; by default what the target's config states, float32 if it states none.

    Raises:
        ValueError: for a pair that does not fit or has no fast path.
    """
    dtype = dtype or target.get_text_config(decoder=True).dtype or target.dtype or torch.float32
    model = meta_target(target)
    check_pair(draft, model)
    if why_not := why_not_target(model):
        raise ValueError(f"This pair has no fast path: {why_not}.")
    of_draft = 2 * draft.num_hidden_layers * draft.num_key_value_heads * draft.head_dim
    return CacheMemory(sum(layer_widths(model)) * dtype.itemsize, of_draft * dtype.itemsize, dtype)


def meta_target(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a config without storage."""
    with torch.device("meta"):
        # bfloat16, because the products of mixtures of experts take no other dtype without storage.
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.bfloat16, attn_implementation="eager"
        )
    return model.eval()


@torch.no_grad()
def layer_widths(model: PreTrainedModel) -> list[int]:
    """Numbers that each layer of a model on the meta device caches for a token: a forward of one token shows them.

    Configs name these sizes differently in each family, and some differ from layer to layer.
    """
    cache = DynamicCache()
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device="meta"), use_cache=True, **{CACHE_KEY: cache})
    return [layer.keys.numel() + layer.values.numel() for layer in cache.layers]
