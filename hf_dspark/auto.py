"""What `import hf_dspark` tells transformers' Auto classes.

A folder is claimed through a known name in `architectures` only; everything else resolves as without the import.
"""

import functools
from typing import Any

import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto import auto_factory

from .configuration_dspark import DSparkConfig

# Configs that DeepSpec drafts carry: copies of their target's.
CLAIMED_CONFIGS = ("Qwen3Config", "Gemma4TextConfig", "Gemma4UnifiedTextConfig")
MARK = "_hf_dspark"


def register() -> None:
    """Claim DeepSpec's architecture names and this package's own model type. May be called any number of times."""
    from .modeling_dspark import DSparkForCausalLM, Gemma4DSparkModel, Qwen3DSparkModel

    claimed = (Qwen3DSparkModel, Gemma4DSparkModel)
    _guard_missing_architectures()
    _guard_remote_configs(tuple(model.__name__ for model in claimed))
    AutoConfig.register(DSparkConfig.model_type, DSparkConfig, exist_ok=True)
    for auto in (AutoModel, AutoModelForCausalLM):
        auto.register(DSparkConfig, DSparkForCausalLM, exist_ok=True)
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


def _guard_missing_architectures() -> None:
    """Let a config without `architectures` resolve to the native class.

    Upstream iterates over `None` as soon as a config maps to several classes (seen from 5.17 to 5.24), which would
    break fresh configs and every composite model with a Qwen3 text part.
    """
    original = auto_factory._get_model_class
    if hasattr(original, MARK):
        return

    @functools.wraps(original)
    def get_model_class(config, model_mapping):
        if getattr(config, "architectures", None) is None:
            models = model_mapping[type(config)]
            return models[0] if isinstance(models, (list, tuple)) else models
        return original(config, model_mapping)

    setattr(get_model_class, MARK, True)
    auto_factory._get_model_class = get_model_class


def _guard_remote_configs(names: tuple[str, ...]) -> None:
    """Never run a claimed folder's own config code, also under `trust_remote_code=True`.

    Model code needs no guard: Auto classes prefer a registered class from outside transformers.
    """
    original = AutoConfig.from_pretrained.__func__
    if hasattr(original, MARK):
        return

    @functools.wraps(original)
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        if kwargs.get("trust_remote_code"):
            unrelated = ("trust_remote_code", "code_revision", "return_unused_kwargs")
            hub = {key: value for key, value in kwargs.items() if key not in unrelated}
            raw, _ = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **hub)
            if any(name in names for name in raw.get("architectures") or ()):
                kwargs["trust_remote_code"] = False
        return original(cls, pretrained_model_name_or_path, **kwargs)

    setattr(from_pretrained, MARK, True)
    AutoConfig.from_pretrained = classmethod(from_pretrained)
