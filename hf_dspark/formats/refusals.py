"""Families that are recognised but not read by this version, each refused in one sentence that names it."""

from collections.abc import Collection
from typing import Any, NamedTuple

from .keys import NESTS, labels


class Family(NamedTuple):
    """Marks of a family: any one of them is enough. `keys` maps a key to the value that gives it away (`...`: any)."""

    name: str
    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    keys: dict[str, Any] = {}
    tensors: tuple[str, ...] = ()  # substrings of tensor names


FAMILIES = (
    Family(
        "speculators",
        keys={"speculators_model_type": ..., "transformer_layer_config": ..., "speculators_config": ...},
    ),
    Family("DFlash 2", ("DFlash2DraftModel",), tensors=("candidate_selector.", "_conv.")),
    Family("Domino", keys={"projector_type": "domino"}, tensors=("prefix_gru", "embed_proj")),
    Family("DFly (DFlare)", keys={"model_arch": "dfly", "enable_hidden_correction": True}),
    Family(
        "Kimi K3 DSpark (multi-head latent attention)",
        ("K3DSparkModel",),
        ("k3_dspark", "kimi_k3"),
        tensors=("q_a_proj", "kv_a_proj_with_mqa"),
    ),
    Family(
        "MiniMax or DeepSeek-V4 DSpark (inside the target's own checkpoint)",
        keys={"dspark_block_size": ..., "dspark_target_layer_ids": ...},
        tensors=("language_model.model.dspark.", ".decoder_layer.", "mtp."),
    ),
    Family(
        "transformers' own DFlash assistant",
        model_types=("muse_glimmer_assistant",),
        tensors=("encoder.output_norm_enc.",),
    ),
    Family("LFM2 DSpark", ("Lfm2DSparkDraftModel",)),
    Family(
        "TorchSpec",
        model_types=("dflash", "qwen3_dspark"),
        keys={"target_num_hidden_layers": ...},
        tensors=("context_proj.", "midlayer."),
    ),
    Family("SpecForge or ModelOpt", keys={"projector_type": "dspark"}),
    Family("DFlash (z-lab)", ("DFlashDraftModel",)),
)
QUANTISED = (
    ".scales", ".qweight", ".qzeros", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_zero_point"
)  # fmt: skip
DTYPES = ("F64", "F32", "F16", "BF16")


def refuse_other_families(raw: dict[str, Any], tensors: Collection[str]) -> None:
    """Raise for a config or tensors that carry a mark of a family this version does not read.

    Raises:
        ValueError: names the family and the mark.
    """
    names = labels(raw)
    for family in FAMILIES:
        mark = next((f"architectures {label}" for label in names if label in family.architectures), None)
        if mark is None and raw.get("model_type") in family.model_types:
            mark = f"model_type {raw['model_type']}"
        mark = mark or _key_mark(family, raw)
        if mark is None and family.tensors:
            mark = next((f"tensor {name}" for name in sorted(tensors) if any(t in name for t in family.tensors)), None)
        # DeepSpec's label stands on SpecForge files that were converted to DeepSpec's conventions, keys moved or not.
        converted = family.name.startswith("SpecForge") and "Qwen3DSparkModel" in names
        if mark is not None and not converted:
            raise ValueError(
                f"This is a checkpoint of the family {family.name} ({mark}). This version reads DeepSpec checkpoints "
                "only (such as deepseek-ai/dspark_qwen3_8b_block7)."
            )


def _key_mark(family: Family, raw: dict[str, Any]) -> str | None:
    places = {"": raw} | {f"{nest}.": raw[nest] for nest in NESTS if isinstance(raw.get(nest), dict)}
    for key, value in family.keys.items():
        for place, table in places.items():
            found = table.get(key)
            if found is not None and (value is ... or found == value):
                return f"key {place}{key}" if value is ... else f"{place}{key}: {found!r}"
    return None


def refuse_quantised(dtypes: dict[str, str]) -> None:
    """Raise for tensors that are not plain floating-point numbers.

    Args:
        dtypes: tensor name -> dtype as safetensors spells it.
    """
    packed = [name for name in sorted(dtypes) if name.endswith(QUANTISED)]
    if packed:
        raise ValueError(
            f"This checkpoint is quantised (tensor {packed[0]}). Use the unquantised draft, which is small anyway."
        )
    odd = [name for name in sorted(dtypes) if dtypes[name] not in DTYPES]
    if odd:
        raise ValueError(f"Tensor {odd[0]} has dtype {dtypes[odd[0]]}; a draft needs one of {', '.join(DTYPES)}.")
