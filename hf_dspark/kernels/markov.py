"""One step of the Markov walk: a row of W1, one pass over W2, base logits, and the choice of the token."""

import torch
import triton
import triton.language as tl

from .noise import DRAFT, exponential, first_maximum


@triton.jit(do_not_specialize=["num_rows", "offset"])
def _step(
    prev, w1, w2, base, temperature, seed, logits, best_scores, best_tokens,
    num_rows, vocabulary_size, num_embeddings, stride_prev, stride_w1, stride_w2, stride_base, stride_logits, offset,
    RANK: tl.constexpr, HAS_HEAD: tl.constexpr, WRITE: tl.constexpr, NOISY: tl.constexpr,
    TILES: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: TILES neighbouring tiles of BLOCK_V tokens, for all rows."""
    rows, ranks = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_R)
    in_batch, in_rank = rows < num_rows, ranks < RANK
    if HAS_HEAD:
        token = tl.minimum(tl.load(prev + rows * stride_prev, mask=in_batch, other=0), num_embeddings - 1)
        w1_mask = in_batch[:, None] & in_rank[None, :]
        embedding = tl.load(w1 + token[:, None] * stride_w1 + ranks[None, :], mask=w1_mask, other=0)
    if NOISY:
        heat = tl.load(temperature + rows, mask=in_batch, other=0.0)[:, None]
        key = tl.load(seed)
    best = tl.full([BLOCK_B], float("-inf"), tl.float32)
    choice = tl.full([BLOCK_B], 2147483647, tl.int32)
    for tile in range(TILES):
        first = (tl.program_id(0) * TILES + tile) * BLOCK_V
        tokens = first + tl.arange(0, BLOCK_V)
        known = tokens < vocabulary_size
        mask = in_batch[:, None] & known[None, :]
        columns = rows.to(tl.int64)[:, None]
        scores = tl.load(base + columns * stride_base + tokens[None, :], mask=mask, other=float("-inf"))
        scores = scores.to(tl.float32)
        if HAS_HEAD:
            place = w2 + tokens.to(tl.int64)[:, None] * stride_w2 + ranks[None, :]
            w2_mask = known[:, None] & in_rank[None, :]
            if BLOCK_B == 1:
                weight = tl.load(place, mask=w2_mask, other=0, eviction_policy="evict_first").to(tl.float32)
                scores += tl.sum(weight * embedding.to(tl.float32), axis=1)[None, :]
            else:
                weight = tl.load(place, mask=w2_mask, other=0)
                scores += tl.dot(embedding, tl.trans(weight), input_precision=PRECISION)
        if WRITE:
            tl.store(logits + columns * stride_logits + tokens[None, :], scores, mask=mask)
        if NOISY:
            quads = first // 4 + tl.arange(0, BLOCK_V // 4)
            noise = exponential(key, rows[:, None], offset, DRAFT, quads[None, :])
            scores = tl.where(heat > 0, scores / tl.where(heat > 0, heat, 1.0) - tl.log(noise), scores)
        top, top_token = first_maximum(scores, tokens[None, :], 1)
        choice = tl.where((top > best) | (tile == 0), top_token, choice)
        best = tl.maximum(top, best)
    part = rows * tl.num_programs(0) + tl.program_id(0)
    tl.store(best_scores + part, best, mask=in_batch)
    tl.store(best_tokens + part, choice, mask=in_batch)


@triton.jit
def _choose(best_scores, best_tokens, chosen, num_parts, vocabulary_size, BLOCK: tl.constexpr):
    """One program: the best part of one row."""
    row, parts = tl.program_id(0), tl.arange(0, BLOCK)
    mask = parts < num_parts
    scores = tl.load(best_scores + row * num_parts + parts, mask=mask, other=float("-inf"))
    tokens = tl.load(best_tokens + row * num_parts + parts, mask=mask, other=2147483647)
    _, token = first_maximum(scores, tokens, 0)
    tl.store(chosen + row, tl.minimum(token, vocabulary_size - 1).to(tl.int64))  # a valid id also among NaN


def _tiles(num_rows: int, vocabulary_size: int, block_r: int, noisy: bool) -> tuple[int, int]:
    """BLOCK_V and the tiles of a program.

    Longer runs pay only when the rows' embeddings are read for them and no noise fills the registers.
    """
    room = max(16, 16384 // block_r)
    if num_rows == 1:
        return min(32, room), 1
    if noisy:
        return min(64, room), 1
    block_v = min(32, room)
    return block_v, triton.cdiv(triton.cdiv(vocabulary_size, block_v), 528)


def markov_step(
    prev: torch.Tensor,
    w1: torch.Tensor | None,
    w2: torch.Tensor | None,
    base: torch.Tensor,
    *,
    noise: tuple[torch.Tensor, int] | None = None,
    temperature: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_dspark.kernels.markov_step`."""
    num_rows, vocabulary_size = base.shape
    has_head = w1 is not None and w2 is not None
    write = has_head or out is not None or base.dtype != torch.float32
    logits = base if not write else torch.empty(base.shape, device=base.device) if out is None else out
    w1, w2 = (w1, w2) if w1 is not None and w2 is not None else (base, base)  # stand-ins are not read
    seed, offset = (base, 0) if noise is None else noise
    rank = w2.shape[1] if has_head else 1
    block_r = max(16, triton.next_power_of_2(rank))
    noisy = noise is not None and temperature is not None
    block_v, tiles = _tiles(num_rows, vocabulary_size, block_r, noisy)
    num_parts = triton.cdiv(vocabulary_size, block_v * tiles)
    best_scores = torch.empty(num_rows, num_parts, device=base.device)
    best_tokens = torch.empty(num_rows, num_parts, dtype=torch.int32, device=base.device)
    chosen = torch.empty(num_rows, dtype=torch.long, device=base.device)
    _step[(num_parts,)](
        prev, w1, w2, base, base if temperature is None else temperature, seed, logits, best_scores, best_tokens,
        num_rows, vocabulary_size, w1.shape[0],
        prev.stride(0), w1.stride(0), w2.stride(0), base.stride(0), logits.stride(0), offset,
        RANK=rank, HAS_HEAD=has_head, WRITE=write, NOISY=noisy, TILES=tiles,
        BLOCK_B=1 if num_rows == 1 else max(16, triton.next_power_of_2(num_rows)), BLOCK_V=block_v, BLOCK_R=block_r,
        PRECISION="ieee" if w2.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3,
    )  # fmt: skip
    _choose[(num_rows,)](
        best_scores, best_tokens, chosen, num_parts, vocabulary_size,
        BLOCK=triton.next_power_of_2(num_parts), num_warps=8,
    )  # fmt: skip
    return chosen, logits
