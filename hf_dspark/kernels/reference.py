"""The kernels' operations in plain torch: what runs without Triton, and what the kernels are tested against.

Every function has the signature of its Triton twin. They may wait for the device; the twins never do.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F

from ..sampling import accept, next_distribution

Noise = tuple[torch.Tensor, int]
DRAFT, ACCEPT, RESIDUAL = 0, 1, 2  # the independent random streams of a round


# ---- attention


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
    """See `hf_dspark.kernels.ragged_attention`."""
    out = torch.empty_like(query) if out is None else out
    origins = limits if origins is None else origins
    out.zero_()
    dtype = torch.promote_types(query.dtype, torch.float32)
    num_kv_heads = keys.shape[1]
    for row, (start, end) in enumerate(pairwise(row_starts.tolist())):
        if start == end:
            continue
        limit = limits[start:end].to(torch.long)[:, None]
        length = int(limit.max()) + 1
        slots = torch.arange(length, device=query.device)
        visible = slots <= limit
        if window is not None:
            visible &= slots > origins[start:end].to(torch.long)[:, None] - window
        q = query[start:end].unflatten(1, (num_kv_heads, -1)).to(dtype)  # [n, KV, H/KV, D]
        scores = torch.einsum("nkgd,ksd->nkgs", q, keys[row, :, :length].to(dtype)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
        weights = scores.softmax(dim=-1).nan_to_num()  # a token that sees nothing gets zeros
        result = torch.einsum("nkgs,ksd->nkgd", weights, values[row, :, :length].to(dtype))
        out[start:end] = result.flatten(1, 2).to(out.dtype)
    return out


# ---- linear


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `hf_dspark.kernels.linear`."""
    result = F.linear(x, weight, bias)
    return result if out is None else out.copy_(result)


# ---- random numbers


def philox(seed: torch.Tensor, c0, c1, c2, c3) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10 (Salmon et al. 2011). Counters broadcast; every word is an int64 tensor holding 32 bits."""
    low = 0xFFFFFFFF
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(10):
        b, a = c2 * 0xCD9E8D57, c0 * 0xD2511F53  # wraps in int64, which keeps both halves of the product right
        c0, c1, c2, c3 = (b >> 32 & low) ^ c1 ^ k0, b & low, (a >> 32 & low) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


def exponential(seed: torch.Tensor, offset: int, stream: int, num_rows: int, size: int) -> torch.Tensor:
    """Exp(1) noise [num_rows, size], keyed by (seed, stream, offset, row, token id); its -log is Gumbel noise."""
    tokens = torch.arange((size + 3) // 4, device=seed.device)
    rows = torch.arange(num_rows, device=seed.device).unsqueeze(1)
    words = philox(
        seed, tokens.expand(num_rows, -1), rows, torch.full_like(rows, offset), torch.full_like(rows, stream)
    )
    bits = torch.stack(words, dim=-1).flatten(1)[:, :size]
    uniform = (bits.float() + 0.5) * 2.0**-32
    return -torch.log1p(-uniform.clamp(max=1 - 2.0**-24))


def acceptance_uniform(seed: torch.Tensor, num_rows: int, num_slots: int) -> torch.Tensor:
    """Draws [num_rows, num_slots] from [0, 1), multiples of 2^-24."""
    slots = torch.arange(num_slots, device=seed.device).expand(num_rows, -1)
    rows = torch.arange(num_rows, device=seed.device).unsqueeze(1)
    zero = torch.zeros_like(rows)
    return (philox(seed, slots, rows, zero, zero + ACCEPT)[0] >> 8).float() * 2.0**-24


# ---- Markov step


def markov_step(
    prev: torch.Tensor,
    w1: torch.Tensor | None,
    w2: torch.Tensor | None,
    base: torch.Tensor,
    *,
    noise: Noise | None = None,
    temperature: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_dspark.kernels.markov_step`."""
    logits = base.float()
    if w1 is not None and w2 is not None:
        logits = logits + w1[prev.clamp(max=w1.shape[0] - 1)].float() @ w2.float().T
    if out is not None:
        logits = out.copy_(logits)
    scores = logits
    if noise is not None and temperature is not None:
        warm = temperature[:, None] > 0
        gumbel = -exponential(*noise, DRAFT, *logits.shape).log()
        scores = torch.where(warm, logits / torch.where(warm, temperature[:, None], 1.0) + gumbel, logits)
    return scores.argmax(dim=-1), logits


