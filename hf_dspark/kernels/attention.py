"""Attention of a few new tokens per row over a cache of rows with their own lengths (flash-decoding).

All tokens and query heads that share a KV head sit in one tile, so keys and values are read once and never expanded.
The visible range of a row is cut into parts of equal length; a second kernel merges them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_tokens"])
def _attend(
    query, keys, values, row_starts, limits, out, partial, statistics,
    stride_qt, stride_qh, stride_kr, stride_kh, stride_ks, stride_vr, stride_vh, stride_vs, stride_ot, stride_oh,
    num_tokens, scale, softcap,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a part of one row's context for one KV head and up to BLOCK_M (token, head) pairs."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    kv_head, block = tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS
    row = tl.program_id(2).to(tl.int64)
    start, stop = tl.load(row_starts + row), tl.load(row_starts + row + 1)
    dims = tl.arange(0, BLOCK_D)
    in_head = dims < HEAD_DIM
    num_heads = tl.num_programs(1) // BLOCKS * GROUP

    if not SPLIT:  # noqa: SIM102 (compile-time); nobody else writes the padded tokens
        if (row == tl.num_programs(2) - 1) & (block == 0):
            place = out + stop.to(tl.int64) * stride_ot + kv_head * GROUP * stride_oh + dims
            for _ in range(stop, num_tokens):
                for g in tl.static_range(GROUP):
                    tl.store(place + g * stride_oh, tl.zeros([BLOCK_D], out.dtype.element_ty), mask=in_head)
                place += stride_ot
    if block * BLOCK_M >= (stop - start) * GROUP:
        return

    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)  # torch.compile passes doubles
    pairs = block * BLOCK_M + tl.arange(0, BLOCK_M)
    active = pairs < (stop - start) * GROUP
    tokens = (start + pairs // GROUP).to(tl.int64)
    heads = kv_head * GROUP + pairs % GROUP
    limit = tl.load(limits + tokens, mask=active, other=-1)
    q_mask = active[:, None] & in_head[None, :]
    q = tl.load(query + tokens[:, None] * stride_qt + heads[:, None] * stride_qh + dims[None, :], mask=q_mask, other=0)

    last = tl.max(limit, axis=0) + 1
    first = 0
    if WINDOW > 0:
        first = tl.maximum(tl.min(tl.where(active, limit, 2147483647), axis=0) - WINDOW + 1, 0)
    length = tl.cdiv(tl.cdiv(last - first, parts), BLOCK_N) * BLOCK_N
    begin = first + part * length
    end = tl.minimum(begin + length, last)

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    key_row = keys + row * stride_kr + kv_head.to(tl.int64) * stride_kh
    value_row = values + row * stride_vr + kv_head.to(tl.int64) * stride_vh
    for position in range(begin, end, BLOCK_N):
        slots = position + tl.arange(0, BLOCK_N)
        written = (slots < end)[:, None]  # what lies behind may be anything, also NaN
        if BLOCK_D != HEAD_DIM:
            written = written & in_head[None, :]
        slot = slots.to(tl.int64)[:, None]
        key = tl.load(key_row + slot * stride_ks + dims[None, :], mask=written, other=0)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale
        if CAPPED:
            scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))  # softcap · tanh(scores / softcap)
        visible = (slots[None, :] <= limit[:, None]) & (slots < end)[None, :]
        if WINDOW > 0:
            visible = visible & (slots[None, :] > limit[:, None] - WINDOW)
        scores = tl.where(visible, scores * LOG2_E, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(maximum - reference)
        total = total * shrink + tl.sum(weights, axis=1)
        value = tl.load(value_row + slot * stride_vs + dims[None, :], mask=written, other=0)
        result = result * shrink[:, None]
        result = tl.dot(weights.to(value.dtype), value, result, input_precision=PRECISION)
        maximum = new_maximum

    if SPLIT:
        place = (tokens * num_heads + heads) * parts + part
        tl.store(statistics + place * 2, maximum, mask=active)
        tl.store(statistics + place * 2 + 1, total, mask=active)
        tl.store(partial + place[:, None] * HEAD_DIM + dims[None, :], result, mask=q_mask & (begin < end))
    else:
        result = result / tl.where(total == 0, 1.0, total)[:, None]
        place = out + tokens[:, None] * stride_ot + heads[:, None] * stride_oh + dims[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=q_mask)


@triton.jit
def _merge(
    row_starts, out, partial, statistics, stride_ot, stride_oh, num_rows, parts,
    HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: the parts of one token and head. Padded tokens get zeros."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims, part = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
    place = (token * tl.num_programs(1) + head) * parts + part
    exists = part < parts
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
    blocks: int  # such blocks per KV head
    block_n: int  # cache slots of a step
    splits: int
    warps: int
    stages: int


def _tiles(query: torch.Tensor, keys: torch.Tensor, max_tokens_per_row: int) -> Tiles:
    num_rows, num_kv_heads, size, head_dim = keys.shape
    pairs = max_tokens_per_row * (query.shape[1] // num_kv_heads)
    block_m = min(max(16, triton.next_power_of_2(pairs)), 64)
    blocks = triton.cdiv(pairs, block_m)
    wide = keys.element_size() * triton.next_power_of_2(head_dim) > 256
    block_n = 32 if wide else 64
    programs = num_rows * num_kv_heads * blocks
    splits = max(1, _num_processors(query.device) // programs)
    if size > 512 * splits:  # parts long enough to pay for a second program per processor
        splits = max(1, 2 * _num_processors(query.device) // programs)
    splits = min(splits, triton.cdiv(size, block_n), 64)
    return Tiles(block_m, blocks, block_n, splits, warps=4, stages=3)


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
    num_rows, num_kv_heads = keys.shape[:2]
    out = torch.empty_like(query) if out is None else out
    if num_tokens == 0:
        return out
    tiles = _tiles(query, keys, max_tokens_per_row)
    splits = tiles.splits
    workspace = attention_workspace(query, keys, max_tokens_per_row) if workspace is None else workspace
    parts = num_tokens * num_heads * splits
    partial, statistics = workspace[: parts * head_dim], workspace[parts * head_dim :]
    block_d = max(16, triton.next_power_of_2(head_dim))
    _attend[(splits, num_kv_heads * tiles.blocks, num_rows)](
        query, keys, values, row_starts, limits, out, partial, statistics,
        *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], *out.stride()[:2],
        num_tokens, scale, softcap or 0.0,
        GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, WINDOW=window or 0, CAPPED=softcap is not None,
        SPLIT=splits > 1, BLOCKS=tiles.blocks, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=block_d,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if splits > 1:
        block_s = triton.next_power_of_2(splits)
        _merge[(num_tokens, num_heads)](
            row_starts, out, partial, statistics, *out.stride()[:2], num_rows, splits,
            HEAD_DIM=head_dim, BLOCK_S=block_s, BLOCK_D=block_d, num_warps=min(8, max(1, block_s * block_d // 1024)),
        )  # fmt: skip
    return out
