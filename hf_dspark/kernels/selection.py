"""The exact cut of a row among the tokens that `truncation` leaves open."""

import triton
import triton.language as tl

UNIT = tl.constexpr(17592186044416.0)  # 2^44: masses of up to 2^18 tokens fit an int64
ABSENT = tl.constexpr(-2147483648)  # a key below all others
# Columns. `sums`: number of surely kept tokens, their mass, that of the surely removed, that of the kept which min-p
# keeps too (HEAD if there is no min-p), number of open tokens. `limits`: see `truncation._bracket`.
NUMBER, HEAD, TAIL, KEPT, LISTED = (tl.constexpr(column) for column in range(5))  # of `sums`
NEAR, FAR, THRESHOLD, MAXIMUM = (tl.constexpr(column) for column in range(4))  # of `limits`
CUT, FIRST_ID, MASS = (tl.constexpr(column) for column in range(3))  # of `cuts`


@triton.jit
def integer_mass(likeness):
    return (likeness * UNIT + 0.5).to(tl.int64)


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
    likeness = tl.exp(scores - maximum)
    return tokens, keys, tl.where(mask & (likeness >= floor), integer_mass(likeness), 0)


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
def _largest_gone(total, threshold):
    """The largest mass that is no share of `total` above the threshold, shares rounded to float32 like the warper's."""
    next = (threshold.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    return (total.to(tl.float64) * ((threshold.to(tl.float64) + next.to(tl.float64)) * 0.5)).to(tl.int64)


@triton.jit
def _values(chunk, cut, WHAT: tl.constexpr):
    """What is searched, and the weights that add up: keys by number or by mass, or the ids of ties at `cut`."""
    tokens, keys, masses = chunk
    present = (keys == cut) if WHAT == "id" else (keys != ABSENT)
    values = tl.where(present, tokens if WHAT == "id" else keys, ABSENT)
    return values, masses if WHAT == "mass" else present.to(tl.int32)


@triton.jit
def _weight(chunk, cut, low, high, WHAT: tl.constexpr):
    values, weights = _values(chunk, cut, WHAT)
    return tl.sum(tl.where((values >= low) & (values <= high), weights, 0), axis=0)


@triton.jit
def _neighbour(chunk, cut, middle, below, WHAT: tl.constexpr):
    """The largest value up to `middle`, or the complement of the smallest one above it."""
    values, _ = _values(chunk, cut, WHAT)
    return tl.max(tl.where((values <= middle) == below, tl.where(below, values, ~values), ABSENT), axis=0)


@triton.jit
def _smallest(chunk, source, cut, low, high, limit, WHAT: tl.constexpr, LIST: tl.constexpr):
    """The smallest value in [low, high] up to which the weight exceeds `limit`; `high` if that of none below it does.

    Bisection, with both ends always moved on to listed values: its steps are few however wide the gaps.
    """
    bottom = low
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)  # rounded down, without overflow
        weight = _weight(chunk, cut, bottom, middle, WHAT)
        for start in range(LIST, source[2], LIST):
            weight += _weight(_chunk(source, 0.0, start, LIST), cut, bottom, middle, WHAT)
        over = weight > limit
        found = _neighbour(chunk, cut, middle, over, WHAT)
        for start in range(LIST, source[2], LIST):
            found = tl.maximum(found, _neighbour(_chunk(source, 0.0, start, LIST), cut, middle, over, WHAT))
        low, high = tl.where(over, low, tl.minimum(~found, high)), tl.where(over, found, high)
    return low


@triton.jit
def search(
    min_p, limits, needed, sums, listed_scores, listed_tokens, cuts, stride, size,
    HAS_P: tl.constexpr, HAS_M: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """One program: the exact cut of one row by bisection over its open tokens.

    Stores the key of the lowest kept score, the lowest kept id among its ties, and the mass of all kept tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    head, tail = tl.load(sums + row * 8 + (HEAD if HAS_P else KEPT)), tl.load(sums + row * 8 + TAIL)
    kept = tl.load(sums + row * 8 + KEPT) if HAS_M or not HAS_P else head
    count, k = tl.load(sums + row * 8 + LISTED).to(tl.int32), tl.load(needed + row)
    threshold = tl.load(limits + row * 4 + THRESHOLD)
    maximum = tl.load(limits + row * 4 + MAXIMUM)
    source = (listed_scores + row * stride, listed_tokens + row * size, count, maximum)
    chunk = _chunk(source, 0.0, 0, LIST)
    bottom, top = tl.min(tl.where(chunk[1] == ABSENT, 2147483647, chunk[1]), axis=0), tl.max(chunk[1], axis=0)
    for start in range(LIST, count, LIST):
        more = _chunk(source, 0.0, start, LIST)
        bottom = tl.minimum(bottom, tl.min(tl.where(more[1] == ABSENT, 2147483647, more[1]), axis=0))
        top = tl.maximum(top, tl.max(more[1], axis=0))

    surplus = count - (k - tl.load(sums + row * 8 + NUMBER).to(tl.int32))
    kth = _smallest(chunk, source, 0, bottom, tl.where(surplus > 0, top, bottom), surplus, "number", LIST)
    below = tl.where(k == size, tail, 0)  # what top-k has removed is no part of the distribution top-p sees
    total = head + below + _tally(chunk, source, kth, top, 0, 0.0, LIST)[1]
    limit = _largest_gone(total, threshold) - below
    cut = _smallest(chunk, source, 0, kth, tl.where(threshold >= 0, top + 1, kth), limit, "mass", LIST)
    cut = tl.where((cut > top) & (head == 0), top, cut)  # the likeliest token always stays
    ties, mass = _tally(chunk, source, cut, cut, 0, 0.0, LIST)
    limit -= _tally(chunk, source, kth, cut - 1, 0, 0.0, LIST)[1]
    # Of ties at the cut, those with the lowest ids go, as many as the limit allows, but not all.
    gone = tl.minimum(limit // tl.maximum(mass // tl.maximum(ties, 1), 1), ties - 1)
    gone = tl.where((threshold >= 0) & (gone > 0), gone, 0).to(tl.int32)
    first_id = _smallest(chunk, source, cut, gone * 0, tl.where(gone > 0, size, 0), gone, "id", LIST)
    floor = 0.0
    if HAS_M:
        floor = tl.load(min_p + row).to(tl.float32)
        chunk = _chunk(source, floor, 0, LIST)
    tl.store(cuts + row * 3 + CUT, cut.to(tl.int64))
    tl.store(cuts + row * 3 + FIRST_ID, first_id.to(tl.int64))
    tl.store(cuts + row * 3 + MASS, kept + _tally(chunk, source, cut, top, first_id, floor, LIST)[1])
