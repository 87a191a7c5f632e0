"""Temperature, top-k, top-p and min-p over a whole vocabulary without sorting it, exact.

With d = maximum - score, number and mass of a row's tokens with d <= edge are taken for a few dozen edges, and again for
as many edges between those two that matter. That shows how far from the maximum tokens are surely kept, and from where
on surely removed. Those between, a few hundred of an ordinary row, are listed and searched by bisection; of the others
only number and mass are needed. What decides are sums of integers, which do not depend on the order of summation. A row
full of ties is slower, not wrong.
"""

import torch
import triton
import triton.language as tl

EDGES = tl.constexpr(32)
SPREAD = tl.constexpr(8.0)  # half of the first edges lie within this distance of the maximum
SLACK = tl.constexpr(1e-5)  # of every bound, against rounding
UNIT = tl.constexpr(17592186044416.0)  # 2^44: masses of up to 2^18 tokens fit an int64
OFF = tl.constexpr(1e30)  # a distance that no score reaches, except minus infinity
ABSENT = tl.constexpr(-2147483648)  # a key below all others
# Per row, integers: number and mass up to each edge, twice; then of the surely kept, the surely removed, the listed.
SUMS, NUMBER, HEAD, TAIL, LISTED = (tl.constexpr(n) for n in (132, 128, 129, 130, 131))
# Per row, floats: the edges, twice; distances up to which tokens are kept and beyond which removed; top-p's threshold
# as the first and as the second edges leave it.
LIMITS, LOW, HIGH, OPEN_THRESHOLD, THRESHOLD = (tl.constexpr(n) for n in (68, 64, 65, 66, 67))
CUT, FIRST_ID, MASS = (tl.constexpr(n) for n in (0, 1, 2))


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
def _k(top_k, row, size, HAS_K: tl.constexpr):
    """Tokens that top-k keeps without ties; the size of the vocabulary when it is off."""
    k = row.to(tl.int32) * 0 + size
    if HAS_K:
        k = tl.load(top_k + row).to(tl.int32)
        k = tl.where(k > 0, tl.minimum(k, size), size)
    return k


@triton.jit
def _maxima(logits, temperature, maxima, sums, stride, size, PARTS: tl.constexpr, SLICE: tl.constexpr):
    """One program: the largest score of a slice. The first of a row clears its sums."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = part * SLICE + tl.arange(0, SLICE)
    scores = _scores(logits, temperature, row, stride, tokens, tokens < size)
    tl.store(maxima + row * PARTS + part, tl.max(scores, axis=0))
    if part == 0:
        places = tl.arange(0, 256)
        tl.store(sums + row * SUMS + places, tl.zeros([256], tl.int64), mask=places < SUMS)


@triton.jit
def _bracket(
    sums, limits, threshold, top_k, top_p, min_p, row, size,
    LEVEL: tl.constexpr, HAS_K: tl.constexpr, HAS_P: tl.constexpr, HAS_M: tl.constexpr,
):  # fmt: skip
    """What the sums up to the edges of one level leave open.

    Interval j lies between edges j - 1 and j. Per filter, intervals before `_first` are surely kept and intervals after
    `_last` surely removed; EDGES: it is off. A negative `threshold` says that top-p decides nothing.

    Returns the distance up to which tokens are surely kept, the distance beyond which they are surely removed, and the
    threshold, negative if the other filters are surely stricter.
    """
    index = tl.arange(0, EDGES)
    edges = tl.load(limits + row * LIMITS + LEVEL * EDGES + index)
    numbers = tl.load(sums + row * SUMS + LEVEL * 2 * EDGES + index)
    masses = tl.load(sums + row * SUMS + (LEVEL * 2 + 1) * EDGES + index).to(tl.float32) / UNIT
    least = tl.exp(-edges)  # mass of a token at the edge
    not_last = index < EDGES - 1
    k = _k(top_k, row, size, HAS_K)
    k_place = tl.where(k < size, tl.sum((numbers < k).to(tl.int32), axis=0), EDGES)
    first, last = k_place, k_place
    if HAS_M:
        floor = tl.load(min_p + row).to(tl.float32)
        m_first = tl.sum((least > floor * (1 + SLACK)).to(tl.int32), axis=0)
        m_last = tl.sum(((least > floor * (1 - SLACK)) & not_last).to(tl.int32), axis=0)
        first = tl.minimum(first, tl.where(floor > 0, m_first, EDGES))
        last = tl.minimum(last, tl.where(floor > 0, m_last, EDGES))
    if HAS_P:
        # Bounds of the mass that top-k leaves, of which top-p keeps the share 1 - threshold.
        total = tl.load(sums + row * SUMS + 2 * EDGES - 1).to(tl.float32) / UNIT
        lower = tl.where(k < size, tl.max(tl.where(numbers < k, masses, 0.0), axis=0), total)
        upper = tl.where(k < size, tl.min(tl.where(numbers < k, total, masses), axis=0), total)
        share = 1 - threshold
        kept = share * lower - SLACK * lower + least * (1 - SLACK) > masses
        p_first = tl.sum(kept.to(tl.int32), axis=0)
        p_last = tl.sum(((masses < share * upper + SLACK * upper) & not_last).to(tl.int32), axis=0)
        if (threshold >= 0) & (p_first <= tl.minimum(last, EDGES - 1)):
            first = tl.minimum(first, p_first)
            # The mass of what top-k keeps must become exact: then the place of its cut stays open too.
            last = tl.where(k_place < EDGES, k_place, tl.minimum(last, p_last))
        else:
            threshold = tl.full([], -1.0, tl.float32)
    start = tl.min(edges, axis=0)
    low = tl.max(tl.where(index < first, edges, start), axis=0)
    return low, tl.max(tl.where(index <= last, edges, low), axis=0), threshold


@triton.jit
def _threshold(top_p, row, HAS_P: tl.constexpr):
    """1 - top_p, rounded to float32 as the warper's comparison rounds it; negative when top-p is off."""
    threshold = tl.full([], -1.0, tl.float32)
    if HAS_P:
        p = tl.load(top_p + row).to(tl.float64)
        threshold = tl.where(p < 1, (1 - p).to(tl.float32), threshold)
    return threshold


