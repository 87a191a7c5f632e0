"""Parts of a draft that several families spell the same way: heads, block layout, taps, backbone.

Each function returns fields of `DSparkConfig`. What the tensors show decides; a key that says otherwise is an error.
"""

import re
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers.activations import ACT2FN

from .._hub_files import TensorInfo, listing
from ..configuration_dspark import MARKOV_HEAD_TYPES, DSparkConfig
from .keys import Keys

Tensors = dict[str, TensorInfo]
Shape = tuple[int, ...]

MARKOV_ALIASES = {"classical": "vanilla"}
DTYPES = ("float64", "float32", "float16", "bfloat16")
# Flags that ask for attention or layers which this version's draft does not compute.
REFUSED = ("use_swa", "attention_sink_bias", "attn_output_gate", "use_gemma_norm", "enable_moe_block")
# Recomputed, never learned: old exports carry it along.
IGNORED_TENSORS = "rotary_emb.inv_freq"
# What a deep copy of the target's config may bring along and a draft has no use for.
LEAKED = ("vision_config", "audio_config", "num_experts", "quantization_config")


def make_config(fields: dict[str, Any]) -> DSparkConfig:
    """`DSparkConfig(**fields)`; whatever transformers' own checks of a config raise becomes a ValueError."""
    try:
        return DSparkConfig(**fields)
    except (StrictDataclassError, ArithmeticError, AttributeError, LookupError) as error:
        raise ValueError(f"config.json does not describe a draft: {error}") from error


def check_activation(name: str) -> None:
    if name not in ACT2FN:
        raise ValueError(f"Activation {name!r} is unknown; use one of transformers' names, such as 'silu'.")


def principal_shapes(config: DSparkConfig) -> dict[str, Shape]:
    """The parameters that show every size of a draft, without building it."""
    hidden, rank, dim = config.hidden_size, config.markov_rank, config.head_dim
    keys = config.num_key_value_heads * dim
    shapes: dict[str, Shape] = {"fc.weight": (hidden, config.context_size)}
    for i in range(config.num_hidden_layers):
        shapes[f"layers.{i}.self_attn.q_proj.weight"] = (config.num_attention_heads * dim, hidden)
        shapes[f"layers.{i}.self_attn.k_proj.weight"] = (keys, hidden)
        shapes[f"layers.{i}.mlp.gate_proj.weight"] = (config.intermediate_size, hidden)
        if not config.value_from_key:
            shapes[f"layers.{i}.self_attn.v_proj.weight"] = (keys, hidden)
        if config.sandwich_norms:
            shapes[f"layers.{i}.pre_feedforward_layernorm.weight"] = (hidden,)
    if config.has_embed_tokens:
        shapes["embed_tokens.weight"] = (config.vocab_size, hidden)
    if config.has_lm_head:
        shapes["lm_head.weight"] = (config.head_size, hidden)
    if config.draft_vocab_size is not None:
        shapes["d2t"] = (config.draft_vocab_size,)
    if rank:
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (config.head_size, rank)
    if config.markov_head_type == "gated":
        shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
    if config.markov_head_type == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, hidden + 2 * rank)
    if config.enable_confidence_head:
        shapes["confidence_head.proj.weight"] = (1, hidden + (rank if config.confidence_head_with_markov else 0))
        if config.confidence_head_bias:
            shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def check_sizes(config: DSparkConfig, stored: dict[str, Shape]) -> None:
    """Compare the sizes of a config with the parameters of its file, before anything is built from them.

    Raises:
        ValueError: they disagree; names the tensor or key.
    """
    found = len({match[1] for name in stored if (match := re.match(r"layers\.(\d+)\.", name))})
    if found != config.num_hidden_layers:
        raise ValueError(f"`num_hidden_layers` is {config.num_hidden_layers}, but the file holds {found} layers.")
    if config.head_dim % 2:
        raise ValueError(f"The head size {config.head_dim} is odd, but rotary embeddings turn pairs.")
    for name, shape in principal_shapes(config).items():
        if stored.get(name, shape) != shape:
            raise ValueError(
                f"{name} is {list(stored[name])}, but config.json makes it {list(shape)} (vocabulary "
                f"{config.vocab_size}, width {config.hidden_size}, MLP {config.intermediate_size}, "
                f"{config.num_attention_heads} and {config.num_key_value_heads} heads of {config.head_dim})."
            )


