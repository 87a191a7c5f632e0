"""Readings of a draft: the same weights, fed and read in another way.

Block layout, taps and mask token are conventions that a file states badly or not at all. A wrong one leaves the text
exact and acceptance near zero. On a known text every reading can be scored without generating anything: with the true
tokens in the Markov head, the drafts that are right until the first wrong one are those the target would have kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch

from .configuration_dspark import DSparkConfig
from .context import DraftContext
from .modeling_dspark import BackboneOutput, DSparkForCausalLM
from .proposal import plain_walk
from .target import TargetVocabulary

# The most context before an anchor; all readings get the same.
WINDOW = 64
AT_ONCE = 8  # blocks of one draft forward: logits of more would take much memory
# What "clearly better" means: so many more drafts kept in a round, and so many standard errors above nothing.
MIN_GAIN, MIN_ERRORS = 0.5, 4.0


@dataclass(frozen=True)
class Reading:
    """One way to read a draft; the fields are those of `DSparkConfig`."""

    target_layer_ids: tuple[int, ...]
    sample_from_anchor: bool
    mask_token_id: int

    @classmethod
    def of(cls, config: DSparkConfig) -> "Reading":
        """As the config says."""
        return cls(tuple(config.target_layer_ids), config.sample_from_anchor, config.mask_token_id)

    @property
    def layout(self) -> str:
        return "anchor-first" if self.sample_from_anchor else "1+N"

    def changes(self, other: "Reading") -> int:
        """In how many fields two readings differ."""
        return sum(getattr(self, field.name) != getattr(other, field.name) for field in fields(self))

    def __str__(self) -> str:
        return f"{self.layout}, taps {list(self.target_layer_ids)}, mask token {self.mask_token_id}"

    def fix(self, current: "Reading") -> str:
        """What a user changes to get from `current` to this reading: one imperative sentence."""
        steps = []
        if self.sample_from_anchor != current.sample_from_anchor:
            argument = f"sample_from_anchor={self.sample_from_anchor}"
            steps.append(f"load it with `DSparkForCausalLM.from_pretrained(..., {argument})` ({self.layout})")
        for name in ("target_layer_ids", "mask_token_id"):
            if (value := getattr(self, name)) != getattr(current, name):
                value = list(value) if isinstance(value, tuple) else value
                steps.append(f"set `draft.config.{name} = {value}` before the first call, or correct its config.json")
        text = " and ".join(steps)
        return f"{text[0].upper()}{text[1:]}."

    def shifted(self, by: int, num_layers: int) -> "Reading | None":
        """With every tap `by` layers later; `None` where one would leave the target's `num_layers` layers."""
        taps = tuple(i + by for i in self.target_layer_ids)
        return replace(self, target_layer_ids=taps) if -1 <= min(taps) and max(taps) < num_layers else None


def neighbours(reading: Reading, num_layers: int, block_size: int, reach: int = 1) -> list[Reading]:
    """The reading itself, then those with taps up to `reach` layers earlier or later, each in both block layouts."""
    shifts = [by for by in range(-reach, reach + 1) if by]
    taps = [reading, *(r for by in shifts if (r := reading.shifted(by, num_layers)) is not None)]
    others = [replace(r, sample_from_anchor=not r.sample_from_anchor) for r in taps]
    return taps + (others if block_size > 1 else [])


@dataclass(frozen=True)
class KnownText:
    """A text of the target, and what the target saw in it.

    Attributes:
        ids: [n] int64, on the draft's device.
        hidden_states: [n, H_target] of every layer that a reading taps, by tap (-1 the embeddings).
        start: position of the first token.
    """

    ids: torch.Tensor
    hidden_states: Mapping[int, torch.Tensor]
    start: int = 0


@torch.no_grad()
def drafts_kept(
    draft: DSparkForCausalLM,
    vocabulary: TargetVocabulary,
    text: KnownText,
    anchors: Sequence[int],
    readings: Sequence[Reading],
) -> dict[Reading, torch.Tensor]:
    """How many drafts each reading would have kept in rounds that begin at `anchors`, greedily proposed.

    Args:
        anchors: indices into the text in ascending order, from 1 to n - 2.

    Returns:
        [A] float64 on the CPU for each reading. A round near the end of the text counts the drafts whose true token is
        known.
    """
    blocks: dict[tuple, list[Block]] = {}  # both layouts are read from one
    kept = {}
    for reading in readings:
        fed = reading.target_layer_ids, reading.mask_token_id
        if fed not in blocks:
            blocks[fed] = list(_blocks(draft, vocabulary, text, anchors, reading))
        first = 0 if reading.sample_from_anchor else 1
        hits = [_leading_hits(draft, vocabulary.size, text.ids, *block, first) for block in blocks[fed]]
        kept[reading] = torch.cat(hits).double().cpu()
    return kept


