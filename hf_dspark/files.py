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
    loaded = load(
        checkpoint.folder,
        *model_args,
        config=checkpoint.config,
        key_mapping=renames or None,
        use_safetensors=True,
        **kwargs,
    )
    if (checkpoint.folder / GENERATION_CONFIG_NAME).is_file():
        draft = loaded[0] if isinstance(loaded, tuple) else loaded  # `output_loading_info=True` gives a tuple
        draft.generation_config = GenerationConfig.from_pretrained(checkpoint.folder)
    return loaded


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
    save(directory, *args, state_dict={name: tensor.detach().clone() for name, tensor in tensors.items()}, **kwargs)
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
        embedded = vocabulary.embed(torch.arange(size, device=vocabulary.device))
        factor = torch.tensor(config.embedding_scale, dtype=embedded.dtype)
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
