"""Checkpoints of a training run: complete or absent, and enough to go on bit for bit.

Every random choice of a run is a function of its seed and of the step, so the state is the weights, the optimiser, the
schedule and one number. A checkpoint holds `draft/`, a folder that loads by itself (float32), `optimizer.safetensors`
and `state.json`.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..modeling_dspark import DSparkForCausalLM

NAME = re.compile(r"checkpoint-(\d+)")
DRAFT, OPTIMIZER, STATE = "draft", "optimizer.safetensors", "state.json"


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run, the newest last."""
    found = [path for path in folder.glob("checkpoint-*") if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def save(
    folder: Path,
    step: int,
    draft: DSparkForCausalLM,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write `checkpoint-<step>` and then remove all but the newest `keep`.

    It is written under another name first and renamed when its bytes are on disk, so a kill at any moment leaves either
    a whole checkpoint or none.
    """
    final, partial = folder / f"checkpoint-{step:07d}", folder / f".partial-{step:07d}"
    for left_over in folder.glob(".partial-*"):
        shutil.rmtree(left_over)
    draft.save_pretrained(partial / DRAFT)
    values = optimizer.state_dict()
    tensors = {f"{i}.{name}": value for i, entry in values["state"].items() for name, value in entry.items()}
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, partial / OPTIMIZER)
    state = state | {"step": step, "param_groups": values["param_groups"]}
    (partial / STATE).write_text(json.dumps(state, indent=2) + "\n")
    for path in (*partial.rglob("*"), partial):
        _flush(path)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    _flush(folder)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_state(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / STATE).read_text())


def load_optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer) -> None:
    """Give an optimiser of the same parameters the state it had."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(checkpoint / OPTIMIZER).items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": read_state(checkpoint)["param_groups"]})
