"""Keys and values of new context for all draft layers: K-norm, rotary embedding and the write into the caches."""

import torch
import triton
import triton.language as tl


@triton.jit
def _write(
    projected, weight, cos, sin, keys, values, rows, slots,
    stride_p, stride_cos, stride_sin, stride_kl, stride_kr, stride_kh, stride_ks,
    stride_vl, stride_vr, stride_vh, stride_vs, eps,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, VALUE_NORM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: one token in one layer. Rounds where `DSparkAttention.keys_values` does."""
    token, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = tl.load(rows + token).to(tl.int64)
    if row < 0:
        return
    slot = tl.load(slots + token).to(tl.int64)
    heads, dims = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    in_head = dims < HEAD_DIM
    mask = (heads < KV_HEADS) & in_head
    first_half = dims < HEAD_DIM // 2
    partner = tl.where(first_half, dims + HEAD_DIM // 2, dims - HEAD_DIM // 2)
    dtype = projected.dtype.element_ty

    source = projected + token * stride_p + layer * (PARTS * KV_HEADS * HEAD_DIM) + heads * HEAD_DIM
    raw = tl.load(source + dims, mask=mask, other=0)
    raw_partner = tl.load(source + partner, mask=mask, other=0).to(tl.float32)
    key = raw.to(tl.float32)
    eps = tl.cast(eps, tl.float32)  # torch.compile passes a double
    scale = tl.rsqrt(tl.sum(key * key, axis=1, keep_dims=True) / HEAD_DIM + eps)
    gamma = tl.load(weight + layer * HEAD_DIM + dims, mask=in_head, other=0).to(tl.float32)
    gamma_partner = tl.load(weight + layer * HEAD_DIM + partner, mask=in_head, other=0).to(tl.float32)
    normed = (gamma * (key * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    turned = (gamma_partner * (raw_partner * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    turned = tl.where(first_half, -turned, turned)
    c = tl.load(cos + token * stride_cos + dims, mask=in_head, other=0)
    s = tl.load(sin + token * stride_sin + dims, mask=in_head, other=0)
    rounding = c.dtype  # float32 tables promote the product, tables of the model's dtype do not
    rotated = (normed * c.to(tl.float32)).to(rounding).to(tl.float32)
    rotated += (turned * s.to(tl.float32)).to(rounding).to(tl.float32)
    place = keys + layer * stride_kl + row * stride_kr + heads.to(tl.int64) * stride_kh + slot * stride_ks + dims
    tl.store(place, rotated.to(rounding).to(keys.dtype.element_ty), mask=mask)

    value = tl.load(source + (PARTS - 1) * KV_HEADS * HEAD_DIM + dims, mask=mask, other=0)
    if VALUE_NORM:
        wide = value.to(tl.float32)
        value = (wide * tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / HEAD_DIM + eps)).to(dtype)
    place = values + layer * stride_vl + row * stride_vr + heads.to(tl.int64) * stride_vh + slot * stride_vs + dims
    tl.store(place, value.to(values.dtype.element_ty), mask=mask)


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
    """See `hf_dspark.kernels.write_context`."""
    num_layers, _, num_kv_heads, _, head_dim = keys.shape
    if projected.shape[0] == 0:
        return
    _write[(projected.shape[0], num_layers)](
        projected, k_norm_weight, cos, sin, keys, values, rows, slots,
        projected.stride(0), cos.stride(0), sin.stride(0), *keys.stride()[:4], *values.stride()[:4], eps,
        KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PARTS=1 if value_from_key else 2, VALUE_NORM=value_norm,
        BLOCK_H=triton.next_power_of_2(num_kv_heads), BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
