"""Training on accelerate: one process or many, bfloat16, and runs that go on after a kill as if nothing had been."""

import dataclasses
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, is_tensorboard_available, set_seed
from torch import nn
from transformers import get_cosine_schedule_with_warmup
from transformers.utils import logging

from ..compiling import first_line
from ..modeling_dspark import DSparkForCausalLM
from . import checkpoint, metrics
from .anchors import sample_anchors
from .blocks import BlockOutput, forward_blocks
from .config import TrainingConfig
from .data import Batch
from .losses import LossOutput, dspark_loss
from .optimizer import make_optimizer
from .recording import RecordedStep
from .rows import LogitRows
from .setup import load_parts

logger = logging.get_logger(__name__)

FINISHED = "draft"
METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class TrainingResult:
    """`draft`: folder of the finished draft. `step`: optimiser steps. `validation`: at the end, `None` without any."""

    draft: Path
    step: int
    validation: metrics.Validation | None


def train(config: TrainingConfig) -> TrainingResult:
    """Train a draft for a frozen target, whose features are computed as they are needed and never stored.

    `output_dir` receives `checkpoint-<step>/`, `metrics.jsonl` (one JSON object a line), TensorBoard logs, and at the
    end `draft/`, which `from_pretrained` reads. A run that was killed goes on with `resume=True`: on the same machine
    the weights become bit for bit those of an uninterrupted run.

    Several GPUs: `accelerate launch --num_processes N --no_python hf-dspark train ...`.

    Raises:
        ValueError: for arguments that do not fit the target, the data or the run in `output_dir`; the message says how.
        FloatingPointError: the loss is no longer finite.
    """
    run = Run(config)
    run.resume()
    return run.loop()


class Objective(nn.Module):
    """Draft and loss as one module, so that gradients are shared between processes when its forward was called."""

    def __init__(self, draft: DSparkForCausalLM, slot_logits: Callable[..., LogitRows], config: TrainingConfig):
        super().__init__()
        self.draft, self.slot_logits = draft, slot_logits
        on_cuda = draft.device.type == "cuda"
        self.use_bfloat16 = config.mixed_precision == "bf16" or (config.mixed_precision == "auto" and on_cuda)
        self.weights: dict[str, Any] = {
            "ce": config.ce,
            "tv": config.tv,
            "confidence": config.confidence,
            "decay": config.decay,
        }

    def forward(self, *inputs: torch.Tensor) -> LossOutput:
        """Loss of `Run.inputs`."""
        with self.autocast():
            return dspark_loss(*self.logits(*inputs), **self.weights)

    def logits(self, last_hidden: torch.Tensor, *inputs: torch.Tensor) -> tuple[BlockOutput, LogitRows]:
        """What the draft says, and the target's logits for the same slots."""
        block = forward_blocks(self.draft, *inputs, lazy=True)
        anchors = inputs[3]
        return block, self.slot_logits(last_hidden, anchors, self.draft.config.num_draft_tokens)

    def autocast(self) -> torch.autocast:
        """Ours and not accelerate's, whose precision is one for all runs of a process."""
        return torch.autocast(self.draft.device.type, dtype=torch.bfloat16, enabled=self.use_bfloat16)


