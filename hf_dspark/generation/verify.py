"""Which drafts the target keeps, and the token it adds. One row.

With transformers' own processors, functions of the prefix, all slots are decided at once. Any other processor may keep
state, so then slots are decided one after the other and it only ever sees committed text.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from transformers import LogitsProcessor, LogitsProcessorList, PrefixConstrainedLogitsProcessor

from ..sampling import accept, next_distribution
from .stopping import Transcript

REJECTED = -1


def applies_to_draft(processor: LogitsProcessor) -> bool:
    """Whether a processor may see drafts that the target has not confirmed.

    True for transformers' own, which are functions of the ids they are given. The caller's code may say so with an
    attribute `draft_safe = True` on the processor or the `prefix_allowed_tokens_fn`; it only changes how often drafts
    are accepted.
    """
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        return bool(getattr(processor._prefix_allowed_tokens_fn, "draft_safe", False))
    own = type(processor).__module__.startswith("transformers.")
    return bool(getattr(processor, "draft_safe", own))


def draft_distribution(scores: torch.Tensor, tokens: torch.Tensor, sample_method: str) -> torch.Tensor:
    """q [ℓ, V]: the softmax the drafts were drawn from, or one-hot for drafts that were not drawn."""
    if sample_method == "greedy":
        return F.one_hot(tokens, scores.shape[-1]).float()
    return scores.softmax(dim=-1)


def decide(tokens: torch.Tensor, q: torch.Tensor | None, scores: torch.Tensor) -> torch.Tensor:
    """The tokens that follow from ℓ drafts and the target's processed scores of n slots.

    Args:
        tokens: [ℓ] drafts.
        q: [ℓ, V] distributions they were drawn from, or `None` for greedy decoding.
        scores: [n, V], n = ℓ + 1; or n = ℓ to leave the bonus token out.

    Returns:
        [n]: accepted drafts, then the target's own token, then -1.
    """
    slots = torch.arange(scores.shape[0], device=scores.device)
    drafts = tokens.shape[0]
    if q is None:
        chosen = scores.argmax(dim=-1)
        accepted = (chosen[:drafts] == tokens).long().cumprod(dim=-1).sum()
        return chosen.masked_fill(slots > accepted, REJECTED)
    p = scores.softmax(dim=-1)
    uniform = torch.rand(tokens.shape, device=scores.device)
    accepted = accept(tokens[None], q[None], p[None, :drafts], uniform[None])
    # A zero row after the last draft turns the residual into p itself, the bonus distribution.
    own = next_distribution(p[accepted.clamp(max=p.shape[0] - 1)], F.pad(q, (0, 0, 0, 1))[accepted])
    own_token = torch.multinomial(own, 1)[0]
    padded = F.pad(tokens, (0, 1))[: slots.shape[0]]
    return torch.where(slots < accepted, padded, own_token).masked_fill(slots > accepted, REJECTED)


def verify(
    transcript: Transcript,
    tokens: torch.Tensor,
    q: torch.Tensor | None,
    logits: torch.Tensor,
    processors: LogitsProcessorList,
) -> tuple[int, int, Sequence[torch.Tensor]]:
    """Decide on ℓ drafts and commit what follows.

    Args:
        transcript: receives the tokens.
        tokens: [ℓ] drafts.
        q: [ℓ, V] distributions they were drawn from, or `None` for greedy decoding.
        logits: [ℓ+1, V] of the target, float32.
        processors: every processor of the call.

    Returns:
        tokens committed, how many of them are drafts, and the processed scores [V] of every slot that was decided.
    """
    if all(applies_to_draft(processor) for processor in processors):
        return _verify_at_once(transcript, tokens, q, logits, processors)
    return _verify_stepwise(transcript, tokens, q, logits, processors)


def _verify_at_once(
    transcript: Transcript,
    tokens: torch.Tensor,
    q: torch.Tensor | None,
    logits: torch.Tensor,
    processors: LogitsProcessorList,
) -> tuple[int, int, Sequence[torch.Tensor]]:
    scores: torch.Tensor = logits
    if len(processors):
        ids = torch.cat((transcript.ids, tokens[None]), dim=-1)
        start = transcript.ids.shape[1]
        slots = range(logits.shape[0])
        scores = torch.cat([processors(ids[:, : start + i], logits[i : i + 1].clone()) for i in slots])
    chosen = [token for token in decide(tokens, q, scores).tolist() if token != REJECTED]
    committed = transcript.commit(chosen, scores, logits)
    return committed, min(committed, len(chosen) - 1), scores


def _verify_stepwise(
    transcript: Transcript,
    tokens: torch.Tensor,
    q: torch.Tensor | None,
    logits: torch.Tensor,
    processors: LogitsProcessorList,
) -> tuple[int, int, Sequence[torch.Tensor]]:
    drafts, seen = tokens.tolist(), []
    for i in range(logits.shape[0]):
        row = slice(i, i + 1)
        scores = processors(transcript.ids, logits[row].clone())
        (token,) = decide(tokens[row], None if q is None else q[row], scores).tolist()
        transcript.commit([token], scores, logits[row])
        seen.append(scores[0])
        accepted = i < len(drafts) and token == drafts[i]
        if transcript.stopped or not accepted:
            return i + 1, i + accepted, seen
    raise AssertionError("the last slot always brings the target's own token")


def decided_probabilities(
    scores: Sequence[torch.Tensor], drafts: list[int], accepted: int, next_token: int | None
) -> list[float]:
    """`Round.p`: of the accepted drafts, of the one that `next_token` replaced, and of `next_token`."""
    slots = list(enumerate(drafts[:accepted]))
    if next_token is not None:
        slots += [(accepted, token) for token in (*drafts[accepted : accepted + 1], next_token)]
    if not slots:
        return []
    rows, tokens = zip(*slots, strict=True)
    p = torch.stack([scores[i] for i in rows]).softmax(dim=-1)
    return p.gather(-1, torch.tensor(tokens, device=p.device)[:, None])[:, 0].tolist()
