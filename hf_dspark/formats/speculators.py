"""The speculators format: DSpark and DFlash drafts with the blocks' config in a nest, often of a reduced vocabulary.

`aux_hidden_state_layer_ids` count entries of `hidden_states`: id k is the input of layer k, so tap k - 1 here. A head
of fewer rows than the vocabulary comes with `d2t`, offsets from a row's number to its token. Files without
`sample_from_anchor` are of a time when the first slot was never trained. Published under RedHatAI/ and others.
"""

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import Qwen3Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .._hub_files import TensorInfo
from ..configuration_dspark import DSparkConfig
from . import parts, speculators_write
from .backbone import block_shape, draft_config, note_attention, renamed
from .keys import Keys

NAME = "speculators"
KINDS = ("dspark", "dflash")
LAYERS = "transformer_layer_config"
# Of the trainer, or the inverse of `d2t`.
IGNORED_TENSORS = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
DRAFT_KEYS = (
    "block_size", "mask_token_id", "sample_from_anchor", "shift_label", "target_hidden_size", "markov_rank",
    "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "confidence_temperatures",
    "sliding_window_non_causal", "aux_hidden_state_layer_ids", "draft_vocab_size", "speculators_config", "dtype",
    "torch_dtype", "tie_word_embeddings", "num_target_layers",
)  # fmt: skip


def matches(raw: dict[str, Any], tensors: parts.Tensors) -> bool:
    return raw.get("speculators_model_type") in KINDS or LAYERS in raw


def read(raw: dict[str, Any], tensors: parts.Tensors, **overrides: Any) -> tuple[DSparkConfig, dict[str, str]]:
    """See `deepspec.read`."""
    names = renamed(tensors, lambda name: None if name in IGNORED_TENSORS else name)
    config = _read(raw, tensors, Keys({}, overrides))
    if config.draft_vocab_size is None:
        names.pop("d2t", None)  # all tokens are there, and checked offsets are zeros
    return config, names


def _read(raw: dict[str, Any], tensors: parts.Tensors, keys: Keys) -> DSparkConfig:
    file = Keys(raw, quiet=True)
    keys.raw = _layer_keys(file) | {name: raw[name] for name in DRAFT_KEYS if name in raw}
    kind = file.get("speculators_model_type", "text", "dspark")
    keys.note("family", f"speculators, {kind}: its keys")
    parts.refuse_unsupported(keys)
    fields = block_shape(keys, "qwen3", keys.get("hidden_act", "text", "silu"))
    fields |= keys.sizes("num_key_value_heads", "head_dim") | _attention(keys)
    anchor_first, why = _layout(keys)
    return draft_config(
        keys,
        tensors,
        fields | _reduced(keys, tensors, fields["vocab_size"]),
        family=NAME,
        anchor_first=anchor_first,
        why=why,
        layout_assumed=not anchor_first,
        target_layer_ids=_taps(keys),
        target_name_or_path=_verifier(file),
        raw_embeddings=True,
        foreign=raw,
    )


def _layer_keys(file: Keys) -> dict[str, Any]:
    """The blocks' config with the defaults of its model type, which the format leaves out."""
    layers = file.get(LAYERS, "table")
    kind = Keys(layers).get("model_type", "text", "qwen3")
    if kind not in CONFIG_MAPPING:
        raise ValueError(
            f"`{LAYERS}.model_type` {kind!r} is no model type of transformers; speculators writes 'qwen3'."
        )
    config_class = Qwen3Config if kind == "qwen3" else CONFIG_MAPPING[kind]
    try:
        keys = config_class(**layers).to_dict()
    except (StrictDataclassError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"`{LAYERS}` does not describe {kind} layers: {error}") from error
    # What the file itself says counts as it stands there.
    return {name: value for name, value in keys.items() if name != "dtype"} | layers


def _attention(keys: Keys) -> dict[str, Any]:
    """Windows as speculators trains them: counted from the anchor, which sees W tokens before itself."""
    types = keys.get("layer_types", "texts", [])
    slides = [kind == "sliding_attention" for kind in types]
    if not any(slides):
        return {}
    causal = not keys.get("sliding_window_non_causal", "flag", False)
    fields = {
        "layer_types": types,
        "sliding_window": keys.get("sliding_window", "size") + 1,
        "window_from_anchor": True,
        "causal_layers": slides if causal else None,
    }
    note_attention(keys, fields, f"`sliding_window_non_causal` {'false or absent' if causal else 'true'}")
    return fields


