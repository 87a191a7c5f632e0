"""A draft's forward over many anchor blocks, teacher-forced, with the layers and heads that inference uses."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..heads import VanillaMarkovHead
from ..modeling_dspark import DSparkForCausalLM
from ..target import fit_vocabulary
from .anchors import gather_positions, slot_targets
from .attention import BlockContext
from .rows import LogitRows


@dataclass(frozen=True)
class BlockOutput:
    """What a draft says in A anchor blocks of each of B sequences.

    Attributes:
        draft_logits: [B, A, γ, V] with Markov bias, float32; a `LogitRows` of that shape after `lazy=True`.
        target_ids: [B, A, γ] int64 labels.
        eval_mask: [B, A, γ] bool, the slots that count.
        confidence_logits: [B, A, γ] float32 before temperatures, or `None` without confidence head.
    """

    draft_logits: torch.Tensor | LogitRows
    target_ids: torch.Tensor
    eval_mask: torch.Tensor
    confidence_logits: torch.Tensor | None


def forward_blocks(
    draft: DSparkForCausalLM,
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    target_hidden_states: torch.Tensor,
    anchor_positions: torch.Tensor,
    keep_mask: torch.Tensor,
    *,
    lazy: bool = False,
) -> BlockOutput:
    """Run the draft over anchor blocks with gradients (paper, training objective).

    Slot k of the block at anchor a predicts token a+k from the taps of positions before a and, through the Markov head,
    from the true token a+k-1. Embeddings and head of the draft are frozen by this call.

    Args:
        draft: with its own embeddings and head, or attached to a target.
        input_ids: [B, S] int64, padded on the right.
        loss_mask: [B, S], 1 at supervised tokens, 0 at padding.
        target_hidden_states: [B, S, n_taps · H_target], see `context_features`.
        anchor_positions, keep_mask: [B, A] as `sample_anchors` gives them.
        lazy: leave the logits to be computed in chunks by `dspark_loss`. At once they take 4·B·A·γ·V bytes, 2.1 GB for
            32 × 48 × 7 slots and 49,152 tokens, and as much again for each step of their gradient.

    Raises:
        ValueError: for shapes that do not fit, and for drafts with a reduced vocabulary or partial attention.
    """
    _check_trainable(draft)
    _check_shapes(draft, input_ids, loss_mask, target_hidden_states, anchor_positions, keep_mask)
    _freeze_vocabulary(draft)
    config = draft.config
    keep_mask = keep_mask.bool()
    targets = slot_targets(input_ids, loss_mask, anchor_positions, keep_mask, config.num_draft_tokens)
    hidden = _hidden_states(draft, input_ids, target_hidden_states, anchor_positions, keep_mask)
    prev_ids = targets.prev_ids.clamp(max=config.vocab_size - 1)
    logits = _logit_rows(draft, prev_ids, hidden)
    return BlockOutput(
        draft_logits=logits if lazy else logits.tensor(),
        target_ids=targets.target_ids,
        eval_mask=targets.eval_mask,
        confidence_logits=_confidence_logits(draft, prev_ids, hidden),
    )


def _check_trainable(draft: DSparkForCausalLM) -> None:
    if draft.config.draft_vocab_size is not None:
        raise ValueError("Training takes drafts of the whole vocabulary: labels outside a reduced one have no logit.")
    if not all(layer.self_attn.sees_all for layer in draft.layers):
        raise ValueError("Training takes drafts whose layers see the whole context and block: no windows, not causal.")


def _check_shapes(draft, input_ids, loss_mask, target_hidden_states, anchor_positions, keep_mask) -> None:
    if input_ids.dim() != 2 or loss_mask.shape != input_ids.shape:
        raise ValueError(
            f"`input_ids` and `loss_mask` must both be [B, S], got {tuple(input_ids.shape)} and "
            f"{tuple(loss_mask.shape)}."
        )
    expected = (*input_ids.shape, draft.config.context_size)
    if tuple(target_hidden_states.shape) != expected:
        raise ValueError(f"`target_hidden_states` must be {expected}, got {tuple(target_hidden_states.shape)}.")
    if anchor_positions.dim() != 2 or keep_mask.shape != anchor_positions.shape:
        raise ValueError(
            f"`anchor_positions` and `keep_mask` must both be [B, A], got {tuple(anchor_positions.shape)} and "
            f"{tuple(keep_mask.shape)}."
        )
    if anchor_positions.shape[0] != input_ids.shape[0]:
        raise ValueError(
            f"`anchor_positions` are of {anchor_positions.shape[0]} sequences, `input_ids` of {input_ids.shape[0]}."
        )


def _freeze_vocabulary(draft: DSparkForCausalLM) -> None:
    for stored, name in ((draft.config.has_embed_tokens, "embed_tokens"), (draft.config.has_lm_head, "lm_head")):
        if stored:
            getattr(draft, name).requires_grad_(False)


def _hidden_states(draft, input_ids, target_hidden_states, anchor_positions, keep_mask) -> torch.Tensor:
    """h_k of all slots, [B, A, γ, H]."""
    config, (rows, length) = draft.config, input_ids.shape
    context = BlockContext(anchor_positions, keep_mask, length, config.block_size)
    positions = torch.arange(length, device=input_ids.device).unsqueeze(0)
    draft.append_context(context, target_hidden_states, positions)
    anchors = gather_positions(input_ids, anchor_positions)
    block_ids = input_ids.new_full((*anchors.shape, config.block_size), config.mask_token_id)
    block_ids[..., 0] = torch.where(keep_mask, anchors, config.mask_token_id)
    slots = torch.arange(config.block_size, device=input_ids.device)
    positions = anchor_positions.unsqueeze(-1) + slots
    hidden = draft.run_block(block_ids.flatten(0, 1), positions.flatten(0, 1), context, draft.vocabulary)
    return hidden.unflatten(0, (rows, -1))


def _logit_rows(draft: DSparkForCausalLM, prev_ids: torch.Tensor, hidden: torch.Tensor) -> LogitRows:
    vocabulary, head = draft.vocabulary, draft.markov_head
    shape = torch.Size((*prev_ids.shape, vocabulary.size))

    def compute(hidden: torch.Tensor, vector: torch.Tensor | None = None, w2: torch.Tensor | None = None):
        addends = [draft.base_logits(hidden, vocabulary, raw=True)]
        if vector is not None and w2 is not None:
            addends.append(F.linear(vector, w2))
        return tuple(fit_vocabulary(addend, vocabulary.size) for addend in addends)

    if head is None:
        return LogitRows(compute, (hidden.flatten(0, 2),), (), shape)
    vectors = transitions(head, prev_ids.flatten(0, 1), hidden.flatten(0, 1)).flatten(0, 1)
    return LogitRows(compute, (hidden.flatten(0, 2), vectors), (head.markov_w2.weight,), shape)


def transitions(head: VanillaMarkovHead, prev_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The Markov walk along given tokens: u_k [N, γ, r] with B_k = W2 · u_k, from x_{k-1} [N, γ] and h_k [N, γ, H].

    Heads without state do all slots in one computation, an rnn head goes slot by slot.
    """
    if not head.has_state:
        return head.transition(prev_ids, hidden, None)[0]
    state, vectors = None, []
    for k in range(prev_ids.shape[1]):
        vector, state = head.transition(prev_ids[:, k], hidden[:, k], state)
        vectors.append(vector)
    return torch.stack(vectors, dim=1)


def _confidence_logits(draft: DSparkForCausalLM, prev_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | None:
    head = draft.confidence_head
    if head is None:
        return None
    embedding = draft.markov_head.embed(prev_ids) if head.with_markov and draft.markov_head is not None else None
    with torch.autocast(hidden.device.type, enabled=False):  # float32, as in inference
        return head(hidden, embedding)
