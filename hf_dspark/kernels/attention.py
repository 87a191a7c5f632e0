"""Attention of a few new tokens per row over a cache of rows with their own lengths (flash-decoding).

All tokens and query heads that share a KV head sit in one tile, so keys and values are read once and never expanded.
The visible range of a row is dealt out to parts, tile by tile. A second kernel, launched before the first one ends,
merges them. The last program to finish could do that too, but alone it reads all parts more slowly than many programs
do (one row of 1024 slots on an H200: 8.7 µs in one launch, 6.7 µs in two).
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

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


@triton.jit(do_not_specialize=["num_tokens", "size", "blocks"])
def _attend(
    query, keys, values, row_starts, limits, origins, out, partial, statistics,
    stride_qt, stride_qh, stride_kr, stride_kh, stride_ks, stride_vr, stride_vh, stride_vs, stride_ot, stride_oh,
    num_tokens, size, blocks, scale, softcap,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr, LINES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a part of one row's context for one KV head and up to BLOCK_M (token, head) pairs."""
    part = tl.program_id(0)
    kv_head, block = tl.program_id(1) // blocks, tl.program_id(1) % blocks
    row = tl.program_id(2).to(tl.int64)
    dims, inner = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    in_head = dims < HEAD_DIM
    step_k, step_v = tl.cast(stride_ks, tl.int64), tl.cast(stride_vs, tl.int64)
    key_row = keys + row * stride_kr + kv_head.to(tl.int64) * stride_kh
    value_row = values + row * stride_vr + kv_head.to(tl.int64) * stride_vh
    if PDL:
        if LINES > 0:  # where a part begins is known before the row's length
            slots = tl.minimum(part * BLOCK_N + inner, size - 1)
            _prefetch(key_row + slots * step_k, HEAD_DIM, LINES)
            _prefetch(value_row + slots * step_v, HEAD_DIM, LINES)
        tl_cuda.gdc_wait()

    start, stop = tl.load(row_starts + row), tl.load(row_starts + row + 1)
    pairs = block * BLOCK_M + tl.arange(0, BLOCK_M)
    active = pairs < (stop - start) * GROUP
    tokens = (start + pairs // GROUP).to(tl.int64)
    heads = kv_head * GROUP + pairs % GROUP
    limit = tl.load(limits + tokens, mask=active, other=-1)
    mask = active[:, None] & in_head[None, :]
    q = tl.load(query + tokens[:, None] * stride_qt + heads[:, None] * stride_qh + dims[None, :], mask=mask, other=0)

    if SPLITS == 1:  # noqa: SIM102 (compile-time); nobody else writes the padded tokens
        if (row == tl.num_programs(2) - 1) & (block == 0):
            place = out + stop.to(tl.int64) * stride_ot + kv_head * GROUP * stride_oh + dims
            for _ in range(stop, num_tokens):
                for g in tl.static_range(GROUP):
                    tl.store(place + g * stride_oh, tl.zeros([BLOCK_D], out.dtype.element_ty), mask=in_head)
                place += stride_ot
    if block * BLOCK_M >= (stop - start) * GROUP:
        return
    last = tl.max(limit, axis=0) + 1
    first, origin = 0, limit
    if WINDOW > 0:
        origin = tl.load(origins + tokens, mask=active, other=2147483647)
        first = tl.maximum(tl.min(origin, axis=0) - WINDOW + 1, 0)
    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)  # torch.compile passes doubles
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    key_place = key_row + inner[:, None] * step_k + dims[None, :]
    value_place = value_row + inner[:, None] * step_v + dims[None, :]
    begin = first + part * BLOCK_N
    for position in range(begin, last, SPLITS * BLOCK_N):
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
            visible = visible & (slots[None, :] > origin[:, None] - WINDOW)
        scores = tl.where(visible, scores * LOG2_E, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(maximum - reference)
        total = total * shrink + tl.sum(weights, axis=1)
        result = tl.dot(weights.to(value.dtype), value, result * shrink[:, None], input_precision=PRECISION)
        maximum = new_maximum

    if PDL:
        tl_cuda.gdc_launch_dependents()
    if SPLITS > 1:
        place = (tokens * (tl.num_programs(1) // blocks * GROUP) + heads) * SPLITS + part
        tl.store(statistics + place * 2, maximum, mask=active)
        tl.store(statistics + place * 2 + 1, total, mask=active)
        tl.store(partial + place[:, None] * HEAD_DIM + dims[None, :], result, mask=mask & (begin < last))
    else:
        result = result / tl.where(total == 0, 1.0, total)[:, None]
        place = out + tokens[:, None] * stride_ot + heads[:, None] * stride_oh + dims[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _merge(
    row_starts, out, partial, statistics, stride_ot, stride_oh, num_rows, parts,
    PDL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: the parts of one token and head. Padded tokens get zeros."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims, part = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
    place = (token * tl.num_programs(1) + head) * parts + part
    exists = part < parts
    if PDL:
        tl_cuda.gdc_wait()
    maximum = tl.load(statistics + place * 2, mask=exists, other=float("-inf"))
    total = tl.load(statistics + place * 2 + 1, mask=exists, other=0.0)
    mask = exists[:, None] & (dims < HEAD_DIM)[None, :]
    result = tl.load(partial + place[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    # Nothing above waits for these: parts that saw no slot, and padded tokens, hold whatever was there before.
    valid = (total > 0) & (token < tl.load(row_starts + num_rows))
    largest = tl.max(tl.where(valid, maximum, float("-inf")), axis=0)
    weight = tl.exp2(maximum - largest)
    total = tl.sum(tl.where(valid, total * weight, 0.0), axis=0)
    result = tl.sum(tl.where(valid[:, None], result * weight[:, None], 0.0), axis=0) / tl.where(total == 0, 1.0, total)
    place = out + token * stride_ot + head * stride_oh + dims
    tl.store(place, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


class Tiles(NamedTuple):
    block_m: int  # (token, head) pairs of a program
    block_n: int  # cache slots of a step
    splits: int
    warps: int
    stages: int


@cache
def _overlaps(device: torch.device) -> bool:
    """Whether kernels of the device can be launched before those they wait for have ended."""
    return not INTERPRETED and (device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0))


def _tiles(query: torch.Tensor, keys: torch.Tensor, max_tokens_per_row: int) -> Tiles:
    num_rows, num_kv_heads, size, head_dim = keys.shape
    block_m = 64  # what the large matrix instructions take; empty pairs cost less than smaller ones gain
    wide = keys.element_size() * triton.next_power_of_2(head_dim) > 256
    block_n = 32 if wide else 64
    programs = num_rows * num_kv_heads * triton.cdiv(max_tokens_per_row * (query.shape[1] // num_kv_heads), block_m)
    # One program a processor, but parts of at least two steps.
    splits = min(max(1, _num_processors(query.device) // programs), triton.cdiv(size, 2 * block_n), 64)
    return Tiles(block_m, block_n, splits, warps=4, stages=3)


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
    origins: torch.Tensor | None = None,
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
    # torch.compile does not know the launch option.
    pdl = _overlaps(query.device) and not torch.compiler.is_compiling()
    options = {"launch_pdl": True} if pdl else {}
    block_d = max(16, triton.next_power_of_2(head_dim))
    lines = triton.next_power_of_2(triton.cdiv(head_dim * keys.element_size(), 128))
    _attend[(tiles.splits, num_kv_heads * blocks, num_rows)](
        query, keys, values, row_starts, limits, limits if origins is None else origins, out, partial, statistics,
        *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], *out.stride()[:2],
        num_tokens, size, blocks, scale, softcap or 0.0,
        GROUP=group, HEAD_DIM=head_dim, WINDOW=window or 0, CAPPED=softcap is not None,
        SPLITS=tiles.splits, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=block_d,
        PDL=pdl, LINES=lines if window is None else 0, PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps, num_stages=tiles.stages, **options,
    )  # fmt: skip
    if tiles.splits > 1:
        block_s = triton.next_power_of_2(tiles.splits)
        _merge[(num_tokens, num_heads)](
            row_starts, out, partial, statistics, *out.stride()[:2], num_rows, tiles.splits, PDL=pdl,
            HEAD_DIM=head_dim, BLOCK_S=block_s, BLOCK_D=block_d,
            num_warps=min(8, max(1, block_s * block_d // 1024)), **options,
        )  # fmt: skip
    return out
