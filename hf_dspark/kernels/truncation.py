"""Temperature, top-k, top-p and min-p over a whole vocabulary without sorting it, exact.

With d = maximum - score, a row's tokens are counted in bins of d. The counts bound masses, and so show how far from the
maximum tokens are surely kept and from where on surely removed. Those between, a few thousand of an ordinary row at
most, are listed and searched by bisection; of the others only number and mass are needed. Masses are sums of integers:
they do not depend on the order of summation. A row full of ties is slower, not wrong.
"""

import torch
import triton
import triton.language as tl

FEW_BINS, MANY_BINS = tl.constexpr(512), tl.constexpr(4096)
SPREAD = tl.constexpr(32.0)  # half of the bins lie within this distance of the maximum, the others reach to infinity
SLACK = tl.constexpr(1e-3)  # of all bounds, against rounding
UNIT = tl.constexpr(17592186044416.0)  # 2^44: masses of up to 2^18 tokens fit an int64
ABSENT = tl.constexpr(-2147483648)  # a key below all others
OFF = tl.constexpr(1e30)  # a distance that no token reaches
NUMBER, HEAD, TAIL, LISTED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # columns of `sums`
CUT, FIRST_ID, MASS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # columns of `cuts`


@triton.jit
def _scores(logits, temperature, row, stride, tokens, mask):
    """Scores of one row after temperature, by the reciprocal as torch does it on CUDA; -0 becomes 0."""
    factor = tl.div_rn(1.0, tl.load(temperature + row).to(tl.float32))
    values = tl.load(logits + row * stride + tokens, mask=mask, other=float("-inf")).to(tl.float32) * factor
    return tl.where(values == 0, 0.0, values)


@triton.jit
def _mass(scores, maximum):
    return (tl.exp(scores - maximum) * UNIT).to(tl.int64)


@triton.jit
def _row_maximum(maxima, row, PARTS: tl.constexpr, BLOCK_P: tl.constexpr):
    parts = tl.arange(0, BLOCK_P)
    return tl.max(tl.load(maxima + row * PARTS + parts, mask=parts < PARTS, other=float("-inf")), axis=0)


