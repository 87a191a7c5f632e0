"""Product of a few rows with a weight matrix (decoding), bound by the stream of the weights from memory.

The weights are the large operand of the tensor cores and the rows of x their short side. A program owns some output
columns and a part of the inner dimension; the last program of a column tile to finish adds the parts, always in the
same order, so one launch does all and results are reproducible. How the inner dimension is cut depends on the weight's
shape alone: a row's result is the same bits whatever stands in the other rows and however many there are.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda


@triton.jit
def _prefetch(place, limit, GRAIN: tl.constexpr, COUNT: tl.constexpr):
    """Ask for COUNT pieces of GRAIN elements of each weight row in L2, without waiting for them."""
    pieces = tl.minimum(tl.arange(0, COUNT) * GRAIN, limit - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place[:, None] + pieces[None, :]],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _product(
    x, weight, bias, out, partial, arrived, num_tokens, num_columns, size, stride_x, stride_w, stride_out,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr, PREFETCH: tl.constexpr, GRAIN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N columns of the output for all rows, over one of SPLITS parts of the inner dimension."""
    part, tile = tl.program_id(0), tl.program_id(1)
    length = tl.cdiv(tl.cdiv(size, SPLITS), BLOCK_K) * BLOCK_K
    begin = part * length
    end = tl.minimum(begin + length, size)
    tokens, inner = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(columns, num_columns - 1).to(tl.int64)  # repeats the last row instead of a mask
    if PDL:  # the weights are nobody's output, all else waits for the kernel before
        if PREFETCH > 0:
            _prefetch(weight + rows * stride_w + begin, size - begin, GRAIN, PREFETCH)
        tl_cuda.gdc_wait()

    w_place = weight + rows[:, None] * stride_w + inner[None, :]
    x_place = x + tokens[:, None] * stride_x + inner[None, :]
    exists = tokens[:, None] < num_tokens
    result = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for k in range(begin, end, BLOCK_K):
        if EVEN:
            w = tl.load(w_place + k)
            values = tl.load(x_place + k, mask=exists, other=0)
        else:
            inside = (k + inner < size)[None, :]
            w = tl.load(w_place + k, mask=inside, other=0)
            values = tl.load(x_place + k, mask=exists & inside, other=0)
        result = tl.dot(w, tl.trans(values), result, input_precision=PRECISION)
    if PDL:  # not sooner: programs that wait among those at work would end up unevenly spread over the processors
        tl_cuda.gdc_launch_dependents()

    written = exists.reshape(1, BLOCK_T) & (columns < num_columns)[:, None]
    if SPLITS > 1:
        # [tile, part, column, token]
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + tokens[None, :]
        parts = partial + tile.to(tl.int64) * (SPLITS * BLOCK_N * BLOCK_T) + place
        tl.store(parts + part * (BLOCK_N * BLOCK_T), result, mask=written)
        tl.debug_barrier()  # all threads have stored before one of them says so
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.debug_barrier()
        tl.store(arrived + tile, 0)
        result = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for i in tl.static_range(SPLITS):
            result += tl.load(parts + i * (BLOCK_N * BLOCK_T), mask=written, other=0.0, cache_modifier=".cg")
    if HAS_BIAS:
        result += tl.load(bias + rows).to(tl.float32)[:, None]
    place = out + tokens.to(tl.int64)[None, :] * stride_out + columns[:, None]
    tl.store(place, result.to(out.dtype.element_ty), mask=written)


class Tiles(NamedTuple):
    block_n: int  # columns of a program
    block_k: int  # inner dimension of a step
    splits: int  # parts of the inner dimension
    stages: int
    warps: int


def _tiles(num_columns: int, size: int, itemsize: int) -> Tiles:
    """From the weight's shape alone, never from the rows: see the top of the file."""
    if itemsize == 4:
        return Tiles(32, 32, 1, stages=3, warps=4)
    num_tiles = triton.cdiv(num_columns, 64)
    splits = max(1, min(200 // num_tiles, size // 1024)) if num_tiles < 96 else 1
    # As many programs per processor as the grid has, with all shared memory in their pipelines (measured on an H200).
    programs = num_tiles * splits
    return Tiles(64, 128, splits, stages=5 if programs <= 132 else 4 if programs <= 264 else 3, warps=4)


LINE = 128  # bytes that one prefetch brings
MAX_TILES = 4096  # column tiles of a product in parts; those with more need none


@cache
def _counters(device: torch.device) -> torch.Tensor:
    """Zeros that every product leaves behind as zeros. One set per device: products must follow each other."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("The first product on a device cannot be captured. Call `linear` once before the capture.")
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """See `hf_dspark.kernels.linear`."""
    (num_tokens, size), num_columns = x.shape, weight.shape[0]
    out = torch.empty(num_tokens, num_columns, dtype=x.dtype, device=x.device) if out is None else out
    if num_tokens == 0:
        return out
    tiles = _tiles(num_columns, size, weight.element_size())
    num_tiles = triton.cdiv(num_columns, tiles.block_n)
    block_t = max(16, triton.next_power_of_2(num_tokens))
    partial, arrived = out, out  # stand-ins are not read
    if tiles.splits > 1:
        assert num_tiles <= MAX_TILES
        partial = torch.empty(num_tiles * tiles.splits * tiles.block_n * block_t, device=x.device)
        arrived = _counters(x.device)
    _product[(tiles.splits, num_tiles)](
        x, weight, x if bias is None else bias, out, partial, arrived,
        num_tokens, num_columns, size, x.stride(0), weight.stride(0), out.stride(0),
        HAS_BIAS=bias is not None, SPLITS=tiles.splits, EVEN=size % tiles.block_k == 0, PDL=pdl,
        PREFETCH=triton.next_power_of_2(tiles.block_k * tiles.stages * weight.element_size() // LINE),
        GRAIN=LINE // weight.element_size(),
        BLOCK_T=block_t, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k,
        PRECISION="ieee" if weight.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps, num_stages=tiles.stages, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out
