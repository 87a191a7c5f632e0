"""The proposer: one backbone forward over the block, the sequential walk over its slots, confidence at the end."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

import torch

from . import confidence
from .context import Context, DraftContext
from .generation.logits_process import MarkovLogitsProcessor
from .modeling_dspark import BackboneOutput, DSparkForCausalLM, fit_vocabulary
from .sampling import draw
from .target import TargetVocabulary

# (ids so far [B, t], logits of the slot [B, V]) -> (processed scores [B, V], chosen ids [B])
Choose = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class DraftBlock:
    """What a draft proposes in one round; γ slots, float32, on the draft's device.

    Attributes:
        tokens: [B, γ] target ids x_1..x_γ.
        logits: [B, γ, V] base logits plus Markov bias, -inf where the draft has no vocabulary.
        base_logits: [B, γ, V_draft] U_k.
        hidden_states: [B, γ, H] h_k after the final norm.
        confidence_logits: [B, γ] before temperatures, or `None` without confidence head.
        survival: [B, γ] a_j with temperatures applied, or `None`.
        scores: [B, γ, V] what the tokens were chosen from: `logits` after temperature and logits processors. Their
            softmax is q_k when the tokens were sampled.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    base_logits: torch.Tensor
    hidden_states: torch.Tensor
    confidence_logits: torch.Tensor | None
    survival: torch.Tensor | None
    scores: torch.Tensor


def markov_walk(
    input_ids: torch.Tensor,
    base_logits: torch.Tensor,
    markov: MarkovLogitsProcessor,
    vocabulary_size: int,
    choose: Choose,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose the drafts of a block from left to right (paper, sequential stage). The only such loop in the package.

    Args:
        input_ids: [B, t], the tokens so far; the last one is the anchor.
        base_logits: [B, γ, V_draft].
        markov: with the block opened.
        vocabulary_size: V of the target.
        choose: picks the token of a slot from its biased logits.

    Returns:
        tokens [B, γ], logits [B, γ, V] and scores [B, γ, V].
    """
    start, slots = input_ids.shape[1], base_logits.shape[1]
    ids = torch.cat((input_ids, input_ids.new_empty(input_ids.shape[0], slots)), dim=1)
    logits, scores = [], []
    for k in range(slots):
        prefix = ids[:, : start + k]
        slot_logits = fit_vocabulary(markov(prefix, base_logits[:, k]), vocabulary_size)
        slot_scores, ids[:, start + k] = choose(prefix, slot_logits)
        logits.append(slot_logits)
        scores.append(slot_scores)
    return ids[:, start:], torch.stack(logits, dim=1), torch.stack(scores, dim=1)


class Proposer:
    """A draft at work for a target."""

    def __init__(self, draft: DSparkForCausalLM, vocabulary: TargetVocabulary):
        self.draft = draft
        self.vocabulary = vocabulary
        self.markov = MarkovLogitsProcessor(draft.markov_head)

    def propose(
        self, context: Context, input_ids: torch.Tensor, position: int | torch.Tensor, choose: Choose
    ) -> DraftBlock:
        """One block after the anchors `input_ids[:, -1]`, which stand at `position` (of all rows, or [B])."""
        draft, config = self.draft, self.draft.config
        input_ids = input_ids.to(draft.device)
        block_ids = input_ids.new_full((input_ids.shape[0], config.block_size), config.mask_token_id)
        block_ids[:, 0] = input_ids[:, -1]
        anchors = torch.as_tensor(position, device=draft.device).reshape(-1, 1)
        positions = anchors + torch.arange(config.block_size, device=draft.device)
        backbone = draft(block_ids, positions, context, self.vocabulary)
        self.markov.begin(backbone.hidden_states)
        tokens, logits, scores = markov_walk(input_ids, backbone.base_logits, self.markov, self.vocabulary.size, choose)
        prev = torch.cat((input_ids[:, -1:], tokens[:, :-1]), dim=1)
        confidence_logits = self._confidence_logits(backbone, prev)
        survival = None
        if confidence_logits is not None:
            c = confidence.conditional(confidence_logits, config.confidence_temperatures)
            survival = confidence.survival(c)
        return DraftBlock(
            tokens, logits, backbone.base_logits, backbone.hidden_states, confidence_logits, survival, scores
        )

    def _confidence_logits(self, backbone: BackboneOutput, prev: torch.Tensor) -> torch.Tensor | None:
        head = self.draft.confidence_head
        if head is None:
            return None
        embedding, markov_head = None, self.draft.markov_head
        if head.with_markov and markov_head is not None:
            embedding = markov_head.embed(prev.clamp(max=self.draft.config.vocab_size - 1))
        return head(backbone.hidden_states, embedding)


@torch.no_grad()
def propose(
    draft: DSparkForCausalLM,
    anchor_ids: torch.Tensor,
    target_hidden_states: torch.Tensor,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> DraftBlock:
    """See `DSparkForCausalLM.propose`."""
    config = draft.config
    if not isinstance(temperature, Real) or not 0 <= temperature < float("inf"):
        raise ValueError(f"`temperature` must be a number >= 0, got {temperature!r}. Use 0 for greedy drafts.")
    if not isinstance(anchor_ids, torch.Tensor) or anchor_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"`anchor_ids` must be a tensor of token ids (int64), got {anchor_ids!r}.")
    if anchor_ids.dim() != 1 or anchor_ids.shape[0] == 0:
        raise ValueError(f"`anchor_ids` must be [B] with B >= 1, got shape {tuple(anchor_ids.shape)}.")
    batch_size = anchor_ids.shape[0]
    if target_hidden_states.dim() != 3 or target_hidden_states.shape[::2] != (batch_size, config.context_size):
        raise ValueError(
            f"`target_hidden_states` must be [{batch_size}, S, {config.context_size}] "
            f"({len(config.target_layer_ids)} taps of width {config.target_hidden_size}), "
            f"got {tuple(target_hidden_states.shape)}."
        )
    vocabulary = draft.vocabulary
    if anchor_ids.min() < 0 or anchor_ids.max() >= vocabulary.size:
        raise ValueError(f"`anchor_ids` must lie in 0..{vocabulary.size - 1}, got {anchor_ids.tolist()}.")

    def choose(prefix: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits / temperature if temperature > 0 else logits
        return scores, draw(scores, do_sample=temperature > 0, generator=generator)

    context = DraftContext(config, batch_size, draft.device, draft.dtype)
    length = target_hidden_states.shape[1]
    draft.append_context(context, target_hidden_states, torch.arange(length).unsqueeze(0))
    return Proposer(draft, vocabulary).propose(context, anchor_ids.unsqueeze(1), length, choose)
