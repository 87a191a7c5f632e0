"""`hf-dspark calibrate`."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..evaluation import load_prompt_sets
from ..evaluation.questions import write_questions
from ..scheduling import calibration
from . import console
from .models import Models, load_models
from .options import Device, Draft, DType, JsonPath, ModelDType, Target


def calibrate(
    target: Target = None,
    draft: Draft = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="JSONL or parquet of prompts; unset, the target writes questions itself."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Questions to write, or prompts of each file.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(help="Length of each text.")] = 256,
    holdout: Annotated[float, typer.Option(help="Share of the rounds kept for the report, 0 to 1.")] = 0.3,
    seed: Annotated[int, typer.Option(help="Seed of the texts and of the split.")] = 0,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Save the draft with its temperatures to this new folder.")
    ] = None,
    dtype: ModelDType = DType.auto,
    device_map: Device = "auto",
    json: JsonPath = None,
) -> None:
    """Fit the temperatures of a draft's confidence head (STS), so that a_j is the share of blocks that get that far."""
    console.check_json_path(json)
    if output is not None and output.exists():
        raise ValueError(f"`--output {output}` exists: give a new folder.")
    texts = None if prompts is None else load_prompt_sets(prompts, limit=num_prompts)
    models = load_models(target, draft, dtype=dtype.value, device_map=device_map, plain=False)
    assert models.draft is not None
    if texts is None:
        console.note(f"the target writes {num_prompts} questions")
        questions = write_questions(models.target, models.tokenizer, num_prompts, seed=seed)
        dataset = f"{num_prompts} questions written by the target"
    else:
        questions = [prompt.turns[0] for prompt in texts]
        dataset = ", ".join(dict.fromkeys(prompt.set for prompt in texts))
    report = calibration.calibrate(
        models.target,
        models.draft,
        as_prompts(models, questions),
        tokenizer=models.tokenizer,
        max_new_tokens=max_new_tokens,
        holdout=holdout,
        seed=seed,
    )
    report = replace(report, dataset=dataset)
    show(report)
    if output is None:
        console.note("not stored: `--output FOLDER` saves the draft with these temperatures")
    else:
        models.draft.save_pretrained(output)
        console.note(f"saved: {output}")
    console.write_json(json, asdict(report) | {"target": models.target_name, "draft": models.draft_name})


def as_prompts(models: Models, questions: list[str]) -> list[Any]:
    """Chats for a model with a chat template, texts for one without."""
    if models.tokenizer.chat_template is None:
        return list(questions)
    return [[{"role": "user", "content": question}] for question in questions]


def show(report: calibration.CalibrationReport) -> None:
    table = Table(title=f"{report.num_rounds} rounds from {report.dataset}", title_justify="left", box=None)
    for column in ("j", "temperature", "ECE a_j before", "after"):
        table.add_column(column, justify="right")
    columns = zip(report.temperatures, report.ece_by_position_before, report.ece_by_position, strict=True)
    for j, (temperature, before, after) in enumerate(columns, start=1):
        table.add_row(str(j), f"{temperature:.3f}", f"{before:.4f}", f"{after:.4f}")
    table.add_row("mean", "", f"{report.ece_before:.4f}", f"{report.ece_after:.4f}")
    console.out.print(table)
    for note in report.notes:
        console.note(note)