# ---- context of the draft


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
    kept = (rows >= 0).nonzero().squeeze(1)
    rows, slots = rows[kept].long(), slots[kept].long()
    cos, sin = cos[kept].unsqueeze(1), sin[kept].unsqueeze(1)
    heads = projected[kept].unflatten(1, (num_layers, 1 if value_from_key else 2, num_kv_heads, head_dim))
    for layer in range(num_layers):
        key, value = heads[:, layer, 0], heads[:, layer, -1]
        if value_norm:
            value = F.rms_norm(value, (head_dim,), eps=eps)
        normed = key.float() * torch.rsqrt(key.float().pow(2).mean(-1, keepdim=True) + eps)
        key = k_norm_weight[layer] * normed.to(key.dtype)
        first, second = key.chunk(2, dim=-1)
        key = key * cos + torch.cat((-second, first), dim=-1) * sin
        keys[layer, rows, :, slots] = key.to(keys.dtype)
        values[layer, rows, :, slots] = value.to(values.dtype)


# ---- acceptance and draws


def draw(probabilities: torch.Tensor, noise: Noise) -> torch.Tensor:
    """See `hf_dspark.kernels.draw`."""
    return (probabilities / exponential(*noise, DRAFT, *probabilities.shape)).argmax(dim=-1)


def accept_and_sample(
    drafts: torch.Tensor,
    q: torch.Tensor | None,
    scores: torch.Tensor,
    lengths: torch.Tensor,
    *,
    seed: torch.Tensor | None = None,
    row_starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_dspark.kernels.accept_and_sample`."""
    num_rows, gamma = drafts.shape
    vocabulary_size = scores.shape[-1]
    scores = scores.reshape(-1, vocabulary_size)
    starts = torch.arange(num_rows, device=drafts.device) * (gamma + 1) if row_starts is None else row_starts
    index = starts[:num_rows, None].long() + torch.arange(gamma + 1, device=drafts.device)
    verified = torch.arange(gamma, device=drafts.device) < lengths[:, None]
    p = scores[index.clamp(max=scores.shape[0] - 1)]  # [R, γ+1, V]; slots past a row's length are not used
    if seed is None:
        own = p.argmax(dim=-1)
        accepted = ((own[:, :-1] == drafts) & verified).long().cumprod(dim=-1).sum(dim=-1)
        tokens = own.gather(1, accepted[:, None]).squeeze(1)
    else:
        q = F.one_hot(drafts, vocabulary_size).float() if q is None else q
        uniform = torch.where(verified, acceptance_uniform(seed, num_rows, gamma), torch.inf)
        accepted = accept(drafts, q, p[:, :-1], uniform)
        rows = torch.arange(num_rows, device=drafts.device)
        q = torch.cat((q, q.new_zeros(num_rows, 1, vocabulary_size)), dim=1)
        q = torch.where((accepted < lengths)[:, None], q[rows, accepted], 0.0)  # nothing to subtract from a bonus
        own = next_distribution(p[rows, accepted], q)
        tokens = (own / exponential(seed, 0, RESIDUAL, num_rows, vocabulary_size)).argmax(dim=-1)
    live = lengths >= 0
    return torch.where(live, accepted, 0), torch.where(live, tokens, 0)


# ---- truncation


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
    size = logits.shape[-1]
    scores, order = (logits.float() * temperature.float().reciprocal()[:, None]).sort(dim=-1, stable=True)  # ascending
    ranks = torch.arange(size, device=logits.device)
    if top_k is not None:
        k = torch.where(top_k > 0, top_k, size).clamp(max=size).long()
        scores = scores.masked_fill(scores < scores.gather(1, size - k[:, None]), float("-inf"))
    if top_p is not None:
        cumulative = scores.softmax(dim=-1).double().cumsum(dim=-1).float()
        removed = cumulative <= (1 - top_p.double()).float()[:, None]
        scores = scores.masked_fill(removed & (top_p < 1)[:, None] & (ranks < size - 1), float("-inf"))
    if min_p is not None:
        probabilities = scores.softmax(dim=-1)
        removed = probabilities < min_p.float()[:, None] * probabilities[:, -1:]
        scores = scores.masked_fill(removed & (ranks < size - 1), float("-inf"))
    out = torch.empty_like(scores) if out is None else out
    return out.scatter_(1, order, scores.softmax(dim=-1))
