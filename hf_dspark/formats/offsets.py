"""`d2t` of a reduced vocabulary: offsets from the row of a draft's head to the token it stands for."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .._hub_files import TensorInfo
from .keys import logger

D2T, T2D = "d2t", "t2d"


def check_offsets(folder: Path, tensors: dict[str, TensorInfo], vocab_size: int, resolution: dict[str, Any]) -> None:
    """Read the offsets of a checkpoint that has some, and make sure that they are offsets.

    Row i stands for token i + d2t[i]; tokens ascend and lie below `vocab_size`. What the mask `t2d` says, if it is
    there, must be the same tokens.

    Raises:
        ValueError: absolute ids in place of offsets, tokens out of range or order, or a mask of other tokens.
    """
    if D2T not in tensors:
        return
    offsets = _read(folder, tensors, D2T)
    if offsets.dtype.is_floating_point or offsets.dtype == torch.bool or offsets.dim() != 1 or not len(offsets):
        raise ValueError(f"d2t must be a list of integers, found {offsets.dtype} of shape {list(offsets.shape)}.")
    offsets = offsets.long()
    ids = torch.arange(len(offsets)) + offsets
    mask = _read(folder, tensors, T2D).bool() if T2D in tensors else None
    valid = is_ascending(ids, vocab_size)
    if is_ascending(offsets, vocab_size) and (not valid or _denies(mask, ids)) and not _denies(mask, offsets):
        raise ValueError(
            f"d2t holds token ids ({_ends(offsets)}), but the format wants offsets: token minus row number. Subtract "
            "torch.arange(len(d2t)) and save it again."
        )
    if not valid:
        raise ValueError(
            f"d2t gives {_ends(ids)} as tokens; they must ascend and lie in 0..{vocab_size - 1}. Download it again."
        )
    if _denies(mask, ids):
        raise ValueError("d2t and t2d name different tokens. One of them is damaged; download the file again.")
    if len(ids) < vocab_size and not offsets.any():
        resolution["d2t"] = (
            f"all zeros, so the first {len(ids)} tokens can be proposed; trainers start from such a table"
        )
        logger.warning(f"d2t: {resolution['d2t']}. Acceptance will be near zero if the real one was lost.")


def is_ascending(ids: torch.Tensor, size: int) -> bool:
    """Whether `ids` strictly ascend within 0..size - 1."""
    return bool(ids[0] >= 0 and ids[-1] < size and (ids[1:] > ids[:-1]).all())


def _denies(mask: torch.Tensor | None, ids: torch.Tensor) -> bool:
    if mask is None:
        return False
    return not (int(mask.sum()) == len(ids) and bool(ids.max() < len(mask)) and bool(mask[ids].all()))


def _ends(ids: torch.Tensor) -> str:
    return ", ".join(map(str, ids[:3].tolist())) + f", ..., {int(ids[-1])}"


def _read(folder: Path, tensors: dict[str, TensorInfo], name: str) -> torch.Tensor:
    with safe_open(folder / tensors[name].file, framework="pt") as file:
        return file.get_tensor(name)
