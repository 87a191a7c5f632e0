"""Acceptance of drafts and the target's own next token, and draws from given probabilities, without host sync.

A draw is an exponential race: the token with the largest weight / Exp(1) noise is a sample of the weights, which need
no normalisation. Weights of zero never win.
"""

import torch
import triton
import triton.language as tl

from .noise import DRAFT, RESIDUAL, acceptance_uniform, exponential, first_maximum


@triton.jit
def _accepted(
    drafts, q, p, place, row, length, stride_q, stride_p, seed, gamma, ONE_HOT: tl.constexpr, SLOTS: tl.constexpr
):
    """Length of the accepted prefix: u·q(x) < p(x), strict."""
    slots = tl.arange(0, SLOTS)
    verified = slots < length
    tokens = tl.load(drafts + row * gamma + slots, mask=verified, other=0)
    p_token = tl.load(p + (place + slots) * stride_p + tokens, mask=verified, other=0.0)
    q_token = tl.full([SLOTS], 1.0, tl.float32)
    if not ONE_HOT:
        q_token = tl.load(q + (row * gamma + slots) * stride_q + tokens, mask=verified, other=0.0)
    passed = acceptance_uniform(seed, row.to(tl.int32), slots) * q_token < p_token
    return tl.min(tl.where(verified & passed, SLOTS, tl.where(verified, slots, tl.maximum(length, 0))), axis=0)


