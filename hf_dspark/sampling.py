"""The draws and the acceptance rule of speculative sampling (Leviathan et al. 2023, algorithm 1). Pure functions.

p is the target's distribution and q the one a draft token was really drawn from, both float32 and after every logits
processor. A deterministic draft has the one-hot q.
"""

import torch


def usable(scores: torch.Tensor) -> torch.Tensor:
    """Scores [B, V] that can be sampled from, whatever the draft made of them; q is what comes out, so it is exact.

    NaN never comes up, +inf is the largest number, and a row without any candidate becomes uniform.
    """
    limit = torch.finfo(scores.dtype).max
    scores = torch.nan_to_num(scores, nan=float("-inf"), posinf=limit, neginf=float("-inf"))
    return torch.where(scores.amax(dim=-1, keepdim=True) == float("-inf"), 0.0, scores)


def draw(scores: torch.Tensor, do_sample: bool, generator: torch.Generator | None = None) -> torch.Tensor:
    """One token id per row of processed `scores` [B, V]: the arg max, or a sample of their softmax. Returns [B]."""
    if not do_sample:
        return scores.argmax(dim=-1)
    return torch.multinomial(scores.softmax(dim=-1), 1, generator=generator).squeeze(-1)


def accept(tokens: torch.Tensor, q: torch.Tensor, p: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Length of the accepted prefix of each row.

    Token k is accepted with probability min(1, p(x_k) / q(x_k)). The comparison u·q < p is strict, so a token the
    target gives probability 0 is never accepted, even when u is exactly 0.

    Args:
        tokens: [B, n] int64 drafts.
        q, p: [B, n, V] distributions of draft and target.
        uniform: [B, n] draws from [0, 1).

    Returns:
        [B] int64.
    """
    index = tokens.unsqueeze(-1)
    passed = uniform * q.gather(-1, index).squeeze(-1) < p.gather(-1, index).squeeze(-1)
    return passed.long().cumprod(dim=-1).sum(dim=-1)


def next_distribution(p: torch.Tensor, q: torch.Tensor | None) -> torch.Tensor:
    """Distribution of the target's own token after the accepted prefix.

    After a rejection the residual norm(max(p − q, 0)); after a full block (`q=None`) p itself, the bonus. A residual
    that vanishes by rounding means p = q, so p is the right answer there too. Shapes: [B, V].
    """
    if q is None:
        return p
    residual = (p - q).clamp(min=0)
    mass = residual.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, residual / mass, p)
