"""What the configs and weights of a pair tell before anything is generated."""

from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..configuration_dspark import DSparkConfig
from ..generation.memory import meta_target
from ..modeling_dspark import DSparkForCausalLM
from ..target import check_pair, other_target
from .findings import NOTE, OK, PROBLEM, Finding

SAMPLED_ROWS = 256
SAME = 0.02  # relative distance of rows that only rounding, or quantisation to 8 bits, keeps apart
# The context that published drafts were trained with; files do not state it.
TRAINED_LENGTH = 4096


def check_configs(target: PreTrainedConfig, draft: DSparkConfig) -> list[Finding]:
    """Whether a draft and a target fit, and what their configs give reason to expect. No weight is needed."""
    try:
        check_pair(draft, meta_target(target))
    except ValueError as error:
        return [Finding("pairing", PROBLEM, str(error), "Give the target that the draft was trained for.")]
    depth = target.get_text_config(decoder=True).num_hidden_layers
    taps = ", ".join(str(i) for i in draft.target_layer_ids)
    fits = f"reads layers {taps} of {depth}, width {draft.target_hidden_size}, vocabulary {draft.vocab_size}"
    return [Finding("pairing", OK, fits), *_configs(target, draft, depth)]


def _configs(target: PreTrainedConfig, draft: DSparkConfig, depth: int) -> Iterator[Finding]:
    # Some formats keep another number under this name, so only one that could be a depth says anything.
    stated = draft.num_target_layers
    if stated is not None and stated != depth and stated > max(len(draft.target_layer_ids), *draft.target_layer_ids):
        seen = f"the draft was made for a target of {stated} layers, this one has {depth}"
        yield Finding("target", NOTE, seen, "Check that this is the target that the draft was trained for.")
    if (names := other_target(target, draft)) is not None:
        seen = f"the draft names {names[0]} as its target, this is {names[1]}"
        yield Finding("target", NOTE, seen, f"Expect most from {names[0]}; relatives of it work as far as they agree.")
    if getattr(target, "quantization_config", None) is not None:
        seen = "the target is quantised; drafts are trained on the hidden states of the original"
        yield Finding("quantisation", NOTE, seen, "Compare with the target as it was trained (bfloat16).")


def check_models(target: PreTrainedModel, draft: DSparkForCausalLM) -> Iterator[Finding]:
    """Where the models are and in which numbers; nothing is converted for the user."""
    if draft.device != target.device:
        seen = f"the draft is on {draft.device}, the target on {target.device}: every round moves states"
        yield Finding("placement", NOTE, seen, f"`draft.to({str(target.device)!r})`.")
    if draft.dtype != target.dtype:
        seen = f"the draft is {draft.dtype}, the target {target.dtype}: states are converted every round"
        yield Finding("placement", NOTE, seen, f"Load the draft with `dtype={target.dtype}`.")


def check_copies(target: PreTrainedModel, draft: DSparkForCausalLM, low: bool) -> Iterator[Finding]:
    """Whether embeddings and head in the draft's file, mostly frozen copies, are those of this target.

    low: whether little is accepted, so that a difference may be the reason.
    """
    for name, own, theirs in (
        ("embeddings", getattr(draft, "embed_tokens", None), target.get_input_embeddings()),
        ("head", getattr(draft, "lm_head", None), target.get_output_embeddings()),
    ):
        distance = _distance(own, theirs)
        if distance is not None and distance < SAME:
            yield Finding("target", OK, f"{name} in the draft's file: a copy of the target's")
        elif distance is not None:
            seen = f"{name} in the draft's file: no copy of this target's (relative distance {distance:.2g})"
            fix = "Use the very checkpoint that the draft was trained for; this may be another or a fine-tuned one."
            yield Finding("target", NOTE, seen, fix) if low else Finding("target", OK, seen)


def _distance(own: nn.Module | None, theirs: nn.Module | None) -> float | None:
    """Relative distance of rows of two tables; `None` where they cannot be compared."""
    first, second = getattr(own, "weight", None), getattr(theirs, "weight", None)
    if not all(isinstance(w, torch.Tensor) and w.is_floating_point() and not w.is_meta for w in (first, second)):
        return None
    assert first is not None and second is not None
    if first.shape[1] != second.shape[1]:
        return None
    rows = torch.linspace(0, min(len(first), len(second)) - 1, SAMPLED_ROWS).long().unique()
    a, b = (table.detach()[rows.to(table.device)].float().cpu() for table in (first, second))
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def check_lengths(longest: int, target: PreTrainedModel, draft: DSparkForCausalLM) -> Iterator[Finding]:
    """Texts of up to `longest` tokens against what the draft knows."""
    limit = draft.config.max_position_embeddings
    if longest > limit:
        seen = f"texts of {longest} tokens pass the draft's {limit} positions"
        yield Finding("context", NOTE, seen, f"Expect little beyond {limit} tokens.")
    elif longest > TRAINED_LENGTH:
        seen = f"texts of {longest} tokens are longer than the {TRAINED_LENGTH} that drafts are usually trained with"
        yield Finding("context", NOTE, seen, "See acceptance by length below; try `draft.context_window`.")