@triton.jit(do_not_specialize=["offset"])
def _race(
    drafts, q, p, lengths, row_starts, seed, residual_best, target_best, residual_tokens, target_tokens, accepted,
    gamma, vocabulary_size, stride_q, stride_p, offset,
    DRAW: tl.constexpr, ONE_HOT: tl.constexpr, RAGGED: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the best token of one block of the vocabulary for one row, from the residual and from p."""
    row = tl.program_id(0).to(tl.int64)
    part = row * tl.num_programs(1) + tl.program_id(1)
    key = tl.load(seed)
    place = row * (gamma + 1)
    count = row * 0
    length = count
    if not DRAW:
        length = tl.load(lengths + row).to(tl.int64)
        if length < 0:
            return
        if RAGGED:
            place = tl.load(row_starts + row).to(tl.int64)
        count = _accepted(drafts, q, p, place, row, length, stride_q, stride_p, key, gamma, ONE_HOT, SLOTS).to(tl.int64)
        tl.store(accepted + row, count)
    first = tl.program_id(1) * BLOCK
    tokens = first + tl.arange(0, BLOCK)
    known = tokens < vocabulary_size
    weight = tl.load(p + (place + count) * stride_p + tokens, mask=known, other=0.0)
    quads = first // 4 + tl.arange(0, BLOCK // 4)
    if DRAW:
        noise = exponential(key, row.to(tl.int32), offset, DRAFT, quads)
    else:
        noise = exponential(key, row.to(tl.int32), 0, RESIDUAL, quads)
    score, token = first_maximum(tl.where(known, weight / noise, -1.0), tokens, 0)
    tl.store(target_best + part, score)
    tl.store(target_tokens + part, token)
    if count < length:
        if ONE_HOT:
            draft = tl.load(drafts + row * gamma + count)
            weight = tl.where(tokens == draft, 0.0, weight)
        else:
            weight -= tl.load(q + (row * gamma + count) * stride_q + tokens, mask=known, other=0.0)
        score, token = first_maximum(tl.where(known, tl.maximum(weight, 0.0) / noise, -1.0), tokens, 0)
    tl.store(residual_best + part, score)
    tl.store(residual_tokens + part, token)


@triton.jit
def _finish(
    lengths, residual_best, target_best, residual_tokens, target_tokens, accepted, chosen, num_parts, vocabulary_size,
    DRAW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the winner of one row. A residual that vanishes by rounding means p = q: then p's winner."""
    row, parts = tl.program_id(0), tl.arange(0, BLOCK)
    if not DRAW:  # noqa: SIM102 (compile-time)
        if tl.load(lengths + row) < 0:
            tl.store(accepted + row, tl.zeros([], tl.int64))
            tl.store(chosen + row, tl.zeros([], tl.int64))
            return
    mask = parts < num_parts
    place = row * num_parts + parts
    scores = tl.load(residual_best + place, mask=mask, other=-2.0)
    tokens = tl.load(residual_tokens + place, mask=mask, other=2147483647)
    score, token = first_maximum(scores, tokens, 0)
    if score <= 0:
        scores = tl.load(target_best + place, mask=mask, other=-2.0)
        tokens = tl.load(target_tokens + place, mask=mask, other=2147483647)
        score, token = first_maximum(scores, tokens, 0)
    tl.store(chosen + row, tl.minimum(token, vocabulary_size - 1).to(tl.int64))


@triton.jit
def _block_maximum(
    scores, lengths, row_starts, best_scores, best_tokens, vocabulary_size, stride,
    RAGGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the arg max of one block of the vocabulary for one slot of one row."""
    row, slot = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if slot > tl.load(lengths + row):
        return
    place = row * tl.num_programs(1) + slot
    part = place * tl.num_programs(2) + tl.program_id(2)
    if RAGGED:
        place = tl.load(row_starts + row).to(tl.int64) + slot
    tokens = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    known = tokens < vocabulary_size
    values = tl.load(scores + place * stride + tokens, mask=known, other=float("-inf")).to(tl.float32)
    score, token = first_maximum(values, tl.where(known, tokens, 2147483647), 0)
    tl.store(best_scores + part, score)
    tl.store(best_tokens + part, token)


@triton.jit
def _compare(
    drafts, lengths, best_scores, best_tokens, accepted, chosen, gamma, num_parts, vocabulary_size,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: drafts of one row against the target's arg max."""
    row = tl.program_id(0)
    slots, parts = tl.arange(0, SLOTS), tl.arange(0, BLOCK)
    length = tl.load(lengths + row)
    place = (row * (gamma + 1) + slots)[:, None] * num_parts + parts[None, :]
    mask = (slots <= length)[:, None] & (parts < num_parts)[None, :]
    scores = tl.load(best_scores + place, mask=mask, other=float("-inf"))
    tokens = tl.load(best_tokens + place, mask=mask, other=2147483647)
    _, own = first_maximum(scores, tokens, 1)
    own = tl.minimum(own, vocabulary_size - 1).to(tl.int64)
    draft = tl.load(drafts + row * gamma + slots, mask=slots < length, other=-1)
    count = tl.min(tl.where(own == draft, SLOTS, slots), axis=0)
    token = tl.sum(tl.where(slots == count, own, 0), axis=0)
    tl.store(accepted + row, tl.where(length < 0, 0, count).to(tl.int64))
    tl.store(chosen + row, tl.where(length < 0, 0, token))


BLOCK = 1024


def _sample(drafts, q, p, lengths, row_starts, seed, offset, draw: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches the race; `p` [·, V]. Returns accepted and tokens [R]."""
    num_rows, gamma = drafts.shape
    vocabulary_size = p.shape[-1]
    num_parts = triton.cdiv(vocabulary_size, BLOCK)
    best = torch.empty(2, num_rows, num_parts, device=p.device)
    tokens = torch.empty(2, num_rows, num_parts, dtype=torch.int32, device=p.device)
    accepted, chosen = torch.empty(2, num_rows, dtype=torch.long, device=p.device)
    _race[(num_rows, num_parts)](
        drafts, p if q is None else q, p, lengths, lengths if row_starts is None else row_starts, seed,
        best[0], best[1], tokens[0], tokens[1], accepted,
        gamma, vocabulary_size, 0 if q is None else q.stride(-2), p.stride(-2), offset,
        DRAW=draw, ONE_HOT=q is None, RAGGED=row_starts is not None, SLOTS=triton.next_power_of_2(gamma + 1),
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    _finish[(num_rows,)](
        lengths, best[0], best[1], tokens[0], tokens[1], accepted, chosen, num_parts, vocabulary_size,
        DRAW=draw, BLOCK=triton.next_power_of_2(num_parts),
    )  # fmt: skip
    return accepted, chosen


def draw(probabilities: torch.Tensor, noise: tuple[torch.Tensor, int]) -> torch.Tensor:
    """See `hf_dspark.kernels.draw`."""
    nothing = torch.empty(probabilities.shape[0], 0, dtype=torch.long, device=probabilities.device)
    return _sample(nothing, None, probabilities, nothing, None, *noise, draw=True)[1]


def accept_and_sample(
    drafts: torch.Tensor,
    q: torch.Tensor | None,
    scores: torch.Tensor,
    lengths: torch.Tensor,
    *,
    seed: torch.Tensor | None = None,
    row_starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_dspark.kernels.accept_and_sample`."""
    num_rows, gamma = drafts.shape
    drafts, scores = drafts.contiguous(), scores.flatten(0, -2)
    if seed is not None:
        q = None if q is None else q.flatten(0, -2)
        return _sample(drafts, q, scores, lengths, row_starts, seed, 0, draw=False)
    vocabulary_size = scores.shape[-1]
    num_parts = triton.cdiv(vocabulary_size, BLOCK)
    best = torch.empty(num_rows, gamma + 1, num_parts, device=scores.device)
    tokens = torch.empty(num_rows, gamma + 1, num_parts, dtype=torch.int32, device=scores.device)
    accepted, chosen = torch.empty(2, num_rows, dtype=torch.long, device=scores.device)
    _block_maximum[(num_rows, gamma + 1, num_parts)](
        scores, lengths, lengths if row_starts is None else row_starts, best, tokens, vocabulary_size,
        scores.stride(0), RAGGED=row_starts is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    _compare[(num_rows,)](
        drafts, lengths, best, tokens, accepted, chosen, gamma, num_parts, vocabulary_size,
        SLOTS=triton.next_power_of_2(gamma + 1), BLOCK=triton.next_power_of_2(num_parts),
    )  # fmt: skip
    return accepted, chosen
