"""The hot operations of the fast path, each as a Triton kernel and as a readable torch reference.

Every function here runs its kernels for CUDA tensors and the reference otherwise (`use_kernels`); both compute the
same. The kernels can be captured in a CUDA graph and traced by torch.compile: no host synchronisation, grids and
buffers that depend on shapes only. With TRITON_INTERPRET=1, set before the first import, they run on CPU tensors, for
tests.
"""

import os
from typing import TYPE_CHECKING

import torch
from transformers.utils import logging

from . import reference

if TYPE_CHECKING:
    from . import attention, context, markov, product, truncation, verify

logger = logging.get_logger(__name__)

_kernels = False


def _load() -> None:
    """Import the kernels; a machine without a usable Triton keeps the torch operations and says why."""
    global _kernels, attention, context, markov, product, truncation, verify
    try:
        from . import attention, context, markov, product, truncation, verify

        _kernels = True
    except Exception as error:  # a broken Triton fails in many ways
        logger.warning(f"Triton kernels are off, torch operations take their place ({type(error).__name__}: {error}).")


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


if torch.cuda.is_available() or _interpreted():
    _load()


def use_kernels(tensor: torch.Tensor) -> bool:
    """Whether the operations on this tensor run as Triton kernels. The one place that decides."""
    return _kernels and (tensor.is_cuda or _interpreted())


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
    """Attention of a flat axis of tokens, each over the cache of its row, without expanding KV heads.

    Tokens row_starts[r] .. row_starts[r+1] - 1 belong to row r; a row may have none and then costs nothing. Tokens past
    row_starts[R] are padding and give zeros.

    Args:
        query: [T, H, D] bfloat16, float16 or float32.
        keys, values: [R, KV, S, D], same dtype, contiguous in D. What lies behind a row's largest limit is not read.
        row_starts: [R+1] int32.
        limits: [T] int32; token t sees the slots j with j <= limits[t], and j > origins[t] - window. None seen: zeros.
        scale: factor of the scores, applied before softcap · tanh(scores / softcap).
        max_tokens_per_row: bound of row_starts[r+1] - row_starts[r].
        out: [T, H, D].
        workspace: from `attention_workspace`, to be shared by calls that follow each other.
        origins: [T] int32, where windows count back from; by default `limits`.

    Returns:
        [T, H, D].
    """
    function = attention.ragged_attention if use_kernels(query) else reference.ragged_attention
    return function(
        query, keys, values, row_starts, limits,
        scale=scale, window=window, softcap=softcap, max_tokens_per_row=max_tokens_per_row,
        out=out, workspace=workspace, origins=origins,
    )  # fmt: skip


def attention_workspace(query: torch.Tensor, keys: torch.Tensor, max_tokens_per_row: int) -> torch.Tensor:
    """Scratch memory for `ragged_attention` calls with tensors of these shapes, float32."""
    if use_kernels(query):
        return attention.attention_workspace(query, keys, max_tokens_per_row)
    return torch.empty(0, device=query.device)


