"""What a draft takes from its target: tapped hidden states, embeddings and head; and how the two are made to fit."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from .configuration_dspark import DSparkConfig

logger = logging.get_logger(__name__)

# Vocabularies of one tokenizer differ by the rows that pad an embedding to a round number, never by more than this
# share.
MAX_PADDING_SHARE = 0.01
# Config keys of families that carry several hidden states for a token from layer to layer, and how many.
STREAMS = ("altup_num_inputs", "hc_mult", "hc_count")
# Families that mask no window; their cache drops old tokens between forwards instead.
WINDOW_BY_CACHE = {"moshi"}


def context_features(hidden_states_or_outputs: Any, target_layer_ids: list[int]) -> torch.Tensor:
    """Concatenate the tapped hidden states on the feature axis (paper, context features).

    Args:
        hidden_states_or_outputs: a tuple as `output_hidden_states` gives it (entry 0 the embeddings, entry i+1 the
            output of layer i, the last entry after the final norm), or a model output that has one. Entries that no tap
            needs may be `None`. Each entry is [B, S, H_target].
        target_layer_ids: taps; id i reads entry i+1 and -1 the embeddings.

    Returns:
        [B, S, n_taps · H_target] on the device of the first tap.

    Raises:
        ValueError: when a tap lies outside the hidden states or its entry is missing.
    """
    hidden_states = hidden_states_or_outputs
    if not isinstance(hidden_states, (tuple, list)):
        hidden_states = getattr(hidden_states_or_outputs, "hidden_states", None)
        if hidden_states is None:
            raise ValueError("The outputs hold no hidden states. Call the target with `output_hidden_states=True`.")
    last = len(hidden_states) - 2
    for i in target_layer_ids:
        if not -1 <= i <= last:
            raise ValueError(f"Tap {i} of `target_layer_ids` {list(target_layer_ids)} is outside -1..{last}.")
        if hidden_states[i + 1] is None:
            raise ValueError(f"Tap {i} needs `hidden_states[{i + 1}]`, which is None. Ask the target for that entry.")
        if hidden_states[i + 1].dim() != 3:
            shape = tuple(hidden_states[i + 1].shape)
            raise ValueError(
                f"Tap {i} has shape {shape}, not [B, S, H]: targets with several streams are not supported."
            )
    taps = [hidden_states[i + 1] for i in target_layer_ids]
    return torch.cat([tap.to(taps[0].device) for tap in taps], dim=-1)


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList | None:
    """The list of a target's decoder layers, `None` where it has no such list; a vision tower may be as deep."""
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    return next((m for m in target.get_decoder().modules() if isinstance(m, nn.ModuleList) and len(m) == depth), None)


