"""Attention of a few new tokens per row over a cache of rows with their own lengths (flash-decoding).

All tokens and query heads that share a KV head sit in one tile, so keys and values are read once and never expanded.
The visible range of a row is dealt out to parts, tile by tile, as many parts as its length pays for. The last part to
finish merges them, always in the same order, so one launch does all and results are reproducible.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
INTERPRETED = triton.knobs.runtime.interpret  # knows no assembler


@triton.jit
def _prefetch(place, SIZE: tl.constexpr, LINES: tl.constexpr):
    """Ask for SIZE elements from each place on in L2, LINES times 128 bytes, without waiting for them."""
    pieces = tl.minimum(tl.arange(0, LINES) * (1024 // place.dtype.element_ty.primitive_bitwidth), SIZE - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place[:, None] + pieces[None, :]],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "size"])
def _attend(
    query, keys, values, row_starts, limits, out, partial, statistics, arrived,
    stride_qt, stride_qh, stride_kr, stride_kh, stride_ks, stride_vr, stride_vh, stride_vs, stride_ot, stride_oh,
    num_tokens, size, scale, softcap,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SPLITS: tl.constexpr,
    LEAST: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    LINES: tl.constexpr, MERGE_STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a part of one row's context for one KV head and up to BLOCK_M (token, head) pairs."""
    part = tl.program_id(0)
    kv_head, block = tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS
    row = tl.program_id(2).to(tl.int64)
    dims, inner = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    in_head = dims < HEAD_DIM
    step_k, step_v = tl.cast(stride_ks, tl.int64), tl.cast(stride_vs, tl.int64)
    key_row = keys + row * stride_kr + kv_head.to(tl.int64) * stride_kh
    value_row = values + row * stride_vr + kv_head.to(tl.int64) * stride_vh
    if LINES > 0:  # where a part begins is known before the row's length
        slots = tl.minimum(part * BLOCK_N + inner, size - 1)
        _prefetch(key_row + slots * step_k, HEAD_DIM, LINES)
        _prefetch(value_row + slots * step_v, HEAD_DIM, LINES)

    start, stop = tl.load(row_starts + row), tl.load(row_starts + row + 1)
    pairs = block * BLOCK_M + tl.arange(0, BLOCK_M)
    active = pairs < (stop - start) * GROUP
    tokens = (start + pairs // GROUP).to(tl.int64)
    heads = kv_head * GROUP + pairs % GROUP
    limit = tl.load(limits + tokens, mask=active, other=-1)
    mask = active[:, None] & in_head[None, :]
    q = tl.load(query + tokens[:, None] * stride_qt + heads[:, None] * stride_qh + dims[None, :], mask=mask, other=0)

    if (row == tl.num_programs(2) - 1) & (block == 0):  # nobody else writes the padded tokens
        for token in range(stop + part, num_tokens, SPLITS):
            place = out + tl.cast(token, tl.int64) * stride_ot + kv_head * GROUP * stride_oh + dims
            for g in tl.static_range(GROUP):
                tl.store(place + g * stride_oh, tl.zeros([BLOCK_D], out.dtype.element_ty), mask=in_head)
    if block * BLOCK_M >= (stop - start) * GROUP:
        return
    last = tl.max(limit, axis=0) + 1
    first = 0
    if WINDOW > 0:
        first = tl.maximum(tl.min(tl.where(active, limit, 2147483647), axis=0) - WINDOW + 1, 0)
    parts = tl.minimum(tl.maximum(tl.cdiv(last - first, LEAST), 1), SPLITS)
    if part >= parts:
        return

    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)  # torch.compile passes doubles
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    key_place = key_row + inner[:, None] * step_k + dims[None, :]
    value_place = value_row + inner[:, None] * step_v + dims[None, :]
    for position in range(first + part * BLOCK_N, last, parts * BLOCK_N):
        slots = position + inner
        written = (slots < last)[:, None]  # what lies behind may be anything, also NaN
        if BLOCK_D != HEAD_DIM:
            written = written & in_head[None, :]
        key = tl.load(key_place + position * step_k, mask=written, other=0)
        value = tl.load(value_place + position * step_v, mask=written, other=0)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale
        if CAPPED:
            scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))  # softcap · tanh(scores / softcap)
        visible = slots[None, :] <= limit[:, None]
        if WINDOW > 0:
            visible = visible & (slots[None, :] > limit[:, None] - WINDOW)
        scores = tl.where(visible, scores * LOG2_E, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(maximum - reference)
        total = total * shrink + tl.sum(weights, axis=1)
        result = tl.dot(weights.to(value.dtype), value, result * shrink[:, None], input_precision=PRECISION)
        maximum = new_maximum

    if SPLITS > 1:  # noqa: SIM102 (compile-time)
        if parts > 1:
            # [token, head, part, dim]
            place = (tokens * (tl.num_programs(1) // BLOCKS * GROUP) + heads) * SPLITS
            tl.store(statistics + (place + part) * 2, maximum, mask=active)
            tl.store(statistics + (place + part) * 2 + 1, total, mask=active)
            tl.store(partial + (place + part)[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)
            tl.debug_barrier()  # all threads have stored before one of them says so
            group = row * tl.num_programs(1) + tl.program_id(1)
            if tl.atomic_add(arrived + group, 1, sem="acq_rel") < parts - 1:
                return
            tl.debug_barrier()
            tl.store(arrived + group, 0)
            maximum, total, result = _merge(
                partial, statistics, place, parts, active, mask, HEAD_DIM, BLOCK_M, BLOCK_D, MERGE_STAGES
            )
    result = result / tl.where(total == 0, 1.0, total)[:, None]
    place = out + tokens[:, None] * stride_ot + heads[:, None] * stride_oh + dims[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _merge(
    partial, statistics, place, parts, active, mask,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Softmax state and sum of all parts, in their order."""
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    partial += place[:, None] * HEAD_DIM + tl.arange(0, BLOCK_D)[None, :]
    statistics += place * 2
    for i in tl.range(0, parts, num_stages=STAGES):
        its_maximum = tl.load(statistics + i * 2, mask=active, other=float("-inf"))
        its_total = tl.load(statistics + i * 2 + 1, mask=active, other=0.0)
        its_result = tl.load(partial + i * HEAD_DIM, mask=mask, other=0.0)
        new_maximum = tl.maximum(maximum, its_maximum)
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        shrink, weight = tl.exp2(maximum - reference), tl.exp2(its_maximum - reference)
        total = total * shrink + its_total * weight
        result = result * shrink[:, None] + its_result * weight[:, None]
        maximum = new_maximum
    return maximum, total, result


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


class Tiles(NamedTuple):
    block_m: int  # (token, head) pairs of a program
    block_n: int  # cache slots of a step
    splits: int  # parts of a row at most
    least: int  # slots that a part is worth
    warps: int
    stages: int
    prefetch: bool = True


MAX_GROUPS = 4096  # of programs that share rows and heads; more than these need no parts


def _tiles(query: torch.Tensor, keys: torch.Tensor, max_tokens_per_row: int) -> Tiles:
    num_rows, num_kv_heads, size, head_dim = keys.shape
    pairs = max_tokens_per_row * (query.shape[1] // num_kv_heads)
    block_m = min(max(16, triton.next_power_of_2(pairs)), 64)
    groups = num_rows * num_kv_heads * triton.cdiv(pairs, block_m)
    wide = keys.element_size() * triton.next_power_of_2(head_dim) > 256
    block_n, least = 32 if wide else 64, 128
    splits = max(1, min(2 * _num_processors(query.device) // groups, triton.cdiv(size, least), 16))
    return Tiles(block_m, block_n, splits, least, warps=4, stages=3)


@cache  # torch.compile looks through it and makes zeros for every call
def _counters(device: torch.device) -> torch.Tensor:
    """Zeros that every call leaves behind as zeros. One set per device: calls must follow each other."""
    if device.type == "cuda" and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "The first attention on a device cannot be captured. Call `ragged_attention` once before the capture."
        )
    return torch.zeros(MAX_GROUPS, dtype=torch.int32, device=device)


def attention_workspace(query: torch.Tensor, keys: torch.Tensor, max_tokens_per_row: int) -> torch.Tensor:
    """See `hf_dspark.kernels.attention_workspace`."""
    splits = _tiles(query, keys, max_tokens_per_row).splits
    size = 0 if splits == 1 else query.shape[0] * query.shape[1] * splits * (query.shape[2] + 2)
    return torch.empty(size, dtype=torch.float32, device=query.device)


def ragged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    row_starts: torch.Tensor,
    limits: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    max_tokens_per_row: int,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `hf_dspark.kernels.ragged_attention`."""
    num_tokens, num_heads, head_dim = query.shape
    num_rows, num_kv_heads, size = keys.shape[:3]
    out = torch.empty_like(query) if out is None else out
    if num_tokens == 0:
        return out
    tiles = _tiles(query, keys, max_tokens_per_row)
    group = num_heads // num_kv_heads
    blocks = triton.cdiv(max_tokens_per_row * group, tiles.block_m)
    workspace = attention_workspace(query, keys, max_tokens_per_row) if workspace is None else workspace
    parts = num_tokens * num_heads * tiles.splits
    partial, statistics = workspace[: parts * head_dim], workspace[parts * head_dim :]
    assert tiles.splits == 1 or num_rows * num_kv_heads * blocks <= MAX_GROUPS
    block_d = max(16, triton.next_power_of_2(head_dim))
    lines = triton.next_power_of_2(triton.cdiv(head_dim * keys.element_size(), 128))
    _attend[(tiles.splits, num_kv_heads * blocks, num_rows)](
        query, keys, values, row_starts, limits, out, partial, statistics, _counters(query.device),
        *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], *out.stride()[:2],
        num_tokens, size, scale, softcap or 0.0,
        GROUP=group, HEAD_DIM=head_dim, WINDOW=window or 0, CAPPED=softcap is not None,
        SPLITS=tiles.splits, LEAST=tiles.least, BLOCKS=blocks,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=block_d,
        LINES=lines if tiles.prefetch and window is None and not INTERPRETED else 0,
        MERGE_STAGES=max(1, min(4, 2**16 // (tiles.block_m * block_d * 4))),
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out
