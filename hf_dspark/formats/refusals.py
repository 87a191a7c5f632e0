"""Checkpoints that are recognised and not read, each refused in one sentence: what it is, why not, and where to go."""

from collections.abc import Collection
from typing import Any, NamedTuple

from .keys import NESTS, is_labelled
from .offsets import D2T, T2D


class Family(NamedTuple):
    """Marks of a family: any one of them is enough. `keys` maps a key to the value that gives it away (`...`: any)."""

    name: str
    reason: str  # what its drafts do that this package does not, and what runs them
    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    keys: dict[str, Any] = {}
    tensors: tuple[str, ...] = ()  # substrings of tensor names


EAGLE = (
    "its layer reads token embeddings beside the target's states and drafts token after token; run it with vLLM or "
    "SGLang, or take a DSpark or DFlash draft of the same target"
)
INSIDE = "it is a part of the target's own checkpoint and works on that target's internal states; run it with {}"
FAMILIES = (
    Family(
        "DFlash 2",
        "its convolutions and candidate selector are not DSpark's; run it with z-lab's dflash package or vLLM",
        ("DFlash2DraftModel",),
        keys={"speculators_model_type": "dflash2"},
        tensors=("candidate_selector.", "_conv."),
    ),
    Family(
        "Domino",
        "its causal correction network (prefix GRU) is in the Markov head's place; run it with SpecForge or SGLang",
        keys={"projector_type": "domino"},
        tensors=("prefix_gru", "embed_proj"),
    ),
    Family(
        "DFly (DFlare)",
        "its correction of hidden states and fusion of layers are not DSpark's; run it with the code it came with",
        keys={"model_arch": "dfly", "enable_hidden_correction": True},
        tensors=("fusion_weights", "fusion_norms"),
    ),
    Family(
        "Kimi K3 DSpark",
        "its layers have multi-head latent attention; run it with vLLM or SGLang, or take a draft with grouped-query "
        "attention such as RadixArk's",
        ("K3DSparkModel",),
        ("k3_dspark", "kimi_k3"),
        tensors=("q_a_proj", "kv_a_proj_with_mqa"),
    ),
    Family(
        "MiniMax DSpark",
        INSIDE.format("vLLM or SGLang"),
        tensors=("language_model.model.dspark.", ".decoder_layer."),
    ),
    Family(
        "DeepSeek-V4 DSpark, or MiniMax's",
        INSIDE.format("DeepSeek's inference code, vLLM or SGLang"),
        keys={"dspark_block_size": ..., "dspark_target_layer_ids": ..., "dspark_noise_token_id": ...},
        tensors=("mtp.",),
    ),
    Family(
        "EAGLE-3",
        EAGLE,
        ("LlamaForCausalLMEagle3", "Eagle3Speculator", "Eagle3LlamaForCausalLM", "EagleLlamaForCausalLM"),
        keys={"speculators_model_type": "eagle3"},
        tensors=("midlayer.hidden_norm.", "layers.0.hidden_norm."),
    ),
)
READ_SPECULATORS = ("dspark", "dflash")
TAPS = ("target_layer_ids", "aux_hidden_state_layer_ids")
QUANTISED = (
    ".scales", ".qweight", ".qzeros", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_zero_point"
)  # fmt: skip
DTYPES = ("F64", "F32", "F16", "BF16")


def refuse_other_families(raw: dict[str, Any], tensors: Collection[str]) -> None:
    """Raise for a config or tensors that carry a mark of a family this package does not read.

    Raises:
        ValueError: names the family, the mark, the reason and the way out.
    """
    for family in FAMILIES:
        mark = _label_mark(family, raw) or _key_mark(family, raw) or _tensor_mark(family, tensors)
        if mark is not None:
            raise ValueError(_refusal(family.name, mark, family.reason))
    layer = next((name for name in sorted(tensors) if name.startswith("midlayer.")), None)
    if layer is not None and not any(_find(raw, key) for key in TAPS):
        raise ValueError(_refusal("EAGLE-3", f"tensor {layer} and no list of taps", EAGLE))
    method = raw.get("speculators_model_type")
    if method is not None and method not in READ_SPECULATORS:
        reason = f"of speculators' methods this package has {' and '.join(READ_SPECULATORS)}; run it with vLLM"
        raise ValueError(_refusal(f"speculators {method!r}", "speculators_model_type", reason))


def _refusal(name: str, mark: str, reason: str) -> str:
    return f"This is a checkpoint of the family {name} ({mark}), which is not read: {reason}."


def _label_mark(family: Family, raw: dict[str, Any]) -> str | None:
    label = next((name for name in family.architectures if is_labelled(raw, (name,))), None)
    if label is not None:
        return f"architectures {label}"
    return f"model_type {raw['model_type']}" if raw.get("model_type") in family.model_types else None


def _tables(raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"": raw} | {f"{nest}.": raw[nest] for nest in NESTS if isinstance(raw.get(nest), dict)}


def _find(raw: dict[str, Any], key: str) -> Any:
    return next((table[key] for table in _tables(raw).values() if table.get(key) is not None), None)


def _key_mark(family: Family, raw: dict[str, Any]) -> str | None:
    for key, value in family.keys.items():
        for place, table in _tables(raw).items():
            found = table.get(key)
            if found is not None and (value is ... or found == value):
                return f"key {place}{key}" if value is ... else f"{place}{key}: {found!r}"
    return None


def _tensor_mark(family: Family, tensors: Collection[str]) -> str | None:
    marked = (name for name in sorted(tensors) if any(part in name for part in family.tensors))
    return next((f"tensor {name}" for name in marked), None)


def refuse_quantised(raw: dict[str, Any], dtypes: dict[str, str]) -> None:
    """Raise for tensors that are not plain floating-point numbers.

    Args:
        raw: config.json.
        dtypes: tensor name -> dtype as safetensors spells it.
    """
    packed = [name for name in sorted(dtypes) if name.endswith(QUANTISED)]
    if packed:
        kind = "an MLX repack with quantised weights" if isinstance(raw.get("quantization"), dict) else "quantised"
        raise ValueError(
            f"This checkpoint is {kind} (tensor {packed[0]}). Use the unquantised draft, which is small anyway."
        )
    odd = [name for name in sorted(dtypes) if dtypes[name] not in DTYPES and name not in (D2T, T2D)]
    if odd:
        raise ValueError(f"Tensor {odd[0]} has dtype {dtypes[odd[0]]}; a draft needs one of {', '.join(DTYPES)}.")