class Run:
    """One training run: its parts, and where it stands (`step`)."""

    def __init__(self, config: TrainingConfig):
        self.config, self.step = config, 0
        self.folder = Path(config.output_dir)
        self.accelerator = make_accelerator(config)
        device = self.accelerator.device
        set_seed(config.seed)
        self.newest = self._newest_checkpoint()
        parts = load_parts(config, device, self.newest)
        self.teacher, self.texts, self.validation_texts = parts.teacher, parts.texts, parts.validation_texts
        self.draft = parts.draft
        if len(self.texts) < self.accelerator.num_processes:
            raise ValueError(f"{len(self.texts)} texts are too few for {self.accelerator.num_processes} processes.")
        self.per_epoch = len(self.texts.order(self.global_batch, config.seed, 0))
        self.total = config.max_steps or max(
            1, config.num_epochs * self.per_epoch // config.gradient_accumulation_steps
        )
        self.optimizer = make_optimizer(self.draft, config)
        self.scheduler = get_cosine_schedule_with_warmup(
            self.optimizer, round(config.warmup_ratio * self.total), self.total
        )
        self.objective = self.accelerator.prepare(Objective(self.draft, self.teacher.slot_logits, config))
        self.optimizer = self.accelerator.prepare(self.optimizer)
        self.recorded = self._recorded_step()
        self._order: tuple[int, list[list[int]]] = (-1, [])

    @property
    def global_batch(self) -> int:
        return self.config.batch_size * self.accelerator.num_processes

    # ---- the data and the random choices of a step: functions of the seed and the number of the forward

    def batch(self, forward: int) -> Batch:
        """This process's share of the batch of a forward."""
        epoch, index = divmod(forward, self.per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, self.texts.order(self.global_batch, self.config.seed, epoch))
        rank, count = self.accelerator.process_index, self.accelerator.num_processes
        return self.texts.batch(self._order[1][index][rank::count])

    def inputs(self, batch: Batch, name: str) -> tuple[torch.Tensor, ...]:
        """Arguments of the objective: the target's last hidden states, then those of `forward_blocks`.

        `name` names the random stream of the anchors.
        """
        seed = random.Random(f"anchors {self.config.seed} {name} {self.accelerator.process_index}").getrandbits(62)
        generator = torch.Generator().manual_seed(seed)
        anchors, keep = sample_anchors(batch.loss_mask, self.config.num_anchors, generator)
        ids, mask, anchors, keep = map(self._on_device, (batch.input_ids, batch.loss_mask, anchors, keep))
        features, last_hidden = self.teacher.read(ids)
        return last_hidden, ids, mask, features, anchors, keep

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copied without waiting for the device, so that steps follow each other at once."""
        device = self.accelerator.device
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

    # ---- training

    def loop(self) -> TrainingResult:
        config, result = self.config, None
        hidden = not self.accelerator.is_main_process
        progress = logging.tqdm(total=self.total, initial=self.step, desc="train", unit="step", disable=hidden or None)
        losses: list[LossOutput] = []
        started, tokens = time.perf_counter(), 0
        while self.step < self.total:
            outputs, count = self.take_step()
            losses, tokens = losses + outputs, tokens + count
            self.step += 1
            progress.update()
            at_end = self.step == self.total
            if self.step % config.log_every == 0 or at_end:
                self._log_losses(losses, tokens / (time.perf_counter() - started))
                losses, started, tokens = [], time.perf_counter(), 0
            if self.validation_texts and (self.step % config.validate_every == 0 or at_end):
                result = self.validate()
            if self.step % config.save_every == 0 or at_end:
                self.save()
        progress.close()
        if self.validation_texts and result is None:  # the run was finished already
            result = self.validate()
        self.accelerator.end_training()
        return TrainingResult(self._write_draft(), self.step, result)

    def take_step(self) -> tuple[list[LossOutput], int]:
        """One optimiser step; the losses of its forwards, without gradients, and the tokens read by all processes."""
        count, outputs, tokens = self.config.gradient_accumulation_steps, [], 0
        for i in range(count):
            forward = self.step * count + i
            batch = self.batch(forward)
            inputs = self.inputs(batch, str(forward))
            with self.accelerator.accumulate(self.objective):
                output = self._add_gradients(inputs)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.draft.parameters(), self.config.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=self.recorded is None)
            outputs.append(output)
            tokens += batch.input_ids.numel() * self.accelerator.num_processes
        self.scheduler.step()
        return outputs, tokens

    def _add_gradients(self, inputs: tuple[torch.Tensor, ...]) -> LossOutput:
        """The loss of a forward, without gradients, which its backward has added to the parameters."""
        if self.recorded is not None:
            try:
                if not len(self.recorded):  # what the longest texts need is enough for all that follow
                    longest = self.texts.batch(self.texts.longest(len(inputs[1])))
                    self.recorded.record(*self.inputs(longest, "longest"))
                return self.recorded(*inputs)
            except RuntimeError as error:
                logger.warning(f"Steps are not recorded, which makes them slower: {first_line(error)}")
                self.recorded = None
        output = self.objective(*inputs)
        self.accelerator.backward(output.loss)
        return dataclasses.replace(output, loss=output.loss.detach())

    def _recorded_step(self) -> RecordedStep | None:
        """Steps of one GPU are recorded; several share gradients during the backward, out of a recording's sight."""
        config, alone = self.config, self.accelerator.distributed_type is DistributedType.NO
        if self.accelerator.device.type != "cuda" or config.compile is False or not alone:
            return None
        trained = [parameter for parameter in self.draft.parameters() if parameter.requires_grad]
        return RecordedStep(self.objective, trained, 1 / config.gradient_accumulation_steps)

    @torch.no_grad()
    def validate(self) -> metrics.Validation:
        """Measure on the validation texts, always with the same anchors."""
        assert self.validation_texts is not None
        sums = torch.zeros(5 + 2 * self.draft.config.num_draft_tokens, dtype=torch.float64)
        sums = sums.to(self.accelerator.device)
        size, count = self.config.batch_size, self.accelerator.num_processes
        indices = list(range(len(self.validation_texts)))[self.accelerator.process_index :: count]
        for start in range(0, len(indices), size):
            batch = self.validation_texts.batch(indices[start : start + size])
            inputs = self.inputs(batch, f"validation {start}")
            objective = self.accelerator.unwrap_model(self.objective)
            with objective.autocast():
                sums += metrics.block_sums(*objective.logits(*inputs))
        sums = self.accelerator.reduce(sums, reduction="sum")
        result = metrics.summarise(sums, has_confidence=self.draft.config.enable_confidence_head)
        self._record(metrics.flat(result))
        return result

    # ---- what a run leaves behind

    def _log_losses(self, losses: list[LossOutput], tokens_per_second: float) -> None:
        means = {
            name: torch.stack([getattr(loss, name) for loss in losses]).mean()
            for name in ("loss", "ce", "tv", "confidence")
        }
        means = {f"train/{name}": float(self.accelerator.reduce(x, reduction="mean")) for name, x in means.items()}
        if not all(abs(value) < float("inf") for value in means.values()):
            raise FloatingPointError(
                f"The loss is not finite at step {self.step}: {means}. Begin again with a lower `learning_rate`, or "
                "from the last checkpoint's draft with `init_from` and another `output_dir`."
            )
        rate = self.scheduler.get_last_lr()[0]
        self._record(means | {"train/learning_rate": rate, "train/tokens_per_second": tokens_per_second})

    def _record(self, values: dict[str, float]) -> None:
        self.accelerator.log(values, step=self.step)
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / METRICS).open("a") as file:
                file.write(json.dumps({"step": self.step} | values) + "\n")

    def save(self) -> None:
        if self.accelerator.is_main_process:
            state = {"config": self.config.fingerprint(), "processes": self.accelerator.num_processes}
            state |= {"scheduler": self.scheduler.state_dict(), "total": self.total}
            optimizer = self.optimizer.optimizer
            checkpoint.save(self.folder, self.step, self.draft, optimizer, state, self.config.keep_checkpoints)
        self.accelerator.wait_for_everyone()

    def _newest_checkpoint(self) -> Path | None:
        found = checkpoint.checkpoints(self.folder)
        if found and not self.config.resume:
            raise ValueError(
                f"{self.folder} holds {found[-1].name} of a run. Set `resume=True` to go on with it, or give another "
                "`output_dir`."
            )
        return found[-1] if found else None

    def resume(self) -> None:
        """Take over the state of the newest checkpoint, if the run has one; the draft has its weights already."""
        if self.config.tensorboard or (self.config.tensorboard is None and is_tensorboard_available()):
            self.accelerator.init_trackers("tensorboard")
        if self.newest is None:
            if self.accelerator.is_main_process:
                (self.folder / METRICS).unlink(missing_ok=True)  # of a run that was killed before its first checkpoint
            return
        state = checkpoint.read_state(self.newest)
        self._check_same_run(state)
        checkpoint.load_optimizer(self.newest, self.optimizer.optimizer)
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]
        if self.accelerator.is_main_process:
            _cut_metrics(self.folder / METRICS, self.step)
        logger.warning(f"Resumed from {self.newest} at step {self.step} of {self.total}.")

    def _check_same_run(self, state: dict[str, Any]) -> None:
        now = json.loads(json.dumps(self.config.fingerprint())) | {"processes": self.accelerator.num_processes}
        before = state["config"] | {"processes": state["processes"]}
        if now.keys() != before.keys():
            raise ValueError(
                f"{self.newest} is of another version of hf_dspark. Give another `output_dir`, with `init_from` for a "
                "new run from its draft."
            )
        changed = [f"`{k}` was {before[k]!r}, is {v!r}" for k, v in now.items() if before[k] != v]
        if changed:
            raise ValueError(
                f"{self.newest} is of another run: {'; '.join(changed)}. Give its values back, or another `output_dir` "
                "with `init_from` for a new run from its draft."
            )

    def _write_draft(self) -> Path:
        folder = self.folder / FINISHED
        if self.accelerator.is_main_process:
            dtype = getattr(torch, self.config.dtype)
            tensors = {name: tensor.to(dtype) for name, tensor in self.draft.state_dict().items()}
            before, self.draft.config.dtype = self.draft.config.dtype, dtype
            self.draft.save_pretrained(folder, state_dict=tensors)
            self.draft.config.dtype = before
        self.accelerator.wait_for_everyone()
        return folder


def make_accelerator(config: TrainingConfig) -> Accelerator:
    wanted = is_tensorboard_available() if config.tensorboard is None else config.tensorboard
    if wanted and not is_tensorboard_available():
        raise ValueError("`tensorboard=True`, but TensorBoard is not installed. Run `pip install tensorboard`.")
    return Accelerator(
        mixed_precision="no",
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        log_with="tensorboard" if wanted else None,
        project_dir=config.output_dir,
    )


def _cut_metrics(path: Path, step: int) -> None:
    """Forget what was logged after the checkpoint that a run goes on from; a line cut by a kill goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except ValueError:
            continue
    partial = path.with_suffix(".partial")
    partial.write_text("".join(f"{line}\n" for line in kept))
    partial.replace(path)