class TargetVocabulary(NamedTuple):
    """Embedding and head of a target, which a draft that stores none calls. Never sliced: a head may be quantised.

    `size` is the width of the target's logits; `device` and `dtype` are where the head expects its input.
    """

    embeddings: nn.Module | None
    head: nn.Module | None
    size: int
    device: torch.device
    dtype: torch.dtype

    def embed(self, ids: torch.Tensor, raw: bool = False) -> torch.Tensor:
        """Token ids -> embeddings, with what the target's family does to them; `raw`: the bare rows of the table."""
        assert self.embeddings is not None
        ids = ids.to(_device_of(self.embeddings, self.device, ids.device))
        weight = getattr(self.embeddings, "weight", None)
        if not raw or type(self.embeddings) is nn.Embedding or not isinstance(weight, torch.Tensor):
            return self.embeddings(ids)
        return F.embedding(ids, weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.head is not None
        return self.head(hidden.to(device=_device_of(self.head, self.device, hidden.device), dtype=self.dtype))


def _device_of(module: nn.Module, target: torch.device, given: torch.device) -> torch.device:
    """Where a module of the target takes its input; an offloaded one (on meta) moves whatever it is given by itself."""
    tensor = next(module.parameters(), None)
    device = target if tensor is None else tensor.device
    return given if device.type == "meta" else device


def check_pair(config: DSparkConfig, target: nn.Module) -> None:
    """Refuse a draft and a target that cannot work together, before anything is computed.

    Raises:
        ValueError: names both numbers and the fix.
    """
    if target.config.is_encoder_decoder:
        raise ValueError(f"{type(target).__name__} is an encoder-decoder; DSpark drafts need a decoder-only target.")
    text = target.config.get_text_config(decoder=True)
    _check_family(target, text)
    depth = text.num_hidden_layers
    if not -1 <= min(config.target_layer_ids) <= max(config.target_layer_ids) < depth:
        raise ValueError(
            f"`target_layer_ids` {config.target_layer_ids} reach past the target: {type(target).__name__} has {depth} "
            f"layers, so taps may be -1..{depth - 1}. Is this the target that the draft was trained for?"
        )
    if text.hidden_size != config.target_hidden_size:
        raise ValueError(
            f"The draft reads hidden states of width {config.target_hidden_size}, the target's have width "
            f"{text.hidden_size}. Use the target that the draft was trained for."
        )
    _check_vocabulary(config, target, text)
    if (names := other_target(target.config, config)) is not None:
        logger.warning_once(
            f"hf_dspark: the draft names {names[0]} as its target, this is {names[1]}. The text stays that of the "
            "model at hand; how much is accepted depends on how far the two agree."
        )


def other_target(target: PreTrainedConfig, config: DSparkConfig) -> tuple[str, str] | None:
    """The target that the draft's file names and the one at hand, where they differ; owners do not count."""
    named, given = config.target_name_or_path, getattr(target, "name_or_path", "")
    if not named or not given:
        return None
    parts = given.lower().replace("--", "/").split("/")  # the hub's cache has folders like models--owner--name
    return None if named.lower().rstrip("/").split("/")[-1] in parts else (named, given)


def _check_family(target: nn.Module, text: Any) -> None:
    """Refuse families whose hidden states a draft cannot read, or whose text depends on how it is cut into forwards."""
    name = type(target).__name__
    if _reads_both_ways(target, text):
        raise ValueError(
            f"{name} reads in both directions as it is configured, so every token changes those before it. Load it "
            "with `is_decoder=True` if it is an encoder that can be a decoder, or drop `assistant_model`."
        )
    for streams in STREAMS:
        if (count := getattr(text, streams, None) or 1) > 1:
            raise ValueError(
                f"{name} has {count} hidden states for each token (`{streams}`), and DSpark drafts read one. "
                "Drop `assistant_model`."
            )
    if getattr(text, "cross_attention_layers", None):
        raise ValueError(
            f"{name} leaves out its cross-attention layers without an image, so its hidden states are not in fixed "
            "places. Drop `assistant_model`."
        )
    if text.model_type in WINDOW_BY_CACHE:
        raise ValueError(
            f"{name} has a sliding window in its cache alone, so tokens of one forward see further than tokens of "
            "several. Drop `assistant_model`."
        )


def _reads_both_ways(target: nn.Module, text: Any) -> bool:
    if getattr(text, "use_bidirectional_attention", None) in (True, "all") or getattr(text, "is_causal", None) is False:
        return True
    # GPT-NeoX states `is_decoder` too, but only families that can be encoders heed it.
    is_encoder = getattr(text, "is_decoder", None) is False
    return is_encoder and any(getattr(module, "is_decoder", None) is False for module in target.modules())


def _check_vocabulary(config: DSparkConfig, target: nn.Module, text: Any) -> None:
    padding = abs(config.vocab_size - text.vocab_size) if config.vocab_size else 0
    if padding > MAX_PADDING_SHARE * max(config.vocab_size, text.vocab_size):
        raise ValueError(
            f"The draft has a vocabulary of {config.vocab_size}, the target one of {text.vocab_size}; more than "
            "padding lies between them. Draft and target must share one tokenizer."
        )
    if not (config.has_embed_tokens and config.has_lm_head) and config.hidden_size != text.hidden_size:
        raise ValueError(
            f"The draft stores no embeddings or head of its own and must share the target's, but its width is "
            f"{config.hidden_size} and theirs {text.hidden_size}. Use the target that the draft was trained for."
        )
    if not config.has_lm_head and target.get_output_embeddings() is None:
        raise ValueError(f"The draft stores no head and {type(target).__name__} has none to share.")
    rows, whose = config.vocab_size, "draft"
    if not config.has_embed_tokens:
        embeddings, whose = target.get_input_embeddings(), "target"
        weight = getattr(embeddings, "weight", None)
        rows = getattr(embeddings, "num_embeddings", None) or (text.vocab_size if weight is None else weight.shape[0])
    if not 0 <= config.mask_token_id < rows:
        raise ValueError(
            f"`mask_token_id` {config.mask_token_id} is not a row of the {whose}'s embeddings ({rows} rows). Set it to "
            "the id of training; if it is, was the target resized since?"
        )


def share_vocabulary(config: DSparkConfig, target: nn.Module) -> TargetVocabulary:
    """Check the pair and take from the target what the draft's file does not store."""
    check_pair(config, target)
    return TargetVocabulary(
        embeddings=None if config.has_embed_tokens else target.get_input_embeddings(),
        head=None if config.has_lm_head else target.get_output_embeddings(),
        size=target.config.get_text_config(decoder=True).vocab_size,
        device=target.device,
        dtype=target.dtype,
    )


def fit_vocabulary(logits: torch.Tensor, size: int) -> torch.Tensor:
    """Cut or pad (with -inf) the last axis to `size`: vocabularies of a pair may differ by padding rows. 0: as is."""
    return spread(logits, None, size, float("-inf")) if size else logits


def spread(values: torch.Tensor, ids: torch.Tensor | None, size: int, fill: float) -> torch.Tensor:
    """Values [..., V_draft] of the tokens `ids` on the whole vocabulary [..., size], `fill` elsewhere.

    `ids` None: of the first tokens. Ids behind `size` are left out.
    """
    if ids is None:
        missing = size - values.shape[-1]
        return values[..., :size] if missing <= 0 else F.pad(values, (0, missing), value=fill)
    whole = values.new_full((*values.shape[:-1], size + 1), fill)
    return whole.index_copy_(-1, ids.clamp(max=size), values)[..., :size]
