"""Reading and writing draft folders through transformers' own loader and saver."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from . import formats
from ._hub_files import listing
from .configuration_dspark import DSparkConfig

HUB_ARGUMENTS = ("revision", "cache_dir", "token", "local_files_only", "force_download", "subfolder")
UPLOAD_ARGUMENTS = (
    "repo_id", "commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags",
)  # fmt: skip
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
    overrides: dict[str, Any],
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
    given = None if isinstance(config, DSparkConfig) else config
    if given is not None:
        overrides = _from_auto_config(given, formats.read_raw(path_or_id, **hub)) | {
            name: value for name, value in overrides.items() if value is not None
        }
    checkpoint = formats.open_checkpoint(path_or_id, **overrides, **hub)
    if given is None and config is not None:
        checkpoint = dataclasses.replace(checkpoint, config=config)
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in cls(checkpoint.config).state_dict().items()}
    formats.check_tensors(checkpoint, expected)
    renames = {f"^{re.escape(old)}$": new for old, new in checkpoint.renames.items() if old != new}
    loaded = load(
        checkpoint.folder,
        *model_args,
        config=checkpoint.config,
        key_mapping=renames or None,
        use_safetensors=True,
        **kwargs,
    )
    draft: Any = loaded[0] if isinstance(loaded, tuple) else loaded  # `output_loading_info=True` gives a tuple
    # transformers would save under the file's names, whatever form is asked for.
    vars(draft).pop("_weight_conversions", None)
    _check_finite(draft, checkpoint.folder)
    if (checkpoint.folder / GENERATION_CONFIG_NAME).is_file():
        draft.generation_config = GenerationConfig.from_pretrained(checkpoint.folder)
    return loaded


def _from_auto_config(config: Any, stated: dict[str, Any]) -> dict[str, Any]:
    """Overrides that AutoModel has put into the config because the file has keys of these names.

    Raises:
        ValueError: another key of the draft was changed.
    """
    changed = {
        name: getattr(config, name, None)
        for name in (*formats.DRAFT_KEYS, *formats.OVERRIDES)
        if stated.get(name) is not None and getattr(config, name, None) != stated[name]
    }
    if others := sorted(changed.keys() - set(formats.OVERRIDES)):
        raise ValueError(_no_override(others))
    return changed


def _no_override(names: list[str]) -> str:
    return (
        f"{', '.join(f'`{name}`' for name in names)} cannot be overridden while loading; "
        f"{', '.join(f'`{name}`' for name in formats.OVERRIDES)} can. Pass a whole `config=DSparkConfig(...)`, or "
        "change config.json."
    )


def _check_finite(draft: torch.nn.Module, folder: Path) -> None:
    """Raise ValueError for parameters that hold NaN or infinite numbers; offloaded ones are not looked at."""
    bad = [
        name
        for name, tensor in draft.state_dict().items()
        if tensor.is_floating_point() and not tensor.is_meta and not _is_finite(tensor)
    ]
    if bad:
        raise ValueError(
            f"Tensors of {folder} hold NaN or infinite numbers: {listing(bad)}. The file is damaged, or a tool wrote "
            "what it should have left out; download it again."
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    # Without a second tensor of the same size.
    return not tensor.numel() or all(bool(end.isfinite()) for end in tensor.aminmax())


def save_draft(
    draft: Any,
    save: Callable,
    directory: str | Path,
    format: str | None,
    include_shared: bool,
    *args: Any,
    push_to_hub: bool = False,
    **kwargs: Any,
) -> None:
    """`save_pretrained` of a draft; `save` is transformers' own. See `DSparkForCausalLM.save_pretrained`."""
    hub = {name: kwargs.pop(name) for name in UPLOAD_ARGUMENTS if name in kwargs}
    tensors = dict(kwargs.pop("state_dict", None) or draft.state_dict())
    draft.config.dtype = tensors["fc.weight"].dtype  # the draft may have been moved to another since it was loaded
    config = formats.foreign_config(draft.config, format)
    config.pop("auto_map", None)  # the code it names does not travel along
    if include_shared:
        tensors |= shared_tensors(draft)
    # Clones, because the key and value projections are views of one matrix.
    tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    tensors = formats.foreign_tensors(draft.config, tensors, format)
    save(directory, *args, state_dict=tensors, **kwargs)
    Path(directory, "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    _save_defaults(draft.generation_config, Path(directory))
    if push_to_hub:
        from .hub import push  # above this module

        push(directory, **({"repo_id": Path(directory).name} | hub))


@torch.no_grad()
def shared_tensors(draft: Any) -> dict[str, torch.Tensor]:
    """What the draft shares with its target, as the tensors that make it propose the same without sharing.

    Raises:
        ValueError: no target is attached, or it has too few rows, or a head that is more than one matrix.
    """
    vocabulary, config, tensors = draft.vocabulary, draft.config, {}
    size, dtype = config.vocab_size, draft.dtype
    if not size:
        raise ValueError("The draft's file does not say how many tokens it is for. Save without `include_shared`.")
    if vocabulary.size < size:
        raise ValueError(
            f"The target has {vocabulary.size} rows for a draft of {size} tokens. Save without `include_shared`."
        )
    if (head := vocabulary.head) is not None:
        if not isinstance(head, torch.nn.Linear) or head.bias is not None:
            raise ValueError(f"The target's head {head} is more than a matrix. Save without `include_shared`.")
        tensors["lm_head.weight"] = head.weight[:size].to(dtype)
    if (embeddings := vocabulary.embeddings) is not None:
        # Through the module, which knows its family's factor and how its weight is stored.
        embedded = vocabulary.embed(torch.arange(size, device=vocabulary.device), raw=config.raw_embeddings)
        factor = torch.tensor(1.0 if config.raw_embeddings else config.embedding_scale, dtype=embedded.dtype)
        # The quotient may be rounded; the weight itself is exact where the draft's own factor is the family's.
        same = torch.equal(embeddings.weight[:size] * factor, embedded)
        tensors["embed_tokens.weight"] = (embeddings.weight[:size] if same else embedded / factor).to(dtype)
    return tensors


def _save_defaults(config: GenerationConfig, folder: Path) -> None:
    """Write the options a user has set as defaults; a draft without any has no such file."""
    if config.to_diff_dict() != GenerationConfig().to_diff_dict():
        config.save_pretrained(folder)
    else:
        (folder / GENERATION_CONFIG_NAME).unlink(missing_ok=True)
