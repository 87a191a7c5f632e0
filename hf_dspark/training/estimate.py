"""What a run will cost, from a few of its steps."""

import time
from dataclasses import dataclass

import psutil
import torch

from .config import TrainingConfig
from .trainer import Run

WARM_UP, MEASURED = 3, 5


@dataclass(frozen=True)
class Estimate:
    """A run before it starts.

    Attributes:
        trainable_parameters, target_parameters: numbers of parameters.
        num_texts, num_tokens: of the training data.
        steps: optimiser steps of the whole run; tokens_per_step, positions_per_step: tokens read and supervised block
            positions (slots that count) in one, all processes together, mean over the steps measured.
        memory_gb: in 10^9 bytes: on CUDA the peak of one device, elsewhere what this process has in use.
        seconds_per_step, tokens_per_second, positions_per_second, hours: measured, the last for all steps.
    """

    trainable_parameters: int
    target_parameters: int
    num_texts: int
    num_tokens: int
    steps: int
    tokens_per_step: float
    positions_per_step: float
    memory_gb: float
    seconds_per_step: float
    tokens_per_second: float
    positions_per_second: float
    hours: float


def estimate(config: TrainingConfig) -> Estimate:
    """Load everything and run a few steps of `config`, without writing a file.

    Raises:
        ValueError: as `train` does.
    """
    return measure(Run(config))


def measure(run: Run, warm_up: int = WARM_UP, measured: int = MEASURED) -> Estimate:
    """Cost of the next steps of a run, which it takes."""
    for _ in range(warm_up):
        run.take_step()
        run.step += 1
    _wait(run.accelerator.device)
    started, tokens, positions = time.perf_counter(), 0, []
    for _ in range(measured):
        outputs, count = run.take_step()
        run.step += 1
        tokens += count
        positions += [output.num_slots for output in outputs]
    _wait(run.accelerator.device)
    seconds = (time.perf_counter() - started) / measured
    slots = float(run.accelerator.reduce(torch.stack(positions).sum(), reduction="sum")) / measured
    trainable = [p.numel() for p in run.draft.parameters() if p.requires_grad]
    return Estimate(
        trainable_parameters=sum(trainable),
        target_parameters=sum(p.numel() for p in run.teacher.target.parameters()),
        num_texts=len(run.texts),
        num_tokens=run.texts.num_tokens,
        steps=run.total,
        tokens_per_step=tokens / measured,
        positions_per_step=slots,
        memory_gb=_memory(run.accelerator.device) / 1e9,
        seconds_per_step=seconds,
        tokens_per_second=tokens / measured / seconds,
        positions_per_second=slots / seconds,
        hours=seconds * run.total / 3600,
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)  # recordings keep memory that does not count as allocated
    return psutil.Process().memory_info().rss
