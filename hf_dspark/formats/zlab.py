"""z-lab's DFlash drafts: Qwen3-style blocks without embeddings and head, the draft's keys in `dflash_config`.

`block_size` counts the anchor, whose slot is not read. Older files have it at the top, newer ones in the nest. Others,
SpecForge among them, write DFlash drafts in the same form. Published as z-lab/*-DFlash*.
"""

from typing import Any

from ..configuration_dspark import DSparkConfig
from . import deepspec_write, parts
from .backbone import qwen3_config, renamed
from .keys import Keys, is_labelled

NAME = "zlab"
LABELS = ("DFlashDraftModel",)
WHY = "in z-lab's DFlash `block_size` counts the anchor, and its slot is not read"


def matches(raw: dict[str, Any], tensors: parts.Tensors) -> bool:
    if is_labelled(raw, deepspec_write.ARCHITECTURES.values()):
        return False
    marked = isinstance(raw.get("dflash_config"), dict) or is_labelled(raw, LABELS)
    return marked and "fc.weight" in tensors and not any(name.startswith("markov_head.") for name in tensors)


def read(raw: dict[str, Any], tensors: parts.Tensors, **overrides: Any) -> tuple[DSparkConfig, dict[str, str]]:
    """See `deepspec.read`."""
    return _read(Keys(raw, overrides), tensors), renamed(tensors, lambda name: name)


def _read(keys: Keys, tensors: parts.Tensors) -> DSparkConfig:
    keys.note("family", "DFlash in z-lab's form: its keys, and no Markov head in the file")
    parts.refuse_unsupported(keys)
    return qwen3_config(
        keys,
        tensors,
        family=NAME,
        anchor_first=False,
        why=WHY,
        target_layer_ids=_spread_taps(keys),
        raw_embeddings=True,
        embedding_scale=_factor(keys, "input_embedding_scale"),
        logit_scale=_factor(keys, "output_multiplier", "logit_scale"),
        final_logit_softcapping=_cap(keys),
    )


def _spread_taps(keys: Keys) -> list[int] | None:
    """Taps of a file that names none: as many as draft layers, evenly from layer 1 to the third last of the target."""
    if keys.find("target_layer_ids", nested=True)[0] is not None:
        return None
    count, depth = keys.get("num_hidden_layers", "size"), keys.get("num_target_layers", "size", None, nested=True)
    if depth is None or depth < 4:
        return None
    last = depth - 3
    taps = [depth // 2] if count == 1 else [round(1 + i * (last - 1) / (count - 1)) for i in range(count)]
    why = f"{taps}: config.json names none, and these are spread over the {depth} layers that it states"
    keys.note("taps", why, warn=True)
    return taps


def _factor(keys: Keys, name: str, alias: str | None = None) -> float:
    return float(keys.get(name, "number", 1.0, nested=True, alias=alias))


def _cap(keys: Keys) -> float | None:
    cap = keys.get("final_logit_softcapping", "number", None, nested=True)
    return float(cap) if cap is not None and cap > 0 else None


def write(config: DSparkConfig) -> dict[str, Any]:
    """The file's own keys; what has changed since it was read is written at the top."""
    return deepspec_write.as_read(config, _read, anchor_first=False)
