"""Temperature, top-k, top-p and min-p over a whole vocabulary without sorting it, exact.

With d = maximum - score of a row, tokens fall into bins that grow with d, so that every bin bounds the mass of its
tokens by their number. The bins show which tokens are surely kept and which surely removed; only those between, a few
hundred of an ordinary row, are listed and searched one by one. Masses are sums of integers: they do not depend on the
order of summation, so every launch gives the same tokens. A row of ties is only slower.
"""

import torch
import triton
import triton.language as tl

BINS = tl.constexpr(2048)
SPREAD = tl.constexpr(32.0)  # bins are SPREAD / BINS wide at the maximum, half of all lie within SPREAD of it
UNIT = tl.constexpr(17592186044416.0)  # 2^44: masses of up to 2^18 tokens fit an int64
SLACK = tl.constexpr(1e-3)  # bounds of a bin's mass, against rounding
ABSENT = tl.constexpr(-(1 << 40))


@triton.jit
def _bin(scores, maximum):
    """Bin of a score, monotone also in floating point."""
    closeness = tl.div_rn(SPREAD, maximum - scores + SPREAD)
    return tl.minimum(((1.0 - closeness) * BINS).to(tl.int32), BINS - 1)


@triton.jit
def _mass(scores, maximum):
    return (tl.exp(scores - maximum) * UNIT).to(tl.int64)