def markov_step(
    prev: torch.Tensor,
    w1: torch.Tensor | None,
    w2: torch.Tensor | None,
    base: torch.Tensor,
    *,
    noise: tuple[torch.Tensor, int] | None = None,
    temperature: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of the Markov walk: logits = base + W2 · W1[prev] with float32 accumulation, and the token they choose.

    The token is the arg max (the lowest id of equals), or with `noise` and `temperature` a sample of
    softmax(logits / temperature) in the rows with temperature > 0, by the Gumbel maximum.

    Args:
        prev: [B] int64, cut to the rows of `w1`. B <= 64.
        w1: [·, r], `w2`: [V, r]; both None for a draft without Markov head. Gated and rnn heads pass the vectors of
            their step as `w1` [B, r] and arange(B) as `prev`.
        base: [B, V], contiguous in V.
        noise: (seed, offset): an int64 tensor [1] on the device and the number of the slot. Noise is keyed by seed,
            offset, row and token id: change the seed from round to round.
        temperature: [B] float32.
        out: [B, V] float32, contiguous in V, to receive the logits.

    Returns:
        Tokens [B] int64 and logits [B, V] float32 (`base` itself where nothing is added and `out` is None).
    """
    function = markov.markov_step if use_kernels(base) else reference.markov_step
    return function(prev, w1, w2, base, noise=noise, temperature=temperature, out=out)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """x · weightᵀ (+ bias) for few rows, float32 accumulation, rounded once. The stream of the weights bounds it.

    A row's result does not depend on the other rows, nor on their number. Made for up to 16 rows: with 64 cuBLAS is
    faster for most shapes. The first call on a device must come before a graph capture; calls must follow each other,
    two streams of one device must not run them at the same time.

    Args:
        x: [T, K] bfloat16, float16 or float32, contiguous in K. T <= 64.
        weight: [N, K], same dtype, contiguous in K. Not to be written by the kernel launched just before with `pdl`.
        bias: [N].
        out: [T, N], contiguous in N.
        pdl: programmatic dependent launch (compute capability >= 9.0): the kernel starts while the one before it in the
            stream ends, and fetches its first weights meanwhile.

    Returns:
        [T, N] in the dtype of `x`.
    """
    if x.shape[0] > 64:
        raise ValueError(f"`linear` is for up to 64 rows, got {x.shape[0]}. Use torch.nn.functional.linear.")
    if use_kernels(x):
        return product.linear(x, weight, bias, out=out, pdl=pdl)
    return reference.linear(x, weight, bias, out=out)


def write_context(
    projected: torch.Tensor,
    k_norm_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    *,
    eps: float,
    value_from_key: bool = False,
    value_norm: bool = False,
) -> None:
    """Put new context into the caches of all draft layers: `DSparkAttention.keys_values` and the write, in one.

    Args:
        projected: [T, L · parts · KV · D], per layer the key and the value projection; with `value_from_key` only the
            key projection, which before K-norm is the value too.
        k_norm_weight: [L, D].
        cos, sin: [T, D] of the tokens' positions, in the dtype of `projected` or float32.
        keys, values: [L, R, KV, S, D], contiguous in D; changed in place.
        rows, slots: [T] int32, where each token goes; a negative row skips it.
        eps: of K-norm and of the value norm.
        value_norm: values pass an RMS norm without weight.
    """
    function = context.write_context if use_kernels(projected) else reference.write_context
    function(
        projected, k_norm_weight, cos, sin, keys, values, rows, slots,
        eps=eps, value_from_key=value_from_key, value_norm=value_norm,
    )  # fmt: skip


def accept_and_sample(
    drafts: torch.Tensor,
    q: torch.Tensor | None,
    scores: torch.Tensor,
    lengths: torch.Tensor,
    *,
    seed: torch.Tensor | None = None,
    row_starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verification of a round (`sampling.accept`, `sampling.next_distribution`) without host sync.

    Args:
        drafts: [R, γ] int64.
        q: [R, γ, V] float32, the distributions the drafts were drawn from; None for drafts that were not drawn
            (one-hot q). Not used without `seed`.
        scores: [R, γ+1, V], or [T, V] with `row_starts`. Without `seed` any scores, of which the arg max counts; with
            `seed` the target's distributions p, float32.
        lengths: [R] int32, ℓ_r <= γ, the drafts sent to verification; negative for a row that has finished.
        seed: [1] int64. Acceptance and residual use streams of their own, so the seed of the drafts may be used.
        row_starts: [R] or more int32: slot j of row r is scores[row_starts[r] + j].

    Returns:
        accepted [R] and next token [R], int64; zeros for finished rows.
    """
    function = verify.accept_and_sample if use_kernels(scores) else reference.accept_and_sample
    return function(drafts, q, scores, lengths, seed=seed, row_starts=row_starts)


def draw(probabilities: torch.Tensor, noise: tuple[torch.Tensor, int]) -> torch.Tensor:
    """A sample of each row of `probabilities` [N, V] float32 (any sum), [N] int64; `noise` as in `markov_step`."""
    function = verify.draw if use_kernels(probabilities) else reference.draw
    return function(probabilities, noise)


def truncated_probabilities(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax after temperature, top-k, top-p and min-p, as transformers' warpers in the order generate() builds them.

    All ties at the top-k limit are kept; of ties at the top-p limit those with the highest ids, as after a stable
    ascending sort; the likeliest token always stays.

    Args:
        logits: [N, V], contiguous in V.
        temperature: [N], > 0.
        top_k: [N] integers, 0 = off. top_p: [N], 1 = off; float64 gives the warper's own rounding of 1 - top_p.
            min_p: [N], 0 = off. None = off for all rows.
        out: [N, V] float32.

    Returns:
        [N, V] float32.
    """
    function = truncation.truncated_probabilities if use_kernels(logits) else reference.truncated_probabilities
    return function(logits, temperature, top_k, top_p, min_p, out=out)