def refuse_unsupported(keys: Keys) -> None:
    """Raise for attention this version does not compute; note leaked keys that mean nothing here."""
    for name in REFUSED:
        if keys.get(name, "flag", False, nested=True):
            raise ValueError(f"`{name}: true` asks for attention or layers that this version does not have.")
    if keys.get("hidden_size_per_layer_input", "count", 0):
        raise ValueError("`hidden_size_per_layer_input` is not 0: per-layer embeddings in a draft are not supported.")
    for name in LEAKED:
        if keys.find(name)[0] is not None:
            keys.note(name, "ignored: a draft has no use for it and no tensor asks for it")


def shape_of(tensors: Tensors, name: str, dimensions: int = 2) -> tuple[int, ...]:
    """Shape of a tensor that must be there.

    Raises:
        ValueError: it is not, or has another number of dimensions.
    """
    if name not in tensors:
        raise ValueError(f"The checkpoint lacks the tensor {name}. Download it again, or give the folder of a draft.")
    shape = tensors[name].shape
    if len(shape) != dimensions or 0 in shape:
        raise ValueError(f"Tensor {name} has shape {list(shape)}; expected {dimensions} dimensions, none of them 0.")
    return shape


def taps(keys: Keys, tensors: Tensors, hidden_size: int, ids: list[int] | None = None) -> dict[str, Any]:
    """`target_layer_ids` and `target_hidden_size`; the latter is what the columns of `fc` leave for each tap.

    ids: the taps, for files that do not have them under this name.
    """
    if ids is None or "target_layer_ids" in keys.overrides:
        ids = keys.get("target_layer_ids", "integers", nested=True)
    rows, columns = shape_of(tensors, "fc.weight")
    if not ids or columns % len(ids) or rows != hidden_size:
        raise ValueError(
            f"fc.weight is [{rows}, {columns}], which fits no {len(ids)} taps {ids} onto `hidden_size` {hidden_size}. "
            "Check `target_layer_ids`."
        )
    width = columns // len(ids)
    stated = keys.get("target_hidden_size", "size", width, nested=True)
    if stated != width:
        raise ValueError(
            f"`target_hidden_size` is {stated}, but fc.weight has {columns} columns for {len(ids)} taps, {width} each."
        )
    return {"target_layer_ids": ids, "target_hidden_size": width}


def block(keys: Keys, default: bool, why: str, *, assumed: bool = False) -> dict[str, Any]:
    """`block_size` and the layout: the caller, else a key of the file, else the family's own layout.

    Args:
        default, why: the family's layout and its reason.
        assumed: whether files of the family in the other layout are known, so that the user is told.
    """
    size = keys.get("block_size", "size", nested=True)
    override = keys.overrides.get("sample_from_anchor")
    layout, file = default, keys.without_overrides()
    names = ("sample_from_anchor", "query_zero_predicts_next", "shift_label")
    found = {name: file.get(name, "flag", None, nested=True) for name in names}
    stated = {name: value for name, value in found.items() if value is not None}
    if stated:
        layout = next(iter(stated.values()))
        said = [f"`{name}: {str(value).lower()}`" for name, value in stated.items()]
        contradicted = len(set(stated.values())) > 1
        why = f"the file says {said[0]}{f', which comes before {listing(said[1:])}' if contradicted else ''}"
    stated_layout = layout
    assumed = assumed and not stated and override is None
    if assumed:
        why += f"; assumed, pass `sample_from_anchor={not layout}` to `from_pretrained` if it was trained otherwise"
    if override is not None:
        if not isinstance(override, bool):
            raise ValueError(f"`sample_from_anchor` must be True, False or None, got {override!r}.")
        if override != layout:
            why = f"set by the caller, against {'anchor-first' if layout else '1+N'} ({why})"
        layout = override
    drafts = size if layout else size - 1
    text = f"{'anchor-first' if layout else '1+N'}, {drafts} drafts from {size} slots: {why}"
    keys.note("layout", text, warn=assumed or override not in (None, stated_layout))
    runtime = keys.get("runtime_block_size", "size", None, nested=True)
    if runtime is not None:
        keys.note("runtime_block_size", f"{runtime} ignored: `num_assistant_tokens` sends fewer drafts", warn=True)
    return {"block_size": size, "sample_from_anchor": layout}


