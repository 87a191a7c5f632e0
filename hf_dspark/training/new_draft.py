"""A fresh draft for a target: its shape, its taps, its mask token."""

from collections.abc import Collection
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..configuration_dspark import DSparkConfig
from ..modeling_dspark import DSparkForCausalLM

logger = logging.get_logger(__name__)


def default_taps(depth: int, num_taps: int = 5) -> list[int]:
    """`num_taps` layers spread evenly from layer 1 to layer depth − 3; fewer where there are not as many.

    The last layer is never among them: transformers gives its output after the final norm. A target of one layer is
    tapped at its embeddings (−1).

    Raises:
        ValueError: for less than one tap.
    """
    if num_taps < 1:
        raise ValueError(f"`num_taps` must be at least 1, got {num_taps}.")
    if depth == 1:
        return [-1]
    first = min(1, depth - 2)
    last = max(first, depth - 3)
    steps = max(num_taps - 1, 1)
    return sorted({first + int((last - first) * i / steps + 0.5) for i in range(num_taps)})


def unused_token(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, used: Collection[int]) -> int:
    """A row of the target's embeddings that stands for no text, to be the mask token.

    A padding row behind the tokenizer's vocabulary if there is one, then the tokenizer's own mask token, a special
    token that does not occur, and at last any token that does not occur.

    Args:
        tokenizer: of the target; `None` leaves the last rule alone.
        used: token ids that occur in the training text.

    Raises:
        ValueError: every row is in use.
    """
    rows = target.get_input_embeddings().weight.shape[0]
    rows = min(rows, target.config.get_text_config(decoder=True).vocab_size)
    candidates: dict[str, list[int]] = {}
    if tokenizer is not None:
        speaking = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
        mask = getattr(tokenizer, "mask_token_id", None)
        special = [i for i, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
        candidates["a padding row behind the vocabulary"] = list(range(len(tokenizer), rows))
        candidates["the tokenizer's mask token"] = [] if mask is None else [mask]
        candidates["a special token that the text does not use"] = [i for i in special if i not in speaking]
    candidates["a token that the text does not use"] = list(range(rows - 1, -1, -1))
    for why, ids in candidates.items():
        for token in ids:
            if token < rows and token not in used:
                logger.info(f"mask_token_id {token}: {why}")
                return token
    raise ValueError("Every token of the vocabulary occurs in the text. Set `mask_token_id` to the rarest.")


def new_draft(
    target: PreTrainedModel,
    *,
    mask_token_id: int,
    num_hidden_layers: int = 2,
    block_size: int = 7,
    target_layer_ids: list[int] | None = None,
    markov_rank: int = 256,
    markov_head_type: str = "vanilla",
    enable_confidence_head: bool = True,
    **overrides: Any,
) -> DSparkForCausalLM:
    """A Qwen3-style draft with random weights, as wide as the target, that shares the target's embeddings and head.

    Args:
        mask_token_id: see `unused_token`.
        target_layer_ids: taps; `None` for `default_taps`.
        markov_rank: 0 for a draft without Markov head (DFlash).
        overrides: further fields of `DSparkConfig`.

    Raises:
        ValueError: for values that no draft can have, or that do not fit the target.
    """
    text = target.config.get_text_config(decoder=True)
    hidden, heads = text.hidden_size, text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    fields = {
        "vocab_size": text.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": getattr(text, "intermediate_size", None) or 4 * hidden,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": head_dim,
        "rms_norm_eps": float(getattr(text, "rms_norm_eps", None) or 1e-6),
        "max_position_embeddings": text.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": _rope_theta(text)},
        "target_hidden_size": hidden,
        "target_layer_ids": target_layer_ids or default_taps(text.num_hidden_layers),
        "num_target_layers": text.num_hidden_layers,
        "mask_token_id": mask_token_id,
        "block_size": block_size,
        "markov_rank": markov_rank,
        "markov_head_type": markov_head_type,
        "enable_confidence_head": enable_confidence_head,
        "confidence_head_with_markov": enable_confidence_head and markov_rank > 0,
        "bos_token_id": text.bos_token_id,
        "eos_token_id": text.eos_token_id,
        "pad_token_id": text.pad_token_id,
    }
    return DSparkForCausalLM(DSparkConfig(**(fields | overrides))).attach_target(target)


def _rope_theta(text: Any) -> float:
    """The base of the target's rotary positions (of its full-attention layers), 10000 where it has none."""
    parameters = getattr(text, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    return float(parameters.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0)
