"""transformers' own DFlash draft, `muse_glimmer_assistant`: the same blocks, windows that reach both ways, 1+N.

Its window counts the distance itself: a slot at p sees positions from p - W to p + W. The file neither stores nor names
anything of the vocabulary's size. Published as meta-models/Muse-Glimmer-30B-assistant.
"""

from typing import Any

from ..configuration_dspark import DSparkConfig
from . import deepspec_write, parts
from .backbone import block_shape, draft_config, note_attention, renamed
from .keys import Keys

NAME = "muse_glimmer_assistant"
NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
WHY = "transformers' DFlash does not read the anchor's slot"
DEFAULTS = {"rms_norm_eps": 1e-5}


def matches(raw: dict[str, Any], tensors: parts.Tensors) -> bool:
    return raw.get("model_type") == NAME or any(name.startswith("encoder.output_norm_enc.") for name in tensors)


def read(raw: dict[str, Any], tensors: parts.Tensors, **overrides: Any) -> tuple[DSparkConfig, dict[str, str]]:
    """See `deepspec.read`."""
    names = renamed(tensors, lambda name: _replaced(name, NAMES))
    return _read(Keys(raw, overrides), {new: tensors[old] for old, new in names.items()}), names


def _replaced(name: str, prefixes: dict[str, str]) -> str:
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
    return name if prefix is None else prefixes[prefix] + name.removeprefix(prefix)


def _read(keys: Keys, tensors: parts.Tensors) -> DSparkConfig:
    foreign = keys.raw
    keys.raw = DEFAULTS | foreign
    keys.note("family", "transformers' muse_glimmer_assistant: its model type or tensor names")
    parts.refuse_unsupported(keys)
    known = {} if foreign.get("vocab_size") else {"vocab_size": 0}
    fields = block_shape(keys, "qwen3", keys.get("hidden_act", "text", "silu"), **known)
    fields |= keys.sizes("num_key_value_heads", "head_dim") | _attention(keys, fields["num_hidden_layers"])
    return draft_config(
        keys, tensors, fields, family=NAME, anchor_first=False, why=WHY, raw_embeddings=True, foreign=foreign
    )


def _attention(keys: Keys, num_layers: int) -> dict[str, Any]:
    types = keys.get("layer_types", "texts", ["sliding_attention"] * num_layers)
    if "sliding_attention" not in types:
        return {"layer_types": types}
    fields = {"layer_types": types, "sliding_window": keys.get("sliding_window", "size", 2048) + 1}
    note_attention(keys, fields, "its windows reach both ways")
    return fields


def write(config: DSparkConfig) -> dict[str, Any]:
    """The file's own keys; what has changed since it was read is written at the top."""
    return deepspec_write.as_read(config, _read, anchor_first=False)


def write_tensors(config: DSparkConfig, tensors: dict[str, Any]) -> dict[str, Any]:
    """The file's own names."""
    names = {new: old for old, new in NAMES.items()}
    return {_replaced(name, names): tensor for name, tensor in tensors.items()}
