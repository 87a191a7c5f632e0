"""Attention over rows of different lengths as one operator, so that compiled layers do not look inside."""

from typing import Any

import torch

from .. import kernels
from ..compiling import opaque


def _empty(query: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


@opaque("hf_dspark::ragged_attention", _empty)
def ragged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    row_starts: torch.Tensor,
    limits: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    most: int,
    origins: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `kernels.ragged_attention`; `most` tokens a row at most."""
    rows = row_starts.shape[0] - 1  # without the spare row of the stores
    keys, values = keys[:rows], values[:rows]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return kernels.ragged_attention(
        query, keys, values, row_starts, limits,
        scale=scale, window=window, softcap=softcap, max_tokens_per_row=most, out=out, origins=origins,
    )  # fmt: skip