# Anchors [A], and hidden states [A, B, H] and base logits [A, B, V_draft] of all slots behind them.
Block = tuple[torch.Tensor, BackboneOutput]


def _blocks(
    draft: DSparkForCausalLM, vocabulary: TargetVocabulary, text: KnownText, anchors: Sequence[int], reading: Reading
) -> Iterator[Block]:
    """The blocks at the anchors, some at once, which have as many context tokens as the first of them can have."""
    size = draft.config.block_size
    first, end = max(0, anchors[0] - WINDOW), anchors[-1]
    rows = torch.cat([text.hidden_states[i][first:end] for i in reading.target_layer_ids], dim=-1)
    whole = DraftContext(draft.config, 1, draft.device, draft.dtype)
    draft.append_context(whole, rows[None], torch.arange(text.start + first, text.start + end)[None])
    slots = torch.arange(size, device=draft.device)
    for i in range(0, len(anchors), AT_ONCE):
        at = torch.tensor(anchors[i : i + AT_ONCE], device=draft.device)
        before = torch.arange(-min(WINDOW, anchors[i]), 0, device=draft.device)
        context = whole.gathered(at[:, None] - first + before)
        block_ids = torch.where(slots == 0, text.ids[at][:, None], reading.mask_token_id)
        hidden = draft.run_block(block_ids, text.start + at[:, None] + slots, context, vocabulary, slots=size)
        yield at, BackboneOutput(hidden, draft.base_logits(hidden, vocabulary))


def _leading_hits(
    draft: DSparkForCausalLM, size: int, ids: torch.Tensor, at: torch.Tensor, block: BackboneOutput, first: int
) -> torch.Tensor:
    """Slots from `first` on, read one after the other: how many name the next token of the text before one does not."""
    slots = BackboneOutput(block.hidden_states[:, first:], block.base_logits[:, first:])
    places = at[:, None] + 1 + torch.arange(slots.hidden_states.shape[1], device=at.device)
    known = ids[places.clamp(max=len(ids) - 1)]
    hits: list[torch.Tensor] = []

    def choose(prefix: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        token = known[:, len(hits)]
        hits.append(logits.argmax(dim=-1) == token)
        return logits[:, :1], token

    # Not `Proposer.walk`: confidence, which belongs to the layout of training, is not asked for.
    plain_walk(draft.markov_head, ids[at][:, None], slots, draft.proposable_ids, size, choose)
    right = torch.stack(hits, dim=1) & (places < len(ids))
    return right.long().cumprod(dim=1).sum(dim=1)


def gain(kept: Mapping[Reading, torch.Tensor], reading: Reading, current: Reading) -> tuple[float, float]:
    """Drafts that `reading` keeps more than `current` in a round, at the same anchors: mean and its standard error,
    which for a single anchor is infinite."""
    difference = kept[reading] - kept[current]
    count = len(difference)
    return float(difference.mean()), float(difference.std()) / count**0.5 if count > 1 else float("inf")


def clearly_better(
    kept: Mapping[Reading, torch.Tensor],
    current: Reading,
    min_gain: float = MIN_GAIN,
    min_errors: float = MIN_ERRORS,
) -> Reading | None:
    """The reading that keeps most drafts, if that is clearly more than `current` keeps.

    Of two that are about as good it is the one with fewer changes: another change must be clearly better again.
    """
    chosen = current
    for changes in range(1, len(fields(Reading)) + 1):
        group = [reading for reading in kept if reading.changes(current) == changes]
        best = max(group, key=lambda reading: float(kept[reading].mean()), default=chosen)
        more, error = gain(kept, best, chosen)
        if best != chosen and more >= max(min_gain, min_errors * error):
            chosen = best
    return None if chosen == current else chosen
