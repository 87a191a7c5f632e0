"""Foreign checkpoints in, `DSparkConfig` and tensor names out, and back.

One module per family with `NAME`, `matches(raw, tensors)`, `read(raw, tensors, **overrides)` and, where it can be
written, `write(config)` and `write_tensors(config, tensors)`. Only this package knows foreign key names. The family is
decided by keys and tensor names, never by the architecture's name alone. docs/formats.md lists them.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers.utils import logging

from .._hub_files import AUTO_MAP, LOADER, TensorInfo, listing, read_config, read_headers, resolve_folder
from ..configuration_dspark import DSparkConfig
from . import deepspec, muse, own, specforge, speculators, torchspec, zlab
from .keys import OVERRIDES, is_labelled
from .offsets import check_offsets
from .parts import check_sizes
from .refusals import refuse_other_families, refuse_quantised

logger = logging.get_logger(__name__)

FAMILIES = (own, speculators, muse, torchspec, specforge, zlab, deepspec)  # the first that matches
# Names in `architectures` by which the Auto classes know a draft.
LABELS = (
    *deepspec.ARCHITECTURES.values(), *zlab.LABELS, *specforge.LABELS, "DSparkDraftModel", "DSparkSpeculator",
    "DFlashSpeculator",
)  # fmt: skip
CONVERTERS = (deepspec.NAME, speculators.NAME)  # forms that drafts of other families can be written in
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


def open_checkpoint(path_or_id: str | os.PathLike, **kwargs: Any) -> Checkpoint:
    """Find a draft, decide its family and translate its config. No weight is loaded and no code of the folder runs.

    Args:
        path_or_id: local folder or hub id.
        kwargs: `keys.OVERRIDES` overrule what the file states or implies (None: they do not); `revision`, `cache_dir`,
            `token`, `local_files_only`, `force_download` and `subfolder` say where it is.

    Raises:
        OSError: nothing is found under that name, or it cannot be reached.
        ValueError: not a draft this version reads, damaged, or contradictory; the message names what and the fix.
    """
    overrides = {name: kwargs.pop(name) for name in OVERRIDES if name in kwargs}
    # The config first: what is refused by its keys is not downloaded.
    raw = read_raw(path_or_id, **kwargs)
    refuse_other_families(raw, ())
    if not _may_be_draft(raw):
        if os.path.isdir(path_or_id):  # a draft of another family, whatever it calls itself
            refuse_other_families(raw, read_headers(resolve_folder(path_or_id, **kwargs)))
        raise ValueError(_not_a_draft(path_or_id, raw))
    folder = resolve_folder(path_or_id, **kwargs)
    raw = read_config(folder)  # again, in case the repository has moved on in between
    tensors = read_headers(folder)
    family = detect(raw, tensors)
    refuse_quantised(raw, {name: info.dtype for name, info in tensors.items()})
    config, renames = family.read(raw, tensors, **overrides)
    check_sizes(config, {new: tensors[old].shape for old, new in renames.items()})
    check_offsets(folder, tensors, config.vocab_size, config.resolution)
    code = sorted(path.name for path in folder.glob("*.py"))
    if code or raw.get("auto_map"):
        why = f"{listing(code) or '`auto_map`'} of the checkpoint is never run: this package has its own classes"
        config.resolution["code"] = why
        log = logger.info if raw.get("auto_map") == AUTO_MAP and code == [LOADER] else logger.warning
        log(f"code: {why}")
    return Checkpoint(folder, config, renames, tensors)


def read_raw(path_or_id: str | os.PathLike, **hub_kwargs: Any) -> dict[str, Any]:
    """config.json of a folder or repository, as it stands."""
    return read_config(resolve_folder(path_or_id, weights=False, **hub_kwargs))


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
        format: None for the form it came in, or one of `CONVERTERS`; drafts made from scratch become DeepSpec's, or
            speculators' if their vocabulary is reduced.

    Raises:
        ValueError: a form that is unknown, cannot be written, or has no word for something the draft does.
    """
    return _writer(config, format).write(config)


def foreign_tensors(config: DSparkConfig, tensors: dict[str, Any], format: str | None = None) -> dict[str, Any]:
    """The tensors to write beside `foreign_config`, by the names of that form; `tensors` by parameter name."""
    writer = _writer(config, format)
    return writer.write_tensors(config, tensors) if hasattr(writer, "write_tensors") else tensors


def _writer(config: DSparkConfig, format: str | None) -> ModuleType:
    wanted = format or config.source_format
    if wanted == own.NAME:
        wanted = deepspec.NAME if config.draft_vocab_size is None else speculators.NAME
    writers = {family.NAME: family for family in FAMILIES if hasattr(family, "write")}
    if wanted not in writers or (format not in (None, config.source_format, *CONVERTERS)):
        names = ", ".join(map(repr, CONVERTERS))
        raise ValueError(
            f"`format` {wanted!r} cannot be written; give one of {names}, or None for the form it came in."
        )
    return writers[wanted]


def is_named_draft(raw: dict[str, Any]) -> bool:
    """Whether a config.json says by name that it is a draft of a family that is read."""
    return is_labelled(raw, LABELS) or raw.get("speculators_model_type") in speculators.KINDS


def _may_be_draft(raw: dict[str, Any]) -> bool:
    named = is_named_draft(raw) or raw.get("model_type") in (own.NAME, muse.NAME, *torchspec.MODEL_TYPES)
    return named or speculators.matches(raw, {}) or any(raw.get(key) is not None for key in DRAFT_KEYS)


def _not_a_draft(name: Any, raw: dict[str, Any]) -> str:
    kind = raw.get("architectures") or raw.get("model_type") or "no model type"
    return (
        f"{name} is not a DSpark draft ({kind}): it lacks `target_layer_ids` or the tensors fc.weight and "
        "hidden_norm.weight. A target is loaded with AutoModelForCausalLM; DSparkForCausalLM takes its draft."
    )
