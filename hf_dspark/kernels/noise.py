"""Random numbers inside kernels; `reference.philox`, `exponential` and `acceptance_uniform` give the same."""

import triton
import triton.language as tl

from . import reference

DRAFT = tl.constexpr(reference.DRAFT)
ACCEPT = tl.constexpr(reference.ACCEPT)
RESIDUAL = tl.constexpr(reference.RESIDUAL)


@triton.jit
def exponential(seed, row, offset, stream: tl.constexpr, quads):
    """Exp(1) noise of the tokens 4·quads .. 4·quads + 3, four times as long as `quads` on the last axis.

    One Philox call serves four neighbouring tokens. `row` broadcasts against `quads`.
    """
    zero = (quads + row) * 0
    w0, w1, w2, w3 = tl.philox(seed, zero + quads, zero + row, zero + offset, zero + stream)
    bits = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    # (0, 1): small values keep 32 bits of resolution, so that among many unlikely tokens ties stay rare.
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 5.9604644775390625e-08)
    series = uniform * (1 + uniform * (0.5 + uniform * (0.33333334 + uniform * 0.25)))  # -log1p(-u) near 0
    return tl.where(uniform < 0.015625, series, -tl.log(1 - uniform))


@triton.jit
def acceptance_uniform(seed, row, slots):
    """Draws from [0, 1) for the slots of one row, multiples of 2^-24."""
    zero = slots * 0
    word, _, _, _ = tl.philox(seed, slots, zero + row, zero, zero + ACCEPT)
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def first_maximum(scores, tokens, axis: tl.constexpr):
    """Largest score and, among its places, the lowest token id."""
    best = tl.max(scores, axis=axis, keep_dims=True)
    token = tl.min(tl.where(scores == best, tokens, 2147483647), axis=axis)
    return tl.max(scores, axis=axis), token