@triton.jit
def _count(
    logits, temperature, top_k, top_p, min_p, maxima, sums, limits, stride, size,
    LEVEL: tl.constexpr, HAS_K: tl.constexpr, HAS_P: tl.constexpr, HAS_M: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_P: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """One program: adds number and mass of a slice's tokens up to each edge to the row's."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = part * SLICE + tl.arange(0, SLICE)
    scores = _scores(logits, temperature, row, stride, tokens, tokens < size)
    distance = _row_maximum(maxima, row, PARTS, BLOCK_P) - scores
    likeness = tl.exp(-distance)
    low, high = tl.full([], -1e-3, tl.float32), tl.full([], OFF, tl.float32)
    if LEVEL == 1:
        threshold = _threshold(top_p, row, HAS_P)
        low, high, threshold = _bracket(
            sums, limits, threshold, top_k, top_p, min_p, row, size, 0, HAS_K, HAS_P, HAS_M
        )  # fmt: skip
        if part == 0:
            tl.store(limits + row * LIMITS + OPEN_THRESHOLD, threshold)
    index = tl.arange(0, EDGES)
    edges = tl.zeros([EDGES], tl.float32)
    numbers, masses = tl.zeros([EDGES], tl.int32), tl.zeros([EDGES], tl.float32)
    for j in tl.static_range(EDGES):
        edge = high
        if j < EDGES - 1:
            far = low + tl.maximum(low, SPREAD) * (j / (EDGES - 1 - j))
            edge = tl.where(high < OFF, low + (high - low) * (j / (EDGES - 1)), far)
        inside = distance <= edge
        edges = tl.where(index == j, edge, edges)
        numbers = tl.where(index == j, tl.sum(inside.to(tl.int32), axis=0), numbers)
        masses = tl.where(index == j, tl.sum(tl.where(inside, likeness, 0.0), axis=0), masses)
    place = sums + row * SUMS + LEVEL * 2 * EDGES + index
    tl.atomic_add(place, numbers.to(tl.int64), sem="relaxed")
    tl.atomic_add(place + EDGES, (masses * UNIT).to(tl.int64), sem="relaxed")
    if part == 0:
        tl.store(limits + row * LIMITS + LEVEL * EDGES + index, edges)


@triton.jit
def _collect(
    logits, temperature, top_k, top_p, min_p, maxima, sums, limits, listed_scores, listed_tokens,
    stride, stride_listed, size,
    HAS_K: tl.constexpr, HAS_P: tl.constexpr, HAS_M: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_P: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """One program: lists the open tokens of a slice, and adds up the others on either side."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = part * SLICE + tl.arange(0, SLICE)
    known = tokens < size
    scores = _scores(logits, temperature, row, stride, tokens, known)
    maximum = _row_maximum(maxima, row, PARTS, BLOCK_P)
    distance, masses = maximum - scores, _mass(scores, maximum)
    threshold = tl.load(limits + row * LIMITS + OPEN_THRESHOLD)
    low, high, threshold = _bracket(
        sums, limits, threshold, top_k, top_p, min_p, row, size, 1, HAS_K, HAS_P, HAS_M
    )  # fmt: skip
    if part == 0:
        tl.store(limits + row * LIMITS + LOW, low)
        tl.store(limits + row * LIMITS + HIGH, high)
        tl.store(limits + row * LIMITS + THRESHOLD, threshold)
    kept, removed = known & (distance <= low), known & (distance > high)
    number = tl.sum(kept.to(tl.int32), axis=0)
    if number > 0:
        tl.atomic_add(sums + row * SUMS + NUMBER, number.to(tl.int64), sem="relaxed")
        tl.atomic_add(sums + row * SUMS + HEAD, tl.sum(tl.where(kept, masses, 0), axis=0), sem="relaxed")
    tail = tl.sum(tl.where(removed, masses, 0), axis=0)
    if tail > 0:
        tl.atomic_add(sums + row * SUMS + TAIL, tail, sem="relaxed")
    open_ = (known & ~kept & ~removed).to(tl.int32)
    number = tl.sum(open_, axis=0)
    if number > 0:
        place = tl.atomic_add(sums + row * SUMS + LISTED, number.to(tl.int64), sem="relaxed")
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
    top_k, min_p, maxima, limits, sums, listed_scores, listed_tokens, cuts, stride, size,
    HAS_K: tl.constexpr, HAS_M: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """One program: the exact cut of one row by bisection over its open tokens.

    Stores the key of the lowest kept score, the lowest kept id among its ties, and the mass of all kept tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    head, tail = tl.load(sums + row * SUMS + HEAD), tl.load(sums + row * SUMS + TAIL)
    count, k = tl.load(sums + row * SUMS + LISTED), _k(top_k, row, size, HAS_K)
    threshold = tl.load(limits + row * LIMITS + THRESHOLD)
    source = (
        listed_scores + row * stride, listed_tokens + row * size, count, _row_maximum(maxima, row, PARTS, BLOCK_P)
    )  # fmt: skip
    chunk = _chunk(source, 0.0, 0, LIST)
    bottom, top = tl.min(tl.where(chunk[1] == ABSENT, 2147483647, chunk[1]), axis=0), tl.max(chunk[1], axis=0)
    for start in range(LIST, count, LIST):
        more = _chunk(source, 0.0, start, LIST)
        bottom = tl.minimum(bottom, tl.min(tl.where(more[1] == ABSENT, 2147483647, more[1]), axis=0))
        top = tl.maximum(top, tl.max(more[1], axis=0))

    open_k = k - tl.load(sums + row * SUMS + NUMBER)
    kth = _kth_key(chunk, source, bottom, tl.where(open_k < count, top, bottom), open_k, LIST)
    removes = (k < size) & (k <= tl.load(sums + row * SUMS + EDGES - 1))  # top-k, of the finite scores
    below = tl.where(removes, 0, tail)  # what top-k has removed is no part of the distribution top-p sees
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
    kept = kept & (distance <= tl.load(limits + row * LIMITS + HIGH)) | (
        distance <= tl.load(limits + row * LIMITS + LOW)
    )
    if HAS_M:
        kept = kept & (likeness >= tl.load(min_p + row).to(tl.float32))
    factor = UNIT / tl.load(cuts + row * 3 + MASS).to(tl.float32)
    tl.store(out + row * stride_out + tokens, tl.where(kept, likeness * factor, 0.0), mask=known)


SLICE = 2048


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
    num_parts = triton.cdiv(size, SLICE)
    maxima = torch.empty(num_rows, num_parts, device=device)
    sums = torch.empty(num_rows, SUMS.value, dtype=torch.long, device=device)
    limits = torch.empty(num_rows, LIMITS.value, device=device)
    cuts = torch.empty(num_rows, 3, dtype=torch.long, device=device)
    listed = torch.empty(num_rows, size, dtype=torch.int32, device=device)  # ids; their scores lie in `out` meanwhile
    grid = (num_rows, num_parts)
    counted = 512 if num_rows < 16 else 1024  # tokens of one warp, which needs no barrier for its 64 sums
    parts = {"PARTS": num_parts, "BLOCK_P": triton.next_power_of_2(num_parts)}
    options = (top_k, top_p, min_p)
    has = {"HAS_K": top_k is not None, "HAS_P": top_p is not None, "HAS_M": min_p is not None}
    _maxima[grid](logits, temperature, maxima, sums, stride, size, PARTS=num_parts, SLICE=SLICE)
    for level in range(2):
        _count[(num_rows, triton.cdiv(size, counted))](
            logits, temperature, *options, maxima, sums, limits, stride, size,
            LEVEL=level, **has, **parts, SLICE=counted, num_warps=1,
        )  # fmt: skip
    _collect[grid](
        logits, temperature, *options, maxima, sums, limits, out, listed, stride, out.stride(0), size,
        **has, **parts, SLICE=SLICE,
    )  # fmt: skip
    _search[(num_rows,)](
        top_k, min_p, maxima, limits, sums, out, listed, cuts, out.stride(0), size,
        HAS_K=has["HAS_K"], HAS_M=has["HAS_M"], **parts, LIST=2048, num_warps=8,
    )  # fmt: skip
    _write[grid](
        logits, temperature, min_p, maxima, limits, cuts, out, stride, out.stride(0), size,
        HAS_M=has["HAS_M"], **parts, SLICE=SLICE,
    )  # fmt: skip
    return out