@triton.jit
def _maxima(
    logits, temperature, maxima, histogram, sums, stride, size,
    PARTS: tl.constexpr, SLICE: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """One program: the largest score of a slice. The first of a row clears its counters."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = part * SLICE + tl.arange(0, SLICE)
    scores = _scores(logits, temperature, row, stride, tokens, tokens < size)
    tl.store(maxima + row * PARTS + part, tl.max(scores, axis=0))
    if part == 0:
        tl.store(histogram + row * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
        tl.store(sums + row * 4 + tl.arange(0, 4), tl.zeros([4], tl.int64))


@triton.jit
def _histogram(
    logits, temperature, maxima, histogram, stride, size,
    PARTS: tl.constexpr, BLOCK_P: tl.constexpr, SLICE: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """One program: counts a slice. Bin b holds the distances with d / (d + SPREAD) in [b, b + 1) / BINS."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    scores = _scores(logits, temperature, row, stride, tokens, tokens < size)
    distance = tl.minimum(_row_maximum(maxima, row, PARTS, BLOCK_P) - scores, 1e9)
    bins = tl.minimum((distance / (distance + SPREAD) * BINS).to(tl.int32), BINS - 1)
    if BINS > FEW_BINS:
        tl.atomic_add(histogram + row * BINS + bins, tl.full([SLICE], 1, tl.int32), mask=tokens < size, sem="relaxed")
    else:
        counts = tl.histogram(bins, BINS, mask=tokens < size)
        tl.atomic_add(histogram + row * BINS + tl.arange(0, BINS), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _edge(bin, BINS: tl.constexpr):
    """Lower edge of a bin as a distance; OFF for BINS."""
    return tl.where(bin >= BINS, OFF, SPREAD * bin / tl.maximum(BINS - bin, 1))


@triton.jit
def _bracket(
    histogram, top_k, top_p, min_p, limits, needed, size,
    HAS_K: tl.constexpr, HAS_P: tl.constexpr, HAS_M: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """One program: what the counts of one row leave open.

    For each filter, bins before `_first` are surely kept and bins after `_last` surely removed; BINS: it is off.
    Stores two distances (nearer: surely kept, farther: surely removed), the threshold of top-p (-1: it decides nothing)
    and k (the size: it is off).
    """
    row, bins = tl.program_id(0).to(tl.int64), tl.arange(0, BINS)
    counts = tl.load(histogram + row * BINS + bins)
    near, far = tl.exp(-_edge(bins, BINS)), tl.exp(-_edge(bins + 1, BINS))  # bounds of a token's mass
    off = tl.full([], BINS, tl.int32)
    k, k_bin, m_first, m_last = off * 0 + size, off, off, off
    if HAS_K:
        k = tl.load(top_k + row).to(tl.int32)
        k = tl.where(k > 0, tl.minimum(k, size), size)
        k_bin = tl.where(k < size, tl.sum((tl.cumsum(counts, axis=0) < k).to(tl.int32), axis=0), BINS)
    if HAS_M:
        floor = tl.load(min_p + row).to(tl.float32)
        m_first = tl.where(floor > 0, tl.sum((far > floor * (1 + SLACK)).to(tl.int32), axis=0), BINS)
        m_last = tl.where(floor > 0, tl.sum((near > floor * (1 - SLACK)).to(tl.int32), axis=0) - 1, BINS)
    first, last = tl.minimum(k_bin, m_first), tl.minimum(k_bin, m_last)
    threshold = tl.full([], -1.0, tl.float32)
    if HAS_P:
        p = tl.load(top_p + row).to(tl.float64)
        limit = (1 - p).to(tl.float32)
        upper = tl.where(bins <= k_bin, counts * near, 0.0)
        lower = tl.where(bins < k_bin, counts * far, 0.0)
        below = tl.cumsum(lower, axis=0, reverse=True) - lower
        kept = below + far > limit * (1 + SLACK) * tl.sum(upper, axis=0)
        p_first = tl.sum(kept.to(tl.int32), axis=0)
        through = tl.cumsum(upper, axis=0, reverse=True)
        p_last = tl.sum((through > limit * (1 - SLACK) * tl.sum(lower, axis=0)).to(tl.int32), axis=0) - 1
        if (p < 1) & (p_first <= tl.minimum(last, BINS - 1)):
            threshold = limit
            first = tl.minimum(first, p_first)
            # The mass of what top-k keeps must be exact: then its last bin is searched too.
            last = tl.where(k_bin < BINS, k_bin, tl.minimum(last, p_last))
    tl.store(limits + row * 3, tl.where(first < BINS, _edge(first, BINS) * (1 - SLACK), OFF))
    tl.store(limits + row * 3 + 1, tl.where(last < BINS, _edge(last + 1, BINS) * (1 + SLACK), OFF))
    tl.store(limits + row * 3 + 2, threshold)
    tl.store(needed + row, k)


@triton.jit
def _collect(
    logits, temperature, maxima, limits, sums, listed_scores, listed_tokens, stride, stride_listed, size,
    PARTS: tl.constexpr, BLOCK_P: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """One program: lists the open tokens of a slice, and adds up the others on either side."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    known = tokens < size
    scores = _scores(logits, temperature, row, stride, tokens, known)
    maximum = _row_maximum(maxima, row, PARTS, BLOCK_P)
    distance, masses = maximum - scores, _mass(scores, maximum)
    kept = known & (distance < tl.load(limits + row * 3))
    removed = known & (distance > tl.load(limits + row * 3 + 1)) & ~kept
    number = tl.sum(kept.to(tl.int32), axis=0)
    if number > 0:
        tl.atomic_add(sums + row * 4 + NUMBER, number.to(tl.int64), sem="relaxed")
        tl.atomic_add(sums + row * 4 + HEAD, tl.sum(tl.where(kept, masses, 0), axis=0), sem="relaxed")
    tail = tl.sum(tl.where(removed, masses, 0), axis=0)
    if tail > 0:
        tl.atomic_add(sums + row * 4 + TAIL, tail, sem="relaxed")
    open_ = (known & ~kept & ~removed).to(tl.int32)
    number = tl.sum(open_, axis=0)
    if number > 0:
        place = tl.atomic_add(sums + row * 4 + LISTED, number.to(tl.int64), sem="relaxed")
        place += tl.cumsum(open_, axis=0) - 1
        tl.store(listed_scores + row * stride_listed + place, scores, mask=open_ > 0)
        tl.store(listed_tokens + row * size + place, tokens, mask=open_ > 0)


@triton.jit
def _chunk(source, floor, start, LIST: tl.constexpr):
    """Ids, keys (integers in the order of the scores) and masses of LIST listed tokens.

    Absent ones have a key below all others, and no mass; neither have tokens less likely than `floor`.
    """
    listed_scores, listed_tokens, count, maximum = source
    places = start + tl.arange(0, LIST)
    mask = places < count
    tokens = tl.load(listed_tokens + places, mask=mask, other=0)
    scores = tl.load(listed_scores + places, mask=mask, other=float("-inf"))
    bits = scores.to(tl.int32, bitcast=True)
    keys = tl.where(mask, bits ^ ((bits >> 31) & 0x7FFFFFFF), ABSENT)
    return tokens, keys, tl.where(mask & (tl.exp(scores - maximum) >= floor), _mass(scores, maximum), 0)


@triton.jit
def _inside(chunk, low, high, first_id):
    tokens, keys, masses = chunk
    inside = (keys >= low) & (keys <= high) & ((keys > low) | (tokens >= first_id))
    return tl.sum(inside.to(tl.int32), axis=0), tl.sum(tl.where(inside, masses, 0), axis=0)


@triton.jit
def _tally(chunk, source, low, high, first_id, floor, LIST: tl.constexpr):
    """Number and mass of the listed tokens with low <= key <= high, those at `low` from `first_id` on."""
    number, mass = _inside(chunk, low, high, first_id)
    for start in range(LIST, source[2], LIST):  # rare: the first LIST tokens stay in registers
        more_number, more_mass = _inside(_chunk(source, floor, start, LIST), low, high, first_id)
        number += more_number
        mass += more_mass
    return number, mass


@triton.jit
def _exceeds(mass, total, threshold):
    """Whether a cumulative share, rounded to float32 like the warper's, exceeds the threshold."""
    return (mass.to(tl.float64) / total.to(tl.float64)).to(tl.float32) > threshold


@triton.jit
def _kth_key(chunk, source, low, high, k, LIST: tl.constexpr):
    """The largest key with at least k tokens from it on."""
    top = high
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, without overflow
        enough = _tally(chunk, source, middle, top, 0, 0.0, LIST)[0] >= k
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _top_p_key(chunk, source, low, high, below, total, threshold, LIST: tl.constexpr):
    """The smallest key whose ascending cumulative share exceeds the threshold; `high` if none below it does."""
    bottom = low
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)  # rounded down
        over = _exceeds(below + _tally(chunk, source, bottom, middle, 0, 0.0, LIST)[1], total, threshold)
        low, high = tl.where(over, low, middle + 1), tl.where(over, middle, high)
    return low


@triton.jit
def _first_kept_id(chunk, source, cut, ties, each, below, total, threshold, size, LIST: tl.constexpr):
    """Of ties at the cut, those with the lowest ids go, as many as the cumulative share allows, but not all."""
    gone, high = ties * 0, tl.where(threshold >= 0, ties - 1, 0)
    while gone < high:
        middle = (gone + high + 1) // 2
        stays = _exceeds(below + middle * each, total, threshold)
        gone, high = tl.where(stays, gone, middle), tl.where(stays, middle - 1, high)
    first_id, high = gone * 0, tl.where(gone > 0, size, 0)
    while first_id < high:
        middle = (first_id + high) // 2
        enough = ties - _tally(chunk, source, cut, cut, middle, 0.0, LIST)[0] >= gone
        first_id, high = tl.where(enough, first_id, middle + 1), tl.where(enough, middle, high)
    return first_id


@triton.jit
def _search(
    min_p, maxima, limits, needed, sums, listed_scores, listed_tokens, cuts, stride, size,
    HAS_M: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """One program: the exact cut of one row by bisection over its open tokens.

    Stores the key of the lowest kept score, the lowest kept id among its ties, and the mass of all kept tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    head, tail = tl.load(sums + row * 4 + HEAD), tl.load(sums + row * 4 + TAIL)
    count, k = tl.load(sums + row * 4 + LISTED), tl.load(needed + row)
    threshold = tl.load(limits + row * 3 + 2)
    source = (
        listed_scores + row * stride, listed_tokens + row * size, count, _row_maximum(maxima, row, PARTS, BLOCK_P)
    )  # fmt: skip
    chunk = _chunk(source, 0.0, 0, LIST)
    bottom, top = tl.min(tl.where(chunk[1] == ABSENT, 2147483647, chunk[1]), axis=0), tl.max(chunk[1], axis=0)
    for start in range(LIST, count, LIST):
        more = _chunk(source, 0.0, start, LIST)
        bottom = tl.minimum(bottom, tl.min(tl.where(more[1] == ABSENT, 2147483647, more[1]), axis=0))
        top = tl.maximum(top, tl.max(more[1], axis=0))

    open_k = k - tl.load(sums + row * 4 + NUMBER)
    kth = _kth_key(chunk, source, bottom, tl.where(open_k < count, top, bottom), open_k, LIST)
    below = tl.where(k == size, tail, 0)  # what top-k has removed is no part of the distribution top-p sees
    total = tl.maximum(head + below + _tally(chunk, source, kth, top, 0, 0.0, LIST)[1], 1)
    high = tl.where(threshold >= 0, top + 1, kth)
    cut = _top_p_key(chunk, source, kth, high, below, total, threshold, LIST)
    cut = tl.where((cut > top) & (head == 0), top, cut)  # the likeliest token always stays
    ties, mass = _tally(chunk, source, cut, cut, 0, 0.0, LIST)
    below += _tally(chunk, source, kth, cut - 1, 0, 0.0, LIST)[1]
    each = mass // tl.maximum(ties, 1)
    first_id = _first_kept_id(chunk, source, cut, ties, each, below, total, threshold, size, LIST)
    floor = 0.0
    if HAS_M:
        floor = tl.load(min_p + row).to(tl.float32)
        chunk = _chunk(source, floor, 0, LIST)
    tl.store(cuts + row * 3 + CUT, cut.to(tl.int64))
    tl.store(cuts + row * 3 + FIRST_ID, first_id.to(tl.int64))
    tl.store(cuts + row * 3 + MASS, head + _tally(chunk, source, cut, top, first_id, floor, LIST)[1])


@triton.jit
def _write(
    logits, temperature, min_p, maxima, limits, cuts, out, stride, stride_out, size,
    HAS_M: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """One program: probabilities of a slice."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    known = tokens < size
    scores = _scores(logits, temperature, row, stride, tokens, known)
    maximum = _row_maximum(maxima, row, PARTS, BLOCK_P)
    key, first_id = tl.load(cuts + row * 3 + CUT).to(tl.int32), tl.load(cuts + row * 3 + FIRST_ID)
    cut = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    distance, likeness = maximum - scores, tl.exp(scores - maximum)
    kept = (scores > cut) | ((scores == cut) & (tokens >= first_id))
    kept = kept & (distance <= tl.load(limits + row * 3 + 1)) | (distance < tl.load(limits + row * 3))
    if HAS_M:
        kept = kept & (likeness >= tl.load(min_p + row).to(tl.float32))
    factor = UNIT / tl.load(cuts + row * 3 + MASS).to(tl.float32)
    tl.store(out + row * stride_out + tokens, tl.where(kept, likeness * factor, 0.0), mask=known)


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
    # Top-k leaves few tokens, whatever the bins. Top-p alone may cut among a hundred thousand: then fine bins are worth
    # an atomic addition per token.
    bins, part = (FEW_BINS.value, 2048) if has_k else (MANY_BINS.value, 1024)
    num_parts = triton.cdiv(size, part)
    maxima = torch.empty(num_rows, num_parts, device=device)
    histogram = torch.empty(num_rows, bins, dtype=torch.int32, device=device)
    limits = torch.empty(num_rows, 3, device=device)
    needed = torch.empty(num_rows, dtype=torch.int32, device=device)
    sums = torch.empty(num_rows, 4, dtype=torch.long, device=device)
    cuts = torch.empty(num_rows, 3, dtype=torch.long, device=device)
    listed = torch.empty(num_rows, size, dtype=torch.int32, device=device)  # ids; their scores lie in `out` meanwhile
    grid = (num_rows, num_parts)
    parts = {"PARTS": num_parts, "BLOCK_P": triton.next_power_of_2(num_parts)}
    _maxima[grid](logits, temperature, maxima, histogram, sums, stride, size, PARTS=num_parts, SLICE=part, BINS=bins)
    _histogram[grid](logits, temperature, maxima, histogram, stride, size, **parts, SLICE=part, BINS=bins)
    _bracket[(num_rows,)](
        histogram, top_k, top_p, min_p, limits, needed, size,
        HAS_K=has_k, HAS_P=has_p, HAS_M=has_m, BINS=bins, num_warps=8,
    )  # fmt: skip
    _collect[grid](
        logits, temperature, maxima, limits, sums, out, listed, stride, out.stride(0), size, **parts, SLICE=part
    )
    _search[(num_rows,)](
        min_p, maxima, limits, needed, sums, out, listed, cuts, out.stride(0), size,
        HAS_M=has_m, **parts, LIST=2048, num_warps=8,
    )  # fmt: skip
    _write[grid](
        logits, temperature, min_p, maxima, limits, cuts, out, stride, out.stride(0), size,
        HAS_M=has_m, **parts, SLICE=part,
    )  # fmt: skip
    return out
