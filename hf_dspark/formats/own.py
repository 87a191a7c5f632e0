"""The package's own config.json, which `DSparkConfig.save_pretrained` writes beside a draft's tensors."""

from typing import Any

from ..configuration_dspark import DSparkConfig
from .parts import Tensors, check_activation, make_config
from .rope import check_rope

NAME = "dspark"
# The rest of what transformers writes says nothing about a draft.
FIELDS = (*DSparkConfig.__annotations__, "dtype")


def matches(raw: dict[str, Any], tensors: Tensors) -> bool:
    return raw.get("model_type") == DSparkConfig.model_type


def read(raw: dict[str, Any], tensors: Tensors, **overrides: Any) -> tuple[DSparkConfig, dict[str, str]]:
    """The config as it stands, but for what the caller sets. Tensor names are the parameter names."""
    fields = {name: raw[name] for name in FIELDS if name in raw}
    fields |= {name: value for name, value in overrides.items() if value is not None}
    config = make_config(fields)
    check_rope(config.rope_parameters or {})
    check_activation(config.hidden_act)
    return config, {name: name for name in tensors}
