"""From `--target` and `--draft` to loaded models; a wrong argument is named before anything heavy is read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from .. import formats
from ..configuration_dspark import DSparkConfig
from ..default_pair import default_draft_folder, setup_demo
from ..modeling_dspark import DSparkForCausalLM


@dataclass(frozen=True)
class Models:
    """`target_name` and `draft_name` are what the user gave, or the folders of the embedded pair."""

    target: Any
    draft: DSparkForCausalLM | None
    tokenizer: PreTrainedTokenizerBase
    target_name: str
    draft_name: str | None


def check_pair_arguments(target: str | None, draft: str | None) -> None:
    """Refuse swapped, equal and missing models by their config files alone.

    Raises:
        ValueError: one sentence that names the argument.
    """
    if target is not None and draft is not None and _same(target, draft):
        raise ValueError(
            f"`--target` and `--draft` are both {target}: give the model as `--target` and a draft trained for it "
            "as `--draft`."
        )
    target_is_draft = target is not None and _is_draft("--target", target)
    draft_is_draft = draft is None or _is_draft("--draft", draft)
    if target_is_draft and not draft_is_draft:
        raise ValueError(f"`--target {target}` is a DSpark draft and `--draft {draft}` is not: swap the two.")
    if target_is_draft:
        raise ValueError(f"`--target {target}` is a DSpark draft, which cannot write text alone: pass it as `--draft`.")
    if not draft_is_draft:
        raise ValueError(f"`--draft {draft}` is not a DSpark draft: give the folder or hub id of one.")


def load_models(target: str | None, draft: str | None, *, dtype: str, device_map: str, plain: bool) -> Models:
    """Load what the options name; without names, the embedded pair.

    Raises:
        ValueError: for a pair that cannot work together.
        OSError: for files that cannot be read.
    """
    check_pair_arguments(target, None if plain else draft)
    target_name = target or str(setup_demo())
    draft_name = None if plain else draft or str(default_draft_folder())
    # The draft first: it is small, and what is wrong with it shows before the target is read.
    drafter = DSparkForCausalLM.from_pretrained(draft_name).eval() if draft_name else None
    model = AutoModelForCausalLM.from_pretrained(target_name, dtype=dtype, device_map=device_map).eval()
    if drafter:
        drafter.to(device=model.device, dtype=model.dtype).attach_target(model)
    return Models(model, drafter, AutoTokenizer.from_pretrained(target_name), target_name, draft_name)


def _same(target: str, draft: str) -> bool:
    return target == draft or (Path(target).exists() and Path(target).resolve() == Path(draft).resolve())


def _is_draft(argument: str, name: str) -> bool:
    """Whether a config.json is that of a draft, by its keys.

    Raises:
        ValueError: there is no such model.
    """
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_like_path and not Path(name).is_dir():
        raise ValueError(f"`{argument} {name}`: there is no such folder.")
    try:
        raw, _ = PreTrainedConfig.get_config_dict(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"`{argument} {name}` cannot be read: {error}") from error
    if not raw:
        raise ValueError(f"`{argument} {name}` has no config.json: give the folder or hub id of a model.")
    try:
        formats.refuse_other_families(raw, ())
    except ValueError:  # a draft too, of a family that loading will name
        return True
    own = raw.get("model_type") == DSparkConfig.model_type
    return own or any(raw.get(key) is not None for key in formats.DRAFT_KEYS)
