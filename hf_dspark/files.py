"""Reading and writing draft folders through transformers' own loader and saver."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import formats
from .configuration_dspark import DSparkConfig

HUB_ARGUMENTS = ("revision", "cache_dir", "token", "local_files_only", "force_download", "subfolder")
# AutoModel passes these on; they concern code or pickle files of a repository, neither of which is ever used.
UNUSED_ARGUMENTS = (
    "trust_remote_code",
    "code_revision",
    "adapter_kwargs",
    "use_safetensors",
    "_from_auto",
    "_commit_hash",
)


def load_draft(
    cls: type,
    load: Callable,
    path_or_id: str | Path,
    sample_from_anchor: bool | None,
    config: Any,
    *model_args: Any,
    **kwargs: Any,
):
    """`from_pretrained` of a draft; `load` is transformers' own. See `DSparkForCausalLM.from_pretrained`."""
    hub = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs}
    if kwargs.get("use_safetensors") is False:
        raise ValueError("`use_safetensors=False` is not supported: drafts are only read from safetensors.")
    for name in UNUSED_ARGUMENTS:
        kwargs.pop(name, None)
    if overridden := kwargs.keys() & DSparkConfig().to_dict().keys() - {"dtype"}:
        raise ValueError(_no_override(sorted(overridden)))
    if sample_from_anchor is None and config is not None and not isinstance(config, DSparkConfig):
        # AutoModel has put the argument into the config when the file has that key.
        sample_from_anchor = getattr(config, "sample_from_anchor", None)
    checkpoint = formats.open_checkpoint(path_or_id, sample_from_anchor=sample_from_anchor, **hub)
    if isinstance(config, DSparkConfig):
        checkpoint = dataclasses.replace(checkpoint, config=config)
    elif config is not None:
        stated = checkpoint.config.foreign or {}
        changed = [
            name for name in formats.DRAFT_KEYS if name in stated and getattr(config, name, None) != stated[name]
        ]
        if changed:
            raise ValueError(_no_override(changed))
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in cls(checkpoint.config).state_dict().items()}
    formats.check_tensors(checkpoint, expected)
    renames = {f"^{re.escape(old)}$": new for old, new in checkpoint.renames.items() if old != new}
    return load(
        checkpoint.folder,
        *model_args,
        config=checkpoint.config,
        key_mapping=renames or None,
        use_safetensors=True,
        **kwargs,
    )


def _no_override(names: list[str]) -> str:
    return (
        f"{', '.join(f'`{name}`' for name in names)} cannot be overridden while loading, except `sample_from_anchor`. "
        "Pass a whole `config=DSparkConfig(...)`, or change config.json."
    )


def save_draft(
    draft: Any,
    save: Callable,
    directory: str | Path,
    format: str | None,
    include_shared: bool,
    *args: Any,
    **kwargs: Any,
) -> None:
    """`save_pretrained` of a draft; `save` is transformers' own. See `DSparkForCausalLM.save_pretrained`."""
    config = formats.foreign_config(draft.config, format)
    tensors = dict(kwargs.pop("state_dict", None) or draft.state_dict())
    if include_shared:
        vocabulary = draft.vocabulary
        shared = {"embed_tokens.weight": vocabulary.embeddings, "lm_head.weight": vocabulary.head}
        tensors |= {name: module.weight for name, module in shared.items() if module is not None}
    # Clones, because the key and value projections are views of one matrix.
    save(directory, *args, state_dict={name: tensor.detach().clone() for name, tensor in tensors.items()}, **kwargs)
    Path(directory, "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
