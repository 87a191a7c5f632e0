"""DSpark drafts of SpecForge and NVIDIA ModelOpt, LFM2.5's among them: taps and heads in `dflash_config`.

Anchor-first, normally without embeddings and head. LFM2.5 drafts turn neighbouring rotary pairs. Older files have the
heads under `logit_head.`. Published as RadixArk/*, LiquidAI/LFM2.5-*-DSpark.
"""

from typing import Any

from ..configuration_dspark import DSparkConfig
from . import deepspec_write, parts
from .backbone import qwen3_config, renamed
from .keys import Keys, is_labelled

NAME = "specforge"
LABELS = ("Lfm2DSparkDraftModel",)
PREFIX = "logit_head."
WHY = "SpecForge, ModelOpt and LFM2.5 train DSpark drafts on the token behind every slot"


def matches(raw: dict[str, Any], tensors: parts.Tensors) -> bool:
    if is_labelled(raw, deepspec_write.ARCHITECTURES.values()):
        return False  # converted to DeepSpec's conventions, keys moved or not
    nest = raw.get("dflash_config")
    nested = isinstance(nest, dict) and (nest.get("projector_type") == "dspark" or bool(nest.get("markov_rank")))
    return nested or is_labelled(raw, LABELS) or any(name.startswith(PREFIX) for name in tensors)


def read(raw: dict[str, Any], tensors: parts.Tensors, **overrides: Any) -> tuple[DSparkConfig, dict[str, str]]:
    """See `deepspec.read`."""
    names = renamed(tensors, lambda name: name.removeprefix(PREFIX))
    return _read(Keys(raw, overrides), {new: tensors[old] for old, new in names.items()}), names


def _read(keys: Keys, tensors: parts.Tensors) -> DSparkConfig:
    keys.note("family", "DSpark of SpecForge, ModelOpt or LFM2.5: heads in `dflash_config`, or its names")
    parts.refuse_unsupported(keys)
    return qwen3_config(keys, tensors, family=NAME, anchor_first=True, why=WHY, raw_embeddings=True)


def write(config: DSparkConfig) -> dict[str, Any]:
    """The file's own keys; what has changed since it was read is written at the top."""
    return deepspec_write.as_read(config, _read, anchor_first=True)
