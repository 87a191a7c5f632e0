"""The probe: a look at the first rounds of a pair, for drafts that are read the wrong way.

A wrong block layout or wrong taps leave the text exact and acceptance near zero, so nobody notices. The probe keeps
hidden states that the target computes anyway, scores other readings of the draft on the text it has just helped to
write, and warns once with the fix. It changes nothing by itself, and a pair that accepts well is not scored at all.
"""

import weakref

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput, logging

from ..modeling_dspark import DSparkForCausalLM
from ..readings import WINDOW, KnownText, Reading, clearly_better, drafts_kept, neighbours
from ..target import TargetVocabulary, context_features
from .pair import own_hooks
from .record import SpeculationStats

logger = logging.get_logger(__name__)

# Rounds of a call after which the probe looks, the most looks at a pair, and the most anchors of a look.
LOOKS, MOST_LOOKS, ANCHORS = (6, 32), 4, 32
# A call of so many rounds whose τ is below the second number gets a hint.
ROUNDS_OF_A_HINT, HARDLY_ANY = 32, 1.1
# The neighbours' hidden states of a longer prompt would take memory that the caller may need.
LONGEST_PROMPT = 2048

# Looks at each pair: target -> name of the draft -> count.
_looks: "weakref.WeakKeyDictionary[nn.Module, dict[str, int]]" = weakref.WeakKeyDictionary()


def hint(stats: SpeculationStats) -> str:
    """What to say about a call, on any path, whose drafts were hardly ever kept; or nothing."""
    if len(stats.rounds) < ROUNDS_OF_A_HINT or stats.mean_acceptance_length >= HARDLY_ANY:
        return ""
    return "hardly any draft is kept (τ near 1); `hf-dspark check` finds out why"


class Probe:
    """The probe of one generate() call on the plain path.

    Attributes:
        target_layer_ids: every tap of every reading.
        finished: whether it has seen enough of this pair.
    """

    def __init__(self, target: PreTrainedModel, draft: DSparkForCausalLM, vocabulary: TargetVocabulary):
        self._target, self._draft, self._vocabulary = target, draft, vocabulary
        depth = target.config.get_text_config(decoder=True).num_hidden_layers
        self._current = Reading.of(draft.config)
        self._readings = neighbours(self._current, depth, draft.config.block_size)
        self.target_layer_ids = sorted({tap for reading in self._readings for tap in reading.target_layer_ids})
        self._rows: list[torch.Tensor] = []
        self.finished = False
        self._num_rounds = self._num_first_kept = self._num_before = self._start = 0

    @classmethod
    def of(
        cls, target: PreTrainedModel, draft: DSparkForCausalLM, vocabulary: TargetVocabulary, prompt_length: int
    ) -> "Probe | None":
        """A probe for this call, or `None`: switched off, done before, or a call that should not carry one."""
        done = _looks.get(target, {}).get(draft.context_owner.key, 0) >= MOST_LOOKS
        if not draft.probe or done or prompt_length > LONGEST_PROMPT:
            return None
        # Hooks of the caller would see forwards that are none of its call; another set of hidden states would compile
        # a compiled target again.
        hooked = any(True for module in draft.modules() for _ in own_hooks(module))
        compiled = any(module._compiled_call_impl or hasattr(module, "_orig_mod") for module in target.modules())
        return None if hooked or compiled else cls(target, draft, vocabulary)

    def see_prompt(self, outputs: ModelOutput, real: torch.Tensor | None, length: int) -> None:
        """Keep the end of a prompt, given chunk by chunk.

        Args:
            outputs: of the target on a chunk of n tokens.
            real: [n] bool, which of them are no padding; `None` for all.
            length: real tokens of the text up to here.
        """
        rows = self._last_rows(outputs, WINDOW)
        rows = rows if real is None else rows[real[-len(rows) :]]
        self._rows = [torch.cat([*self._rows, rows])[-WINDOW:]]
        self._num_before = len(self._rows[0])
        self._start = length - self._num_before

    def see_round(self, outputs: ModelOutput, drafts: int, accepted: int, committed: int, tokens: list[int]) -> str:
        """Note a finished round and, at a look, judge.

        Args:
            outputs: of the target on the anchor and `drafts` drafts.
            tokens: new tokens of the text so far, the last ones `committed` by this round.

        Returns:
            a note for the statistics.
        """
        self._rows.append(self._last_rows(outputs, drafts + 1)[:committed])
        self._num_rounds += 1
        self._num_first_kept += accepted > 0
        if self._num_rounds not in LOOKS:
            return ""
        looks = _looks.setdefault(self._target, {})
        accepts_well = 2 * self._num_first_kept >= self._num_rounds
        note = "" if accepts_well else self._look(tokens)
        name = self._draft.context_owner.key
        looks[name] = MOST_LOOKS if accepts_well or note else looks.get(name, 0) + 1
        self.finished = looks[name] >= MOST_LOOKS or self._num_rounds == LOOKS[-1]
        return note

    def _last_rows(self, outputs: ModelOutput, count: int) -> torch.Tensor:
        """[n, n_taps · H_target] of the last `count` tokens that were fed."""
        states = tuple(None if state is None else state[:, -count:] for state in outputs.hidden_states)
        return context_features(states, self.target_layer_ids)[0]

    def _look(self, tokens: list[int]) -> str:
        """Score the readings; the warning, or nothing."""
        width, device = self._draft.config.target_hidden_size, self._draft.device
        rows = torch.cat(self._rows).to(device)
        by_tap = {tap: rows[:, i * width : (i + 1) * width] for i, tap in enumerate(self.target_layer_ids)}
        ids = torch.tensor([0] * self._num_before + tokens, device=device)  # nobody reads the ids before the anchors
        anchors = range(max(1, self._num_before), len(ids) - 1)[-ANCHORS:]
        text = KnownText(ids, by_tap, self._start)
        kept = drafts_kept(self._draft, self._vocabulary, text, anchors, self._readings)
        if (better := clearly_better(kept, self._current)) is None:
            return ""
        here, there = (float(kept[reading].mean()) for reading in (self._current, better))
        note = (
            f"this draft seems to be read the wrong way: over {len(anchors)} tokens {here:.1f} drafts a round are "
            f"right and {there:.1f} would be if it were read otherwise. {better.fix(self._current)}"
        )
        logger.warning(f"hf_dspark: {note} `hf-dspark check` looks closer, `draft.probe = False` switches this off.")
        return note
