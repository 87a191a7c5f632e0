"""Would the same draft do better if it were read, or asked, in another way?"""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..modeling_dspark import DSparkForCausalLM
from ..readings import WINDOW, KnownText, Reading, clearly_better, drafts_kept, gain, neighbours
from .findings import NOTE, OK, PROBLEM, Finding

# What clearly better means here: so many drafts a round, such a share of those that are right now, and so many standard
# errors. Many anchors show a smaller gain than the probe's few.
MIN_GAIN, MIN_SHARE, MIN_ERRORS = 0.1, 0.25, 3.0
REACH = 2  # layers by which taps are moved
MASKS, MASK_ANCHORS = 16, 16  # other mask tokens to try, and anchors of each text for them
BETTER_TEMPLATE = 1.5  # times the drafts kept


# A text, and the tokens in it at which readings are compared.
Known = tuple[KnownText, range]


def check_readings(
    target: PreTrainedModel,
    draft: DSparkForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[tuple[list[int], list[int]]],
) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Score block layouts, neighbouring taps and other mask tokens on the target's own texts.

    Args:
        texts: (prompt, answer) as token ids, answers of the target alone.

    Returns:
        the finding, and a row of numbers for each reading.
    """
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    current = Reading.of(draft.attach_target(target).config)
    ways = neighbours(current, depth, draft.config.block_size, REACH)
    known = [_see(target, draft, *text, ways) for text in texts if len(text[1]) > 3]
    if not known:
        return [], []
    kept = _scores(draft, known, ways)
    threshold = max(MIN_GAIN, MIN_SHARE * float(kept[current].mean())), MIN_ERRORS
    best = clearly_better(kept, current, *threshold) or current
    masks = [best, *(replace(best, mask_token_id=i) for i in _other_masks(draft, tokenizer))]
    few = _scores(draft, [(text, at[:: max(1, len(at) // MASK_ANCHORS)]) for text, at in known], masks)
    favourite = max(masks, key=lambda reading: float(few[reading].mean()))
    final = _scores(draft, known, list(dict.fromkeys((current, best, favourite))))
    better = clearly_better(final, current, *threshold) or current
    rows = [_row(reading, kept, current) for reading in ways] + [_row(reading, few, best) for reading in masks[1:]]
    count = sum(len(at) for _, at in known)
    if better == current:
        seen = f"no other layout, taps or mask token does clearly better ({count} anchors, {len(rows)} readings)"
        return [Finding("reading", OK, seen)], rows
    seen = (
        f"over {count} anchors {float(final[current].mean()):.2f} drafts a round are right as the draft is read now, "
        f"{float(final[better].mean()):.2f} as {better}"
    )
    return [Finding("reading", PROBLEM, seen, better.fix(current))], rows


@torch.no_grad()
def _see(
    target: PreTrainedModel, draft: DSparkForCausalLM, prompt: list[int], answer: list[int], ways: Iterable[Reading]
) -> Known:
    """A text from shortly before its answer on, with the hidden states that readings tap."""
    inputs: dict[str, Any] = {"output_hidden_states": True, "use_cache": False}
    if "logits_to_keep" in inspect.signature(target.forward).parameters:
        inputs["logits_to_keep"] = 1
    ids, start = torch.tensor([prompt + answer], device=target.device), max(0, len(prompt) - WINDOW)
    hidden = target(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).hidden_states
    taps = {tap for reading in ways for tap in reading.target_layer_ids}
    states = {tap: hidden[tap + 1][0, start:].to(draft.device) for tap in taps}
    text = KnownText(ids[0, start:].to(draft.device), states, start)
    return text, range(max(1, len(prompt) - start), len(text.ids) - 1)


def _scores(draft: DSparkForCausalLM, known: Sequence[Known], ways: Sequence[Reading]) -> dict[Reading, torch.Tensor]:
    parts = [drafts_kept(draft, draft.vocabulary, text, at, ways) for text, at in known]
    return {reading: torch.cat([part[reading] for part in parts]) for reading in ways}


def _other_masks(draft: DSparkForCausalLM, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that a draft may have been trained to read as "undecided": special tokens, and the first unused row."""
    special = [*getattr(tokenizer, "added_tokens_decoder", {}), *tokenizer.all_special_ids, len(tokenizer)]
    mask, size = draft.config.mask_token_id, draft.vocabulary.size
    return [i for i in sorted(set(special)) if i != mask and 0 <= i < min(size, draft.config.vocab_size or size)][
        :MASKS
    ]


def _row(reading: Reading, kept: dict[Reading, torch.Tensor], current: Reading) -> dict[str, Any]:
    more, error = gain(kept, reading, current)
    return {
        "layout": reading.layout,
        "target_layer_ids": list(reading.target_layer_ids),
        "mask_token_id": reading.mask_token_id,
        "drafts_kept": float(kept[reading].mean()),
        "gain": more,
        "gain_error": error,
        "anchors": len(kept[reading]),
    }


def check_formats(base: str, taus: dict[str, float]) -> list[Finding]:
    """Whether another way to write the prompt is accepted clearly better.

    Args:
        base: name of the format in use.
        taus: τ of each format on the same questions.
    """
    if len(taus) < 2:
        return []
    best = max(taus, key=lambda name: taus[name])
    numbers = ", ".join(f"{name} {tau:.2f}" for name, tau in taus.items())
    if best == base or taus[best] - 1 < BETTER_TEMPLATE * (taus[base] - 1) or taus[best] - taus[base] < 0.3:
        return [Finding("template", OK, f"τ by prompt format: {numbers}")]
    fix = f"Write prompts as the draft knows them: {best} (here: {base})."
    return [Finding("template", NOTE, f"τ by prompt format: {numbers}", fix)]