@triton.jit
def _scores(logits, row, stride, temperature, tokens, mask):
    heat = tl.load(temperature + row).to(tl.float32)
    values = tl.load(logits + row * stride + tokens, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.div_rn(values, heat)


@triton.jit
def _key(scores):
    """Integers in the order of the scores; -0 counts as 0."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _row_maximum(maxima, row, PARTS: tl.constexpr, BLOCK_P: tl.constexpr):
    parts = tl.arange(0, BLOCK_P)
    return tl.max(tl.load(maxima + row * PARTS + parts, mask=parts < PARTS, other=float("-inf")), axis=0)


@triton.jit
def _maxima(logits, temperature, maxima, histogram, sums, stride, size, PARTS: tl.constexpr, SLICE: tl.constexpr):
    """One program: the largest score of a slice. The first of a row clears its counters."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = part * SLICE + tl.arange(0, SLICE)
    scores = _scores(logits, row, stride, temperature, tokens, tokens < size)
    tl.store(maxima + row * PARTS + part, tl.max(scores, axis=0))
    if part == 0:
        tl.store(histogram + row * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
        tl.store(sums + row * 4 + tl.arange(0, 4), tl.zeros([4], tl.int64))


@triton.jit
def _histogram(
    logits, temperature, maxima, histogram, stride, size,
    PARTS: tl.constexpr, BLOCK_P: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """One program: the bins of a slice, added to the row's."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    maximum = _row_maximum(maxima, row, PARTS, BLOCK_P)
    scores = _scores(logits, row, stride, temperature, tokens, tokens < size)
    counts = tl.histogram(_bin(scores, maximum), BINS, mask=tokens < size)
    tl.atomic_add(histogram + row * BINS + tl.arange(0, BINS), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _bracket(
    histogram, top_k, top_p, min_p, brackets, thresholds, size,
    HAS_K: tl.constexpr, HAS_P: tl.constexpr, HAS_M: tl.constexpr,
):  # fmt: skip
    """One program: what the histogram of one row leaves open.

    Per filter, bins before `_first` are surely kept and bins after `_last` surely removed; BINS means the filter is
    off.
    """
    row, bins = tl.program_id(0).to(tl.int64), tl.arange(0, BINS)
    counts = tl.load(histogram + row * BINS + bins)
    near = tl.exp(-SPREAD * bins / (BINS - bins))  # mass of a token at the upper edge of its bin
    far = tl.where(bins == BINS - 1, 0.0, tl.exp(-SPREAD * (bins + 1) / tl.maximum(BINS - 1 - bins, 1)))
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
    first, last = tl.minimum(k_bin, m_first), tl.minimum(tl.minimum(k_bin, m_last), BINS - 1)
    threshold = tl.full([], -1.0, tl.float32)  # top-p decides nothing
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
        if (p < 1) & (p_first <= last):
            threshold = limit
            first = tl.minimum(first, p_first)
            # The mass of what top-k keeps must be exact: then its last bin is searched too.
            last = tl.where(k_bin < BINS, k_bin, tl.minimum(last, p_last))
    head = tl.sum(tl.where(bins < first, counts, 0), axis=0)
    tl.store(brackets + row * 4, first)
    tl.store(brackets + row * 4 + 1, last)
    tl.store(brackets + row * 4 + 2, k - head)
    tl.store(brackets + row * 4 + 3, (k_bin == BINS).to(tl.int32))
    tl.store(thresholds + row, threshold)


@triton.jit
def _collect(
    logits, temperature, maxima, brackets, sums, listed, stride, size,
    PARTS: tl.constexpr, BLOCK_P: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """One program: lists the open tokens of a slice and adds up the mass before and after them."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    known = tokens < size
    maximum = _row_maximum(maxima, row, PARTS, BLOCK_P)
    scores = _scores(logits, row, stride, temperature, tokens, known)
    bins, masses = _bin(scores, maximum), _mass(scores, maximum)
    first, last = tl.load(brackets + row * 4), tl.load(brackets + row * 4 + 1)
    head = tl.sum(tl.where(known & (bins < first), masses, 0), axis=0)
    tl.atomic_add(sums + row * 4, head, mask=head > 0, sem="relaxed")
    tail = tl.sum(tl.where(known & (bins > last), masses, 0), axis=0)
    tl.atomic_add(sums + row * 4 + 1, tail, mask=tail > 0, sem="relaxed")
    open_ = known & (bins >= first) & (bins <= last)
    count = tl.sum(open_.to(tl.int64), axis=0)
    if count > 0:
        place = tl.atomic_add(sums + row * 4 + 2, count, sem="relaxed")
        places = place + tl.cumsum(open_.to(tl.int32), axis=0) - 1
        tl.store(listed + row * size + places, tokens, mask=open_)


@triton.jit
def _chunk(logits, temperature, listed, row, maximum, start, count, stride, size, LIST: tl.constexpr):
    """Ids, keys and masses of LIST listed tokens; absent ones have a key below all others."""
    places = start + tl.arange(0, LIST)
    mask = places < count
    tokens = tl.load(listed + row * size + places, mask=mask, other=0)
    scores = _scores(logits, row, stride, temperature, tokens, mask)
    return tokens, tl.where(mask, _key(scores), ABSENT), tl.where(mask, _mass(scores, maximum), 0)


@triton.jit
def _inside(tokens, keys, masses, low, high, first_token, floor):
    inside = (keys >= low) & (keys <= high) & ((keys > low) | (tokens >= first_token)) & (masses >= floor)
    return tl.sum(inside.to(tl.int64), axis=0), tl.sum(tl.where(inside, masses, 0), axis=0)


@triton.jit
def _tally(
    tokens, keys, masses, low, high, first_token, floor,
    logits, temperature, listed, row, maximum, count, stride, size, LIST: tl.constexpr,
):  # fmt: skip
    """Number and mass of the listed tokens with low <= key <= high, those at `low` from `first_token` on."""
    number, mass = _inside(tokens, keys, masses, low, high, first_token, floor)
    for start in range(LIST, count, LIST):  # rare: the first LIST tokens stay in registers
        more = _chunk(logits, temperature, listed, row, maximum, start, count, stride, size, LIST)
        more_number, more_mass = _inside(more[0], more[1], more[2], low, high, first_token, floor)
        number += more_number
        mass += more_mass
    return number, mass


@triton.jit
def _share(mass, total):
    return (mass.to(tl.float64) / total.to(tl.float64)).to(tl.float32)


@triton.jit
def _search(
    logits, temperature, min_p, maxima, brackets, thresholds, sums, listed, cuts, stride, size,
    HAS_M: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """One program: the exact cut of one row by bisection over its open tokens.

    Stores the key of the lowest kept score, the lowest kept id among its ties, and the mass of all kept tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    maximum = _row_maximum(maxima, row, PARTS, BLOCK_P)
    head, tail, count = tl.load(sums + row * 4), tl.load(sums + row * 4 + 1), tl.load(sums + row * 4 + 2)
    needed = tl.load(brackets + row * 4 + 2)
    below = tl.where(tl.load(brackets + row * 4 + 3) != 0, tail, 0)
    threshold = tl.load(thresholds + row)
    tokens, keys, masses = _chunk(logits, temperature, listed, row, maximum, 0, count, stride, size, LIST)
    bottom, top = tl.min(tl.where(keys == ABSENT, -ABSENT, keys), axis=0), tl.max(keys, axis=0)
    for start in range(LIST, count, LIST):
        more = _chunk(logits, temperature, listed, row, maximum, start, count, stride, size, LIST)
        bottom = tl.minimum(bottom, tl.min(tl.where(more[1] == ABSENT, -ABSENT, more[1]), axis=0))
        top = tl.maximum(top, tl.max(more[1], axis=0))

    # top-k: the largest key with at least `needed` tokens from it on
    low, high = bottom, tl.where(needed < count, top, bottom)
    while low < high:
        middle = low + (high - low + 1) // 2
        number, _ = _tally(
            tokens, keys, masses, middle, top, 0, 0,
            logits, temperature, listed, row, maximum, count, stride, size, LIST,
        )  # fmt: skip
        enough = number >= needed
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    kth = low

    # top-p: the smallest key whose ascending cumulative share exceeds the threshold
    _, mass = _tally(
        tokens, keys, masses, kth, top, 0, 0, logits, temperature, listed, row, maximum, count, stride, size, LIST
    )
    total = tl.maximum(head + below + mass, 1)
    high = tl.where(threshold >= 0, top + 1, low)
    while low < high:
        middle = low + (high - low) // 2
        _, mass = _tally(
            tokens, keys, masses, kth, middle, 0, 0,
            logits, temperature, listed, row, maximum, count, stride, size, LIST,
        )  # fmt: skip
        over = _share(below + mass, total) > threshold
        low, high = tl.where(over, low, middle + 1), tl.where(over, middle, high)
    cut = tl.where((low > top) & (head == 0), top, low)  # the likeliest token always stays

    # Ties at the cut are removed from the lowest id on, while the cumulative share allows.
    ties, mass = _tally(
        tokens, keys, masses, cut, cut, 0, 0, logits, temperature, listed, row, maximum, count, stride, size, LIST
    )
    each = mass // tl.maximum(ties, 1)
    _, under = _tally(
        tokens, keys, masses, kth, cut - 1, 0, 0, logits, temperature, listed, row, maximum, count, stride, size, LIST
    )
    low, high = ties * 0, tl.where(threshold >= 0, ties - 1, 0)
    while low < high:
        middle = low + (high - low + 1) // 2
        removed = _share(below + under + middle * each, total) <= threshold
        low, high = tl.where(removed, middle, low), tl.where(removed, high, middle - 1)
    gone = low
    low, high = gone * 0, tl.where(gone > 0, size, 0).to(tl.int64)
    while low < high:
        middle = low + (high - low) // 2
        kept, _ = _tally(
            tokens, keys, masses, cut, cut, middle, 0,
            logits, temperature, listed, row, maximum, count, stride, size, LIST,
        )  # fmt: skip
        enough = ties - kept >= gone
        low, high = tl.where(enough, low, middle + 1), tl.where(enough, middle, high)

    floor = tl.zeros([], tl.int64)
    if HAS_M:
        floor = (tl.load(min_p + row).to(tl.float32) * UNIT).to(tl.int64)
    _, mass = _tally(
        tokens, keys, masses, cut, top, low, floor,
        logits, temperature, listed, row, maximum, count, stride, size, LIST,
    )  # fmt: skip
    tl.store(cuts + row * 4, cut)
    tl.store(cuts + row * 4 + 1, low)
    tl.store(cuts + row * 4 + 2, head + mass)
    tl.store(cuts + row * 4 + 3, floor)


@triton.jit
def _write(
    logits, temperature, maxima, brackets, cuts, out, stride, stride_out, size,
    PARTS: tl.constexpr, BLOCK_P: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """One program: probabilities of a slice."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    known = tokens < size
    maximum = _row_maximum(maxima, row, PARTS, BLOCK_P)
    scores = _scores(logits, row, stride, temperature, tokens, known)
    bins, keys = _bin(scores, maximum), _key(scores)
    first, last = tl.load(brackets + row * 4), tl.load(brackets + row * 4 + 1)
    cut, first_token = tl.load(cuts + row * 4), tl.load(cuts + row * 4 + 1)
    total, floor = tl.load(cuts + row * 4 + 2), tl.load(cuts + row * 4 + 3)
    kept = (keys > cut) | ((keys == cut) & (tokens >= first_token))
    kept = (bins < first) | ((bins <= last) & kept & (_mass(scores, maximum) >= floor))
    probabilities = tl.exp(scores - maximum) / (total.to(tl.float32) / UNIT)
    tl.store(out + row * stride_out + tokens, tl.where(kept, probabilities, 0.0), mask=known)


def _slice(num_rows: int, size: int) -> int:
    """Tokens per program: small slices fill the processors when rows are few."""
    return 2048 if num_rows * size < 2**22 else 8192


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
    device = logits.device
    out = torch.empty(num_rows, size, device=device) if out is None else out
    part = _slice(num_rows, size)
    shape = {"PARTS": triton.cdiv(size, part), "BLOCK_P": triton.next_power_of_2(triton.cdiv(size, part))}
    grid = (num_rows, shape["PARTS"])
    maxima = torch.empty(grid, device=device)
    thresholds = torch.empty(num_rows, device=device)
    histogram = torch.empty(num_rows, BINS.value, dtype=torch.int32, device=device)
    brackets = torch.empty(num_rows, 4, dtype=torch.int32, device=device)
    sums, cuts = torch.empty(2, num_rows, 4, dtype=torch.long, device=device)
    listed = torch.empty(num_rows, size, dtype=torch.int32, device=device)
    stride, warps = logits.stride(0), part // 512
    has = {"HAS_K": top_k is not None, "HAS_P": top_p is not None, "HAS_M": min_p is not None}
    _maxima[grid](
        logits, temperature, maxima, histogram, sums, stride, size, shape["PARTS"], SLICE=part, num_warps=warps
    )
    _histogram[grid](logits, temperature, maxima, histogram, stride, size, **shape, SLICE=part, num_warps=warps)
    _bracket[(num_rows,)](histogram, top_k, top_p, min_p, brackets, thresholds, size, **has, num_warps=8)
    _collect[grid](
        logits, temperature, maxima, brackets, sums, listed, stride, size, **shape, SLICE=part, num_warps=warps
    )
    _search[(num_rows,)](
        logits, temperature, min_p, maxima, brackets, thresholds, sums, listed, cuts, stride, size,
        HAS_M=has["HAS_M"], **shape, LIST=1024, num_warps=4,
    )  # fmt: skip
    _write[grid](
        logits, temperature, maxima, brackets, cuts, out, stride, out.stride(0), size,
        **shape, SLICE=part, num_warps=warps,
    )  # fmt: skip
    return out
