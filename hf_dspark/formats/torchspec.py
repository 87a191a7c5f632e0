"""TorchSpec drafts: flat keys, tensors under TorchSpec's internal names or DeepSpec's, no block size in DSpark files.

`num_target_layers` is the number of taps, `target_num_hidden_layers` the target's depth. One class name stands for its
anchor-first DSpark and its 1+N DFlash, so the Markov head in the file tells them apart. Published as
Dogacel/Qwen3-8B-DSpark.
"""

from typing import Any

from ..configuration_dspark import DSparkConfig
from . import deepspec_write, parts
from .backbone import qwen3_config, renamed
from .keys import Keys, is_labelled
from .zlab import LABELS

NAME = "torchspec"
MODEL_TYPES = ("dflash", "qwen3_dspark")
DEPTH = "target_num_hidden_layers"
NAMES = {"context_proj.": "fc.", "context_norm.": "hidden_norm.", "final_norm.": "norm.", "midlayer.": "layers.0."}
WHY = {
    True: "TorchSpec trains DSpark drafts on the token behind every slot, and the file has a Markov head",
    False: "TorchSpec's DFlash does not read the anchor's slot, and the file has no Markov head",
}


def matches(raw: dict[str, Any], tensors: parts.Tensors) -> bool:
    if raw.get("model_type") in MODEL_TYPES or raw.get(DEPTH) is not None:
        return True
    heads = any(name.startswith("markov_head.") for name in tensors)
    return (is_labelled(raw, LABELS) and heads) or any(name.startswith(tuple(NAMES)) for name in tensors)


def read(raw: dict[str, Any], tensors: parts.Tensors, **overrides: Any) -> tuple[DSparkConfig, dict[str, str]]:
    """See `deepspec.read`."""
    names = renamed(tensors, _parameter_name)
    return _read(Keys(raw, overrides), {new: tensors[old] for old, new in names.items()}), names


def _parameter_name(name: str) -> str:
    prefix = next((prefix for prefix in NAMES if name.startswith(prefix)), None)
    return name if prefix is None else NAMES[prefix] + name.removeprefix(prefix)


def _read(keys: Keys, tensors: parts.Tensors) -> DSparkConfig:
    keys.note("family", "TorchSpec: its keys or tensor names")
    parts.refuse_unsupported(keys)
    dspark = any(name.startswith("markov_head.") for name in tensors)
    depth = keys.get(DEPTH, "count", None, nested=True)
    if keys.find("num_target_layers", nested=True)[0] is not None:
        keys.note("num_target_layers", f"{depth}: `{DEPTH}`; `num_target_layers` counts the taps")
    return qwen3_config(
        keys,
        tensors,
        family=NAME,
        anchor_first=dspark,
        why=WHY[dspark],
        num_target_layers=depth,
        raw_embeddings=True,
    )


def write(config: DSparkConfig) -> dict[str, Any]:
    """The file's own keys; what has changed since it was read is written at the top."""
    return deepspec_write.as_read(config, _read, anchor_first=bool(config.markov_rank))
