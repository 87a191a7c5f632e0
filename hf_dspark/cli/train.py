"""`hf-dspark train`."""

import dataclasses
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from accelerate import PartialState
from rich.table import Table

from .._hub_files import file_sha256
from ..training import TrainingConfig, estimate
from ..training import train as run_training
from . import console
from .options import JsonPath, Target


class HeadType(StrEnum):
    """Values of `--markov-head-type`."""

    vanilla = "vanilla"
    gated = "gated"
    rnn = "rnn"


class Precision(StrEnum):
    """Values of `--mixed-precision`."""

    auto = "auto"
    no = "no"
    bf16 = "bf16"


class SavedDType(StrEnum):
    """Values of `--dtype`."""

    bfloat16 = "bfloat16"
    float32 = "float32"
    float16 = "float16"


DEFAULTS = {f.name: f.default for f in dataclasses.fields(TrainingConfig)}
DATA, DRAFT, LOSS, STEPS, RUN = "Texts", "Draft", "Objective", "Optimisation", "Run"


def option(panel: str, text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


def train(
    data: Annotated[list[Path], option(DATA, "JSONL of `hf-dspark synthesize`; may be given again.")],
    output_dir: Annotated[Path, option(RUN, "For checkpoints, metrics and the finished draft.")],
    target: Target = None,
    validation_data: Annotated[list[Path] | None, option(DATA, "JSONL to measure on.")] = None,
    num_validation_texts: Annotated[int, option(DATA, "Held back from the data otherwise; 0 for none.")] = 64,
    max_length: Annotated[int, option(DATA, "Texts are cut to this many tokens.")] = 1024,
    init_from: Annotated[str | None, option(DRAFT, "Folder or hub id of a draft to go on from.")] = None,
    num_hidden_layers: Annotated[int, option(DRAFT, "Draft layers.")] = 2,
    block_size: Annotated[int, option(DRAFT, "γ, drafts a round.")] = 7,
    target_layer_ids: Annotated[
        str | None, option(DRAFT, "Taps, such as 1,8,14; by default 5 from layer 1 to depth − 3.")
    ] = None,
    mask_token_id: Annotated[int | None, option(DRAFT, "By default a row of the vocabulary without text.")] = None,
    markov_rank: Annotated[int, option(DRAFT, "0 trains a DFlash draft.")] = 256,
    markov_head_type: Annotated[HeadType, option(DRAFT, "Kind of Markov head.")] = HeadType.vanilla,
    enable_confidence_head: Annotated[bool, option(DRAFT, "Train a confidence head.")] = True,
    from_target: Annotated[bool, option(DRAFT, "Begin with the target's last layers where they fit.")] = True,
    ce: Annotated[float, option(LOSS, "Weight of the cross-entropy.")] = 0.1,
    tv: Annotated[float, option(LOSS, "Weight of Σ|q − p|.")] = 0.9,
    confidence: Annotated[float, option(LOSS, "Weight of the confidence head.")] = 1.0,
    decay: Annotated[float, option(LOSS, "Slots over which weights fall by e.")] = 4.0,
    num_anchors: Annotated[int, option(LOSS, "Blocks a text and step.")] = 48,
    max_steps: Annotated[int | None, option(STEPS, "Optimiser steps; otherwise --num-epochs.")] = None,
    num_epochs: Annotated[int, option(STEPS, "Passes over the data.")] = 1,
    batch_size: Annotated[int, option(STEPS, "Texts a device and forward.")] = 32,
    gradient_accumulation_steps: Annotated[int, option(STEPS, "Forwards a step.")] = 1,
    learning_rate: Annotated[float, option(STEPS, "Highest; a cosine leads from it to 0.")] = 1e-3,
    markov_learning_rate: Annotated[
        float | None, option(STEPS, "Of the Markov tables; by default 4 times that.")
    ] = None,
    warmup_ratio: Annotated[float, option(STEPS, "Share of the steps.")] = 0.04,
    weight_decay: Annotated[float, option(STEPS, "Of matrices.")] = 0.0,
    adam_beta1: Annotated[float, option(STEPS, "AdamW.")] = 0.9,
    adam_beta2: Annotated[float, option(STEPS, "AdamW.")] = 0.95,
    max_grad_norm: Annotated[float, option(STEPS, "Gradients are clipped to this norm.")] = 1.0,
    mixed_precision: Annotated[Precision, option(STEPS, "auto is bf16 on CUDA.")] = Precision.auto,
    compile: Annotated[bool | None, option(STEPS, "Compile layers, record steps; by default on CUDA.")] = None,
    seed: Annotated[int, option(STEPS, "Of weights, order and anchors.")] = 0,
    log_every: Annotated[int, option(RUN, "Steps.")] = 10,
    validate_every: Annotated[int, option(RUN, "Steps.")] = 500,
    save_every: Annotated[int, option(RUN, "Steps.")] = 500,
    keep_checkpoints: Annotated[int, option(RUN, "Older ones are removed.")] = 2,
    resume: Annotated[bool, option(RUN, "Go on from the newest checkpoint, if there is one.", "--resume")] = False,
    dtype: Annotated[SavedDType, option(RUN, "Of the target and the finished draft.")] = SavedDType.bfloat16,
    tensorboard: Annotated[bool | None, option(RUN, "By default if TensorBoard is installed.")] = None,
    dry_run: Annotated[bool, option(RUN, "Measure a few steps, print what the run costs, stop.", "--dry-run")] = False,
    json: JsonPath = None,
) -> None:
    """Train a draft for a target, on texts that the target wrote. Features are computed as they are needed."""
    console.check_json_path(json)
    given = locals()
    values = {name: _plain(given[name]) for name in DEFAULTS}
    values["validation_data"] = values["validation_data"] or []
    values["target_layer_ids"] = _numbers(target_layer_ids)
    config = TrainingConfig(**values)
    if dry_run:
        costs = dataclasses.asdict(estimate(config))
        if not PartialState().is_main_process:
            return
        _show("What the run costs", costs)
        console.write_json(json, {"config": values, "estimate": costs})
        return
    try:
        result = run_training(config)
    except FloatingPointError as error:
        console.error(error)
        raise typer.Exit(1) from error
    if not PartialState().is_main_process:
        return
    validation = None if result.validation is None else dataclasses.asdict(result.validation)
    if validation:
        _show("Validation", validation)
    console.out.print(f"Draft after {result.step} steps: {result.draft}", markup=False)
    summary = {"draft": str(result.draft), "step": result.step, "validation": validation}
    if json is not None:
        hashes = {path: file_sha256(path) for path in [*config.data, *config.validation_data]}
        console.write_json(json, {"config": values, "data_sha256": hashes} | summary)


def _plain(value: Any) -> Any:
    """Typer's values as the config has them."""
    if isinstance(value, list):
        return [str(path) for path in value]
    return str(value) if isinstance(value, (Path, StrEnum)) else value


def _numbers(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"`--target-layer-ids {text}` must be numbers with commas between, such as 1,8,14.") from error


def _show(title: str, values: dict[str, Any]) -> None:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in values.items():
        table.add_row(name, _number(value))
    console.out.print(table)


def _number(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(_number(v) for v in value)
    if isinstance(value, float):
        return f"{value:,.3f}" if value < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
