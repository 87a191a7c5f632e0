"""Temperature, top-k, top-p and min-p over a whole vocabulary without sorting it, exact.

With d = maximum - score, a row's tokens are counted in bins of d. The counts bound masses, and so show how far from the
maximum tokens are surely kept and from where on surely removed. Those between, about a thousand of an ordinary row, are
listed and searched by bisection; of the others only number and mass are needed. Masses are sums of integers: they do
not depend on the order of summation. A row full of ties is slower, not wrong.

Where top-p cuts, follows roughly from the sums Z = sum of w and W = sum of w^2, w = exp(-d). The removed tokens weigh
(1 - p) Z and at most V w each, w of the last kept one: d <= log(V / (1 - p) Z). The kept ones weigh p Z, and their
squares at least w p Z: d >= log(p Z / W). Without top-k all bins but two lie between these distances.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .selection import (
    CUT,
    FAR,
    FIRST_ID,
    HEAD,
    KEPT,
    LISTED,
    MASS,
    MAXIMUM,
    NEAR,
    NUMBER,
    THRESHOLD,
    UNIT,
    integer_mass,
    search,
)

SPREAD = tl.constexpr(16.0)  # with top-k, half of the bins lie within this distance, the others reach to infinity
SLACK = tl.constexpr(1e-4)  # of all bounds, against rounding
OFF = tl.constexpr(1e30)  # a distance that no token reaches


class Plan(NamedTuple):
    """Tokens of a program and warps; bins of the histogram; listed tokens that the search keeps in registers."""

    part: int
    warps: int
    bins: int
    listed: int


def _plan(num_rows: int, has_k: bool) -> Plan:
    # Counting takes time in proportion to the bins, and so does searching in proportion to what a bin holds.
    return Plan(1024 if num_rows <= 8 else 2048, 4, 512 if has_k else 256, 2048)


@triton.jit
def _scores(logits, temperature, row, stride, tokens, mask):
    """Scores of one row after temperature, by the reciprocal as torch does it on CUDA; -0 becomes 0."""
    factor = tl.div_rn(1.0, tl.load(temperature + row).to(tl.float32))
    values = tl.load(logits + row * stride + tokens, mask=mask, other=float("-inf")).to(tl.float32) * factor
    return tl.where(values == 0, 0.0, values)


@triton.jit
def _partials(partials, row, which, PARTS: tl.constexpr, BLOCK_P: tl.constexpr):
    parts = tl.arange(0, BLOCK_P)
    other = float("-inf") if which == 0 else 0.0
    return tl.load(partials + (row * 4 + which) * PARTS + parts, mask=parts < PARTS, other=other)


@triton.jit
def _row_maximum(partials, row, PARTS: tl.constexpr, BLOCK_P: tl.constexpr):
    return tl.max(_partials(partials, row, 0, PARTS, BLOCK_P), axis=0)


@triton.jit
def _row_sums(partials, row, maximum, PARTS: tl.constexpr, BLOCK_P: tl.constexpr):
    """Z and W of a row."""
    factor = tl.exp(_partials(partials, row, 0, PARTS, BLOCK_P) - maximum)
    total = tl.sum(_partials(partials, row, 1, PARTS, BLOCK_P) * factor, axis=0)
    return total, tl.sum(_partials(partials, row, 2, PARTS, BLOCK_P) * factor * factor, axis=0)


@triton.jit
def _maxima(
    logits, temperature, partials, histogram, sums, stride, size,
    PARTS: tl.constexpr, SLICE: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """One program: the largest score of a slice, and its share of Z and W. The first of a row clears its counters."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = part * SLICE + tl.arange(0, SLICE)
    scores = _scores(logits, temperature, row, stride, tokens, tokens < size)
    largest = tl.max(scores, axis=0)
    likeness = tl.exp(scores - tl.where(largest == float("-inf"), 0.0, largest))
    place = partials + row * 4 * PARTS + part
    tl.store(place, largest)
    tl.store(place + PARTS, tl.sum(likeness, axis=0))
    tl.store(place + 2 * PARTS, tl.sum(likeness * likeness, axis=0))
    if part == 0:
        tl.store(histogram + row * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
        tl.store(sums + row * 8 + tl.arange(0, 8), tl.zeros([8], tl.int64))


@triton.jit
def _range(top_p, partials, row, maximum, size, PARTS: tl.constexpr, BLOCK_P: tl.constexpr, BINS: tl.constexpr):
    """Where the bins begin that are narrow, and their width."""
    total, squares = _row_sums(partials, row, maximum, PARTS, BLOCK_P)
    p = tl.load(top_p + row).to(tl.float64)
    limit = tl.maximum((1 - p).to(tl.float32), 1e-7)
    begin = tl.maximum(tl.log(tl.maximum(p.to(tl.float32), 1e-7) * total / squares), 0.0)
    return begin, tl.maximum(tl.log(size / (limit * total)) - begin, 1e-3) / (BINS - 2)


@triton.jit
def _histogram(
    logits, temperature, top_p, partials, histogram, stride, size,
    HAS_K: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr, SLICE: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """One program: counts a slice in the bins of `_edge`. Without top-k, the mass of the last bin as well."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = part * SLICE + tl.arange(0, SLICE)
    scores = _scores(logits, temperature, row, stride, tokens, tokens < size)
    maximum = _row_maximum(partials, row, PARTS, BLOCK_P)
    distance = tl.minimum(maximum - scores, 1e9)
    if HAS_K:
        bins = tl.minimum((distance / (distance + SPREAD) * BINS).to(tl.int32), BINS - 1)
    else:
        begin, width = _range(top_p, partials, row, maximum, size, PARTS, BLOCK_P, BINS)
        steps = tl.maximum((distance - begin) * (1 / width) + 1, 0.0)  # below 1: nearer than the narrow bins
        bins = tl.minimum(steps, BINS - 1.0).to(tl.int32)
        rest = tl.sum(tl.where(bins == BINS - 1, tl.exp(-distance), 0.0), axis=0)
        tl.store(partials + (row * 4 + 3) * PARTS + part, rest)
    counts = tl.histogram(bins, BINS, mask=tokens < size)
    tl.atomic_add(histogram + row * BINS + tl.arange(0, BINS), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _edge(bin, begin, width, HAS_K: tl.constexpr, BINS: tl.constexpr):
    """Lower edge of a bin as a distance; OFF for BINS."""
    edge = SPREAD * bin / tl.maximum(BINS - bin, 1) if HAS_K else tl.where(bin > 0, begin + (bin - 1) * width, 0.0)
    return tl.where(bin >= BINS, OFF, edge)


@triton.jit
def _bracket(
    histogram, top_k, top_p, partials, limits, needed, size,
    HAS_K: tl.constexpr, HAS_P: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """One program: what the counts of one row leave open.

    Bins before `first` are surely kept and bins after `last` surely removed; BINS: no filter is on. Stores two
    distances (NEAR: surely kept, FAR: surely removed), the threshold of top-p (-1: it decides nothing), the maximum,
    and k (the size: it is off).
    """
    row, bins = tl.program_id(0).to(tl.int64), tl.arange(0, BINS)
    counts = tl.load(histogram + row * BINS + bins)
    maximum = _row_maximum(partials, row, PARTS, BLOCK_P)
    begin, width = 0.0, 0.0
    if not HAS_K:
        begin, width = _range(top_p, partials, row, maximum, size, PARTS, BLOCK_P, BINS)
    near, far = tl.exp(-_edge(bins, begin, width, HAS_K, BINS)), tl.exp(-_edge(bins + 1, begin, width, HAS_K, BINS))
    k, k_bin = tl.zeros([], tl.int32) + size, tl.full([], BINS, tl.int32)
    if HAS_K:
        k = tl.load(top_k + row).to(tl.int32)
        k = tl.where(k > 0, tl.minimum(k, size), size)
        k_bin = tl.where(k < size, tl.sum((tl.cumsum(counts, axis=0) < k).to(tl.int32), axis=0), BINS)
    first, last = k_bin, k_bin
    threshold = tl.full([], -1.0, tl.float32)
    if HAS_P:
        p = tl.load(top_p + row).to(tl.float64)
        limit = (1 - p).to(tl.float32)
        upper, lower = counts * near, counts * far  # bounds of the mass of a bin
        if not HAS_K:
            rest = tl.sum(_partials(partials, row, 3, PARTS, BLOCK_P), axis=0)
            upper, lower = tl.where(bins == BINS - 1, rest, upper), tl.where(bins == BINS - 1, rest, lower)
        upper, lower = tl.where(bins <= k_bin, upper, 0.0), tl.where(bins < k_bin, lower, 0.0)
        total, _ = _row_sums(partials, row, maximum, PARTS, BLOCK_P)
        most = tl.where(k_bin < BINS, tl.sum(upper, axis=0), total)
        least = tl.where(k_bin < BINS, tl.sum(lower, axis=0), total)
        kept = tl.cumsum(lower, axis=0, reverse=True) - lower + far > limit * (1 + SLACK) * most
        p_first = tl.sum(kept.to(tl.int32), axis=0)
        through = tl.cumsum(upper, axis=0, reverse=True)
        p_last = tl.sum((through > limit * (1 - SLACK) * least).to(tl.int32), axis=0) - 1
        if (p < 1) & (p_first <= tl.minimum(last, BINS - 1)):
            threshold = limit
            first = tl.minimum(first, p_first)
            # The mass of what top-k keeps must be exact: then its last bin is searched too.
            last = tl.where(k_bin < BINS, k_bin, p_last)
    near, far = _edge(first, begin, width, HAS_K, BINS), _edge(last + 1, begin, width, HAS_K, BINS)
    tl.store(limits + row * 4 + NEAR, tl.where(first < BINS, near * (1 - SLACK), OFF))
    tl.store(limits + row * 4 + FAR, tl.where(last < BINS, far * (1 + SLACK), OFF))
    tl.store(limits + row * 4 + THRESHOLD, threshold)
    tl.store(limits + row * 4 + MAXIMUM, maximum)
    tl.store(needed + row, k)


@triton.jit
def _collect(
    logits, temperature, min_p, partials, limits, sums, listed_scores, listed_tokens, stride, stride_listed, size,
    HAS_K: tl.constexpr, HAS_P: tl.constexpr, HAS_M: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_P: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """One program: lists the open tokens of a slice, and adds up the others on either side."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    kept = tokens < size
    scores = _scores(logits, temperature, row, stride, tokens, kept)
    if HAS_K or HAS_P:
        maximum = tl.load(limits + row * 4 + MAXIMUM)
        distance = maximum - scores
        removed = kept & (distance > tl.load(limits + row * 4 + FAR))
        open_ = (kept & (distance >= tl.load(limits + row * 4 + NEAR)) & ~removed).to(tl.int32)
        kept = kept & ~removed & (open_ == 0)
        number = tl.sum(open_, axis=0)
        # Asked for here, used at the end: the answer takes as long as the sums.
        place = tl.atomic_add(sums + row * 8 + LISTED, number.to(tl.int64), mask=number > 0, sem="relaxed").to(tl.int32)
    else:
        maximum = _row_maximum(partials, row, PARTS, BLOCK_P)
    likeness = tl.exp(scores - maximum)
    masses = integer_mass(likeness)
    if HAS_P:
        both = tl.sum(tl.join(tl.where(kept, masses, 0), tl.where(removed, masses, 0)), axis=0)
        tl.atomic_add(sums + row * 8 + HEAD + tl.arange(0, 2), both, mask=both > 0, sem="relaxed")
    if HAS_K:
        known = tl.sum(kept.to(tl.int32), axis=0)
        tl.atomic_add(sums + row * 8 + NUMBER, known.to(tl.int64), mask=known > 0, sem="relaxed")
    if HAS_M or not HAS_P:  # top-p counts what min-p removes
        if HAS_M:
            kept = kept & (likeness >= tl.load(min_p + row).to(tl.float32))
        mass = tl.sum(tl.where(kept, masses, 0), axis=0)
        tl.atomic_add(sums + row * 8 + KEPT, mass, mask=mass > 0, sem="relaxed")
    if (HAS_K or HAS_P) and number > 0:
        places = place + tl.cumsum(open_, axis=0) - 1
        tl.store(listed_scores + row * stride_listed + places, scores, mask=open_ > 0)
        tl.store(listed_tokens + row * size + places, tokens, mask=open_ > 0)


@triton.jit
def _write(
    logits, temperature, min_p, partials, limits, sums, cuts, out, stride, stride_out, size,
    SEARCHED: tl.constexpr, HAS_M: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """One program: probabilities of a slice."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    kept = tokens < size
    scores = _scores(logits, temperature, row, stride, tokens, kept)
    maximum = tl.load(limits + row * 4 + MAXIMUM) if SEARCHED else _row_maximum(partials, row, PARTS, BLOCK_P)
    mass = tl.load(cuts + row * 3 + MASS) if SEARCHED else tl.load(sums + row * 8 + KEPT)
    distance, likeness = maximum - scores, tl.exp(scores - maximum)
    if SEARCHED:
        key, first_id = tl.load(cuts + row * 3 + CUT).to(tl.int32), tl.load(cuts + row * 3 + FIRST_ID)
        cut = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        kept = (scores > cut) | ((scores == cut) & (tokens >= first_id))
        near, far = tl.load(limits + row * 4 + NEAR), tl.load(limits + row * 4 + FAR)
        kept = kept & (distance <= far) | (distance < near)
    if HAS_M:
        kept = kept & (likeness >= tl.load(min_p + row).to(tl.float32))
    factor = UNIT / mass.to(tl.float32)
    tl.store(out + row * stride_out + tokens, tl.where(kept, likeness * factor, 0.0), mask=tokens < size)


def truncated_probabilities(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `hf_dspark.kernels.truncated_probabilities`."""
    num_rows, size = logits.shape
    device, stride = logits.device, logits.stride(0)
    out = torch.empty(num_rows, size, device=device) if out is None else out
    has_k, has_p, has_m = top_k is not None, top_p is not None, min_p is not None
    part, warps, bins, listed = _plan(num_rows, has_k)
    num_parts = triton.cdiv(size, part)
    partials = torch.empty(num_rows, 4, num_parts, device=device)  # per slice: maximum, Z, W, mass of the last bin
    histogram = torch.empty(num_rows, bins, dtype=torch.int32, device=device)
    limits = torch.empty(num_rows, 4, device=device)
    needed = torch.empty(num_rows, dtype=torch.int32, device=device)
    sums = torch.empty(num_rows, 8, dtype=torch.long, device=device)
    cuts = torch.empty(num_rows, 3, dtype=torch.long, device=device)
    ids = torch.empty(num_rows, size, dtype=torch.int32, device=device)  # listed; their scores lie in `out` meanwhile
    parts = {"PARTS": num_parts, "BLOCK_P": triton.next_power_of_2(num_parts)}
    slices = {"SLICE": part, "num_warps": warps}
    grid = (num_rows, num_parts)
    _maxima[grid](logits, temperature, partials, histogram, sums, stride, size, PARTS=num_parts, BINS=bins, **slices)
    if has_k or has_p:
        _histogram[grid](
            logits, temperature, top_p, partials, histogram, stride, size, HAS_K=has_k, BINS=bins, **parts, **slices
        )
        _bracket[(num_rows,)](
            histogram, top_k, top_p, partials, limits, needed, size, HAS_K=has_k, HAS_P=has_p, BINS=bins, **parts
        )
    _collect[grid](
        logits, temperature, min_p, partials, limits, sums, out, ids, stride, out.stride(0), size,
        HAS_K=has_k, HAS_P=has_p, HAS_M=has_m, **parts, **slices,
    )  # fmt: skip
    if has_k or has_p:
        search[(num_rows,)](
            min_p, limits, needed, sums, out, ids, cuts, out.stride(0), size,
            HAS_P=has_p, HAS_M=has_m, LIST=listed, num_warps=listed // 256,
        )  # fmt: skip
    _write[grid](
        logits, temperature, min_p, partials, limits, sums, cuts, out, stride, out.stride(0), size,
        SEARCHED=has_k or has_p, HAS_M=has_m, **parts, **slices,
    )  # fmt: skip
    return out