def markov_head(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """Rank and kind of the Markov head."""
    stored = sorted(name for name in tensors if name.startswith("markov_head."))
    stated = keys.get("markov_rank", "count", None, nested=True)
    if not stored:
        if stated:
            raise ValueError(
                f"`markov_rank` is {stated}, but the file holds no markov_head.markov_w1.weight and "
                "markov_head.markov_w2.weight. Download it again, or set `markov_rank` to 0 if it never had one."
            )
        return {"markov_rank": 0, "markov_head_type": "vanilla"}
    rank = shape_of(tensors, "markov_head.markov_w1.weight")[1]
    if stated is None:
        keys.note("markov_rank", f"{rank}: the width of markov_head.markov_w1.weight, because config.json states none")
    elif stated != rank:
        raise ValueError(
            f"`markov_rank` is {stated}, but the file holds {listing(stored)} of rank {rank}. Correct `markov_rank`; "
            "the head is never dropped in silence."
        )
    extra = {"gated": "gate_proj", "rnn": "joint_proj"}
    shown = next((kind for kind, part in extra.items() if f"markov_head.{part}.weight" in tensors), "vanilla")
    kind = keys.get("markov_head_type", "text", None, nested=True)
    known = MARKOV_ALIASES.get(kind, kind)
    if known is not None and known not in MARKOV_HEAD_TYPES:
        names = ", ".join((*MARKOV_HEAD_TYPES, *MARKOV_ALIASES))
        raise ValueError(f"`markov_head_type` {kind!r} is unknown; known: {names}.")
    if known is not None and known != shown:
        raise ValueError(f"`markov_head_type` is {kind!r}, but the tensors {listing(stored)} make a {shown!r} head.")
    if kind != shown:
        keys.note("markov_head_type", f"{shown!r}: {f'another name of {kind!r}' if kind else 'what the tensors make'}")
    return {"markov_rank": rank, "markov_head_type": shown}


def confidence_head(keys: Keys, tensors: Tensors, hidden_size: int, markov_rank: int) -> dict[str, Any]:
    """Presence, input and bias of the confidence head: [1, H] reads h_k alone, [1, H + r] also the Markov embedding."""
    stored = sorted(name for name in tensors if name.startswith("confidence_head."))
    stated = keys.get("enable_confidence_head", "flag", None, nested=True, alias="use_confidence_head")
    with_markov = keys.get("confidence_head_with_markov", "flag", None, nested=True)
    if not stored:
        if stated:
            raise ValueError(
                "`enable_confidence_head` is true, but the file holds no confidence_head.proj.weight. Download it "
                "again, or set the key to false."
            )
        return {"enable_confidence_head": False, "confidence_head_with_markov": False, "confidence_head_bias": True}
    if stated is False:
        raise ValueError(f"`enable_confidence_head` is false, but the file holds {listing(stored)}. Set it to true.")
    name = "confidence_head.proj.weight"
    shape = shape_of(tensors, name)
    inputs: dict[Shape, bool] = {(1, hidden_size): False, (1, hidden_size + markov_rank): bool(markov_rank)}
    shown = inputs.get(shape)
    if shown is None:
        raise ValueError(
            f"{name} is {list(shape)}; it must be [1, {hidden_size}] for `hidden_size` alone or "
            f"[1, {hidden_size + markov_rank}] together with `markov_rank` {markov_rank}."
        )
    if with_markov is not None and with_markov != shown:
        raise ValueError(
            f"`confidence_head_with_markov` is {str(with_markov).lower()}, but {name} is {list(shape)}: hidden size "
            f"{hidden_size}{' plus' if shown else ' without'} Markov rank {markov_rank}. Correct the key."
        )
    if with_markov is None:
        keys.note("confidence_head_with_markov", f"{str(shown).lower()}: {name} is {list(shape)}")
    bias = "confidence_head.proj.bias" in tensors
    if not bias:
        keys.note("confidence_head_bias", "0: the file holds none")
    return {"enable_confidence_head": True, "confidence_head_with_markov": shown, "confidence_head_bias": bias}


def dtype(keys: Keys) -> dict[str, Any]:
    """The dtype that `dtype="auto"` loads in; without the key the tensors' own."""
    name = keys.get("dtype", "text", None, alias="torch_dtype")
    if name is None:
        return {}
    name = name.removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"`dtype` {name!r} is not one of {', '.join(DTYPES)}.")
    return {"dtype": name}
