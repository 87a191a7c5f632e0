"""What `import hf_dspark` tells transformers' Auto classes.

A folder is claimed through a known name in `architectures`, or by its `speculators_model_type`; everything else
resolves as without the import.
"""

import functools
from typing import Any

import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto import auto_factory

from . import formats
from .configuration_dspark import DSparkConfig

# Configs that DeepSpec drafts carry: copies of their target's.
CLAIMED_CONFIGS = ("Qwen3Config", "Gemma4TextConfig", "Gemma4UnifiedTextConfig")
MARK = "_hf_dspark"


class DraftFileConfig(PreTrainedConfig):
    """What AutoConfig gives for the folder of a draft that names no model type transformers knows.

    It only leads the Auto classes to `DSparkForCausalLM`, which reads the folder's own keys.
    """

    model_type = "dspark_file"


def register() -> None:
    """Claim the names of drafts and this package's own model types. May be called any number of times."""
    from .modeling_dspark import DSparkForCausalLM, Gemma4DSparkModel, Qwen3DSparkModel

    claimed = (Qwen3DSparkModel, Gemma4DSparkModel)
    _guard_model_class(DSparkForCausalLM)
    _guard_configs()
    for config in (DSparkConfig, DraftFileConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
    for auto in (AutoModel, AutoModelForCausalLM):
        auto.register(DSparkConfig, DSparkForCausalLM, exist_ok=True)
        # `register` wants a model's own config class.
        auto._model_mapping._extra_content[DraftFileConfig] = DSparkForCausalLM
        for name in CLAIMED_CONFIGS:
            config_class = getattr(transformers, name, None)
            if config_class is not None and config_class in auto._model_mapping:
                _add(auto._model_mapping, config_class, claimed)


def _add(mapping: Any, config_class: type, models: tuple[type, ...]) -> None:
    """Append to what a config resolves to. The first entry, the native class, stays the default.

    `register(..., exist_ok=True)` would do from 5.20 on; 5.18 and 5.19 ignore it for transformers' own configs.
    """
    present = mapping[config_class]
    present = tuple(present) if isinstance(present, (list, tuple)) else (present,)
    mapping._extra_content[config_class] = present + tuple(model for model in models if model not in present)


def _guard_model_class(draft_class: type) -> None:
    """Resolve configs that name a draft to it, and let a config without `architectures` resolve to the native class.

    For the latter upstream iterates over `None` as soon as a config maps to several classes (seen from 5.17 to 5.24),
    which would break fresh configs and every composite model with a Qwen3 text part.
    """
    original = auto_factory._get_model_class
    if hasattr(original, MARK):
        return

    @functools.wraps(original)
    def get_model_class(config, model_mapping):
        if getattr(config, "architectures", None) is None and getattr(config, "speculators_model_type", None) is None:
            models = model_mapping[type(config)]
            return models[0] if isinstance(models, (list, tuple)) else models
        claims = model_mapping in (AutoModel._model_mapping, AutoModelForCausalLM._model_mapping)
        found = model_mapping[type(config)] if claims else ()
        models = found if isinstance(found, (list, tuple)) else (found,)
        names = {model.__name__ for model in models}
        if claims and not names & set(config.architectures or ()) and formats.is_named_draft(vars(config)):
            return draft_class
        return original(config, model_mapping)

    setattr(get_model_class, MARK, True)
    auto_factory._get_model_class = get_model_class


def _guard_configs() -> None:
    """Give a claimed folder without a known model type a config, and never run its own config code.

    Also not under `trust_remote_code=True`. Model code needs no guard: Auto classes prefer a registered class from
    outside transformers.
    """
    original = AutoConfig.from_pretrained.__func__
    if hasattr(original, MARK):
        return

    def read(path: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """config.json, and the arguments that do not say where it is."""
        given = {key: value for key, value in kwargs.items() if key not in ("trust_remote_code", "code_revision")}
        return PreTrainedConfig.get_config_dict(path, **given)

    @functools.wraps(original)
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        if kwargs.get("trust_remote_code") and formats.is_named_draft(read(pretrained_model_name_or_path, kwargs)[0]):
            kwargs["trust_remote_code"] = False
        try:
            return original(cls, pretrained_model_name_or_path, **kwargs)
        except (ValueError, KeyError):
            raw, unused = read(pretrained_model_name_or_path, kwargs)
            if not formats.is_named_draft(raw):
                raise
        names = (*formats.DRAFT_KEYS, *formats.OVERRIDES, "architectures", "speculators_model_type")
        return DraftFileConfig.from_dict({name: raw[name] for name in names if name in raw}, **unused)

    setattr(from_pretrained, MARK, True)
    AutoConfig.from_pretrained = classmethod(from_pretrained)