def _layout(keys: Keys) -> tuple[bool, str]:
    """The layout of a file that has no key for it: the number of proposed tokens is a hint."""
    size, methods = keys.get("block_size", "size"), keys.get("speculators_config", "table", {}).get("proposal_methods")
    methods = methods if isinstance(methods, list) and methods and isinstance(methods[0], dict) else [{}]
    tokens, stated = methods[0].get("speculative_tokens"), keys.find("sample_from_anchor")[0]
    if stated is not None and tokens in (size, size - 1) and (tokens == size) is not stated:
        keys.note("speculative_tokens", f"{tokens} of {size} slots, the other layout: only a hint, the key counts")
    if tokens == size:
        return True, f"`speculative_tokens` is {size}, as many as slots, and no `sample_from_anchor` in the file"
    return False, "speculators files without `sample_from_anchor` come from trainers that left slot 0 out"


def _taps(keys: Keys) -> list[int] | None:
    if "target_layer_ids" in keys.overrides:
        return None
    ids = keys.get("aux_hidden_state_layer_ids", "integers", None)
    if not ids:
        raise ValueError(
            "config.json lacks `aux_hidden_state_layer_ids`. Add it, or pass `target_layer_ids=[...]` (one less than "
            "each of those) to `from_pretrained`."
        )
    if min(ids) < 0:
        raise ValueError(f"`aux_hidden_state_layer_ids` {ids} must be entries of `hidden_states`, 0 or more.")
    taps = [i - 1 for i in ids]
    keys.note("taps", f"{taps}: `aux_hidden_state_layer_ids` {ids} name inputs of layers, taps their outputs")
    return taps


def _reduced(keys: Keys, tensors: parts.Tensors, vocab_size: int) -> dict[str, Any]:
    """`draft_vocab_size`, as the rows of the head show it."""
    stated = keys.get("draft_vocab_size", "size", None)
    if "lm_head.weight" not in tensors:
        if stated not in (None, vocab_size):
            raise ValueError(
                f"`draft_vocab_size` is {stated} of {vocab_size} tokens, but the file holds no lm_head.weight, and the "
                "target's head has another size. Download the file again."
            )
        return {}
    rows = parts.shape_of(tensors, "lm_head.weight")[0]
    if stated is not None and stated != rows:
        raise ValueError(f"`draft_vocab_size` is {stated}, but lm_head.weight has {rows} rows. Correct the key.")
    if rows == vocab_size:
        return {}
    if "d2t" not in tensors:
        raise ValueError(
            f"lm_head.weight has {rows} rows for {vocab_size} tokens, but the file lacks the tensor d2t, which says "
            "what tokens they are. Download it again; without it every draft would be another token."
        )
    shape = parts.shape_of(tensors, "d2t", dimensions=1)
    if shape != (rows,):
        raise ValueError(f"d2t has {shape[0]} entries, but lm_head.weight has {rows} rows.")
    keys.note("reduced vocabulary", f"{rows} of {vocab_size} tokens can be proposed, those of d2t")
    return {"draft_vocab_size": rows}


def _verifier(file: Keys) -> str | None:
    verifier = file.get("speculators_config", "table", {}).get("verifier")
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return name if isinstance(name, str) else None


def write(config: DSparkConfig) -> dict[str, Any]:
    """config.json of a draft in the speculators form.

    A draft that was read from this form gives its own keys back; only what has changed since is new.

    Raises:
        ValueError: the form has no word for something the draft does.
    """
    foreign = config.foreign
    if config.source_format != NAME or not foreign:
        speculators_write.refuse_foreign(config)
        return speculators_write.all_keys(config)
    tensors = {name: TensorInfo(shape, "F32", "") for name, shape in parts.principal_shapes(config).items()}
    return speculators_write.changed_keys(config, foreign, lambda: _read(foreign, tensors, Keys({}, quiet=True)))


def write_tensors(config: DSparkConfig, tensors: dict[str, Any]) -> dict[str, Any]:
    """With the mask `t2d` of the tokens that can be proposed, which the format keeps beside `d2t`."""
    return speculators_write.with_mask(config, tensors)
