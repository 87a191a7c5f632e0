"""The package's own config.json, which `DSparkConfig.save_pretrained` writes beside a draft's tensors."""

from typing import Any

from ..configuration_dspark import DSparkConfig
from .parts import Tensors, make_config

NAME = "dspark"


def matches(raw: dict[str, Any], tensors: Tensors) -> bool:
    return raw.get("model_type") == DSparkConfig.model_type


def read(
    raw: dict[str, Any], tensors: Tensors, *, sample_from_anchor: bool | None = None
) -> tuple[DSparkConfig, dict[str, str]]:
    """The config as it stands; `sample_from_anchor` overrules its layout. Tensor names are the parameter names."""
    fields = {name: raw[name] for name in raw.keys() & DSparkConfig.__dataclass_fields__.keys()}
    if sample_from_anchor is not None:
        fields["sample_from_anchor"] = sample_from_anchor
    return make_config(fields), {name: name for name in tensors}
