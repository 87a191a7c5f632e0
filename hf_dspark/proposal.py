"""The proposer: one backbone forward over the block, the sequential walk over its slots, confidence at the end."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from . import confidence, kernels
from .compiling import compiled
from .context import Context, DraftContext
from .generation.logits_process import MarkovLogitsProcessor
from .heads import VanillaMarkovHead
from .modeling_dspark import BackboneOutput, DSparkForCausalLM
from .sampling import draw, usable
from .target import TargetVocabulary, spread

# (ids so far [B, t], logits of the slot [B, V]) -> (processed scores [B, V], chosen ids [B])
Choose = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# (ids so far [B, t], number of the slot) -> (chosen ids [B], anything)
Step = Callable[[torch.Tensor, int], tuple[torch.Tensor, Any]]


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


def markov_walk(input_ids: torch.Tensor, slots: int, step: Step) -> tuple[torch.Tensor, list[Any]]:
    """Choose the drafts of a block from left to right (paper, sequential stage). The only such loop in the package.

    Args:
        input_ids: [B, t], the tokens so far; the last one is the anchor.
        slots: γ.
        step: of one slot.

    Returns:
        tokens [B, γ], and whatever the steps gave beside them.
    """
    start = input_ids.shape[1]
    ids = torch.cat((input_ids, input_ids.new_empty(input_ids.shape[0], slots)), dim=1)
    beside = []
    for k in range(slots):
        ids[:, start + k], more = step(ids[:, : start + k], k)
        beside.append(more)
    return ids[:, start:], beside


def arg_max(prefix: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A `Choose`: greedy."""
    return logits, logits.argmax(dim=-1)


def sample(prefix: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A `Choose`: from the softmax of the logits."""
    scores = usable(logits)
    return scores, draw(scores, do_sample=True)


def plain_walk(
    head: VanillaMarkovHead | None,
    anchors: torch.Tensor,
    backbone: BackboneOutput,
    ids: torch.Tensor | None,
    vocabulary_size: int,
    choose: Choose,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The walk as a function: tokens [B, γ], logits and scores [B, γ, V]. `choose` sees `anchors` [B, t] and drafts.

    `ids` [V_draft] are the tokens that base logits stand for, `None` for the whole vocabulary.
    """
    markov = MarkovLogitsProcessor(head)
    markov.begin(backbone.hidden_states)

    def step(prefix: torch.Tensor, k: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        logits = spread(markov(prefix, backbone.base_logits[:, k]), ids, vocabulary_size, float("-inf"))
        scores, token = choose(prefix, logits)
        return token, (logits, scores)

    tokens, beside = markov_walk(anchors, backbone.hidden_states.shape[1], step)
    logits, scores = (torch.stack(parts, dim=1) for parts in zip(*beside, strict=True))
    return tokens, logits, scores


class Proposer:
    """A draft at work for a target."""

    def __init__(self, draft: DSparkForCausalLM, vocabulary: TargetVocabulary):
        self.draft = draft
        self.vocabulary = vocabulary
        ids = draft.proposable_ids
        # Of the draft's tokens, in ascending order, those that the target has a logit for.
        self._num_known = vocabulary.size if ids is None else int((ids < vocabulary.size).sum())

    def propose(
        self, context: Context, input_ids: torch.Tensor, position: int | torch.Tensor, choose: Choose
    ) -> DraftBlock:
        """One block after the anchors `input_ids[:, -1]`, which stand at `position` (of all rows, or [B])."""
        draft, size = self.draft, self.draft.config.block_size
        input_ids = input_ids.to(draft.device)
        anchors = torch.as_tensor(position, device=draft.device).reshape(-1, 1)
        block_ids = input_ids.new_full((input_ids.shape[0], size), draft.config.mask_token_id)
        block_ids[:, 0] = input_ids[:, -1]
        backbone = self.backbone(context, block_ids, anchors + torch.arange(size, device=draft.device))
        return self.walk(backbone, input_ids, choose)

    def backbone(
        self, context: Context, block_ids: torch.Tensor, positions: torch.Tensor, raw: bool = False
    ) -> BackboneOutput:
        """The parallel stage: blocks `[x_0, MASK, ...]` [B, block_size] at `positions` [1 or B, block_size].

        raw: leave the logits in the head's dtype where nothing is left to be computed with them.
        """
        hidden = self.draft.run_block(block_ids, positions, context, self.vocabulary)
        return BackboneOutput(hidden, self.draft.base_logits(hidden, self.vocabulary, raw))

    def walk(self, backbone: BackboneOutput, input_ids: torch.Tensor, choose: Choose) -> DraftBlock:
        """The sequential stage; `input_ids` [B, t] ends with the anchors. Compiled on CUDA for plain choices."""
        compiles = choose in (arg_max, sample) and backbone.base_logits.is_cuda
        walk, given = (compiled(plain_walk, fullgraph=True), input_ids[:, -1:]) if compiles else (plain_walk, input_ids)
        ids, size = self.draft.proposable_ids, self.vocabulary.size
        tokens, logits, scores = walk(self.draft.markov_head, given, backbone, ids, size, choose)
        confidence_logits = self.confidence_logits(backbone, input_ids[:, -1], tokens)
        survival = None
        if confidence_logits is not None:
            c = confidence.conditional(confidence_logits, self.draft.config.confidence_temperatures)
            survival = confidence.survival(c)
        return DraftBlock(
            tokens, logits, backbone.base_logits, backbone.hidden_states, confidence_logits, survival, scores
        )

    def kernel_step(self, backbone: BackboneOutput) -> Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]:
        """The step of a slot as one kernel: (prefix [B, t], k) -> the arg max [B] and the biased logits [B, V_draft].

        The token is a target id; logits are those of the tokens that the target knows too, see `on_vocabulary`.
        """
        head = self.draft.markov_head
        base = backbone.base_logits[..., : self._num_known]
        rows = torch.arange(base.shape[0], device=base.device)
        state: torch.Tensor | None = None

        def row(prefix: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal state
            prev = prefix[:, -1]
            if head is None:
                return kernels.markov_step(prev, None, None, base[:, k])
            w2 = head.markov_w2.weight[: base.shape[-1]]
            if type(head) is VanillaMarkovHead:
                return kernels.markov_step(prev, head.markov_w1.weight, w2, base[:, k])
            prev = prev.clamp(max=head.markov_w1.num_embeddings - 1)
            vector, state = head.transition(prev, backbone.hidden_states[:, k], state)
            return kernels.markov_step(rows, vector, w2, base[:, k])

        def step(prefix: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
            token, logits = row(prefix, k)
            return token if ids is None else ids[token], logits

        ids = self.draft.proposable_ids
        return step

    def on_vocabulary(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Probabilities of the logits of `kernel_step` [B, V_draft] -> of all tokens of the target, [B, V]."""
        ids = self.draft.proposable_ids
        return spread(probabilities, None if ids is None else ids[: self._num_known], self.vocabulary.size, 0.0)

    def confidence_logits(
        self, backbone: BackboneOutput, anchors: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor | None:
        """[B, γ] logits of c_k for drafts `tokens` [B, γ] after `anchors` [B], or `None` without confidence head."""
        head, markov_head = self.draft.confidence_head, self.draft.markov_head
        if head is None:
            return None
        embedding = None
        if head.with_markov and markov_head is not None:
            prev = torch.cat((anchors[:, None], tokens[:, :-1]), dim=1)
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
