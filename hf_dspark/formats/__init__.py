"""Foreign checkpoints in, `DSparkConfig` and tensor names out, and back.

One module per family with `NAME`, `matches(raw, tensors)`, `read(raw, tensors, *, sample_from_anchor=None)` and, where
it can be written, `write(config)`. Only this package knows foreign key names. The family is decided by keys and tensor
names, never by the architecture's name alone.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers.utils import logging

from .._hub_files import TensorInfo, listing, read_config, read_headers, resolve_folder
from ..configuration_dspark import DSparkConfig
from . import deepspec, own
from .keys import labels
from .parts import check_sizes
from .refusals import refuse_other_families, refuse_quantised

logger = logging.get_logger(__name__)

FAMILIES = (own, deepspec)
# Keys that only drafts have; a config with none of them is an ordinary model.
DRAFT_KEYS = ("target_layer_ids", "block_size", "mask_token_id", "markov_rank", "num_anchors", "dflash_config")


@dataclass(frozen=True)
class Checkpoint:
    """A draft on disk, opened but not loaded.

    Attributes:
        folder: where its files lie.
        config: what it is.
        renames: file tensor name -> parameter name of every tensor to be loaded.
        tensors: shape, dtype and file of every stored tensor.
    """

    folder: Path
    config: DSparkConfig
    renames: dict[str, str]
    tensors: dict[str, TensorInfo] = field(default_factory=dict, repr=False)


def open_checkpoint(
    path_or_id: str | os.PathLike, *, sample_from_anchor: bool | None = None, **hub_kwargs: Any
) -> Checkpoint:
    """Find a draft, decide its family and translate its config. No weight is loaded and no code of the folder runs.

    Args:
        path_or_id: local folder or hub id.
        sample_from_anchor: overrules the block layout that the file states or implies.
        hub_kwargs: `revision`, `cache_dir`, `token`, `local_files_only`, `force_download`, `subfolder`.

    Raises:
        OSError: nothing is found under that name, or it cannot be reached.
        ValueError: not a draft this version reads, damaged, or contradictory; the message names what and the fix.
    """
    # The config first: what is refused by its keys is not downloaded.
    raw = read_config(resolve_folder(path_or_id, weights=False, **hub_kwargs))
    refuse_other_families(raw, ())
    if not _may_be_draft(raw):
        raise ValueError(_not_a_draft(path_or_id, raw))
    folder = resolve_folder(path_or_id, **hub_kwargs)
    raw = read_config(folder)  # again, in case the repository has moved on in between
    tensors = read_headers(folder)
    family = detect(raw, tensors)
    refuse_quantised({name: info.dtype for name, info in tensors.items()})
    config, renames = family.read(raw, tensors, sample_from_anchor=sample_from_anchor)
    check_sizes(config, {new: tensors[old].shape for old, new in renames.items()})
    code = sorted(path.name for path in folder.glob("*.py"))
    if code or raw.get("auto_map"):
        why = f"{listing(code) or '`auto_map`'} of the checkpoint is never run: this package has its own classes"
        config.resolution["code"] = why
        logger.warning(f"code: {why}")
    return Checkpoint(folder, config, renames, tensors)


def detect(raw: dict[str, Any], tensors: dict[str, TensorInfo]) -> ModuleType:
    """The module of the family that a config and its tensors belong to.

    Raises:
        ValueError: another family (by name), or no draft at all.
    """
    refuse_other_families(raw, tensors)
    for family in FAMILIES:
        if family.matches(raw, tensors):
            return family
    raise ValueError(_not_a_draft("This checkpoint", raw))


def check_tensors(checkpoint: Checkpoint, expected: dict[str, tuple[int, ...]]) -> None:
    """Account for every tensor: all of the file's are used, all of the model's come from the file, shapes agree.

    Args:
        expected: parameter and buffer names of the model with their shapes.

    Raises:
        ValueError: names the tensors that are missing, unknown or misshapen.
    """
    stored = {new: checkpoint.tensors[old].shape for old, new in checkpoint.renames.items()}
    misshapen = [
        f"{name} is {list(stored[name])} instead of {list(expected[name])}"
        for name in sorted(stored.keys() & expected.keys())
        if tuple(stored[name]) != tuple(expected[name])
    ]
    faults = {
        "missing": sorted(expected.keys() - stored.keys()),
        "unknown, so the draft would not be what was trained": sorted(stored.keys() - expected.keys()),
        "of another shape than config.json makes them": misshapen,
    }
    found = "; ".join(f"{fault}: {listing(names)}" for fault, names in faults.items() if names)
    if found:
        raise ValueError(
            f"The tensors of {checkpoint.folder} do not make the draft of its config.json. Tensors {found}. "
            "Download it again, or give the config that belongs to these tensors."
        )


def foreign_config(config: DSparkConfig, format: str | None = None) -> dict[str, Any]:
    """config.json to write for a draft.

    Args:
        format: None for the form it came in, `"deepspec"` to convert; drafts made from scratch become DeepSpec's.

    Raises:
        ValueError: a form that is unknown or cannot be written.
    """
    wanted = format or (deepspec.NAME if config.source_format == own.NAME else config.source_format)
    writers = {family.NAME: family.write for family in FAMILIES if hasattr(family, "write")}
    if wanted not in writers:
        raise ValueError(f"`format` {wanted!r} cannot be written by this version yet; it writes: {', '.join(writers)}.")
    return writers[wanted](config)


def _may_be_draft(raw: dict[str, Any]) -> bool:
    labelled = any(label in deepspec.ARCHITECTURES.values() for label in labels(raw))
    return labelled or raw.get("model_type") == own.NAME or any(raw.get(key) is not None for key in DRAFT_KEYS)


def _not_a_draft(name: Any, raw: dict[str, Any]) -> str:
    kind = raw.get("architectures") or raw.get("model_type") or "no model type"
    return (
        f"{name} is not a DSpark draft ({kind}): it lacks `target_layer_ids` or the tensors fc.weight and "
        "hidden_norm.weight. A target is loaded with AutoModelForCausalLM; DSparkForCausalLM takes its draft."
    )
