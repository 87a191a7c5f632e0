"""`hf-dspark check`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text
from transformers import AutoConfig

from .. import formats
from ..default_pair import default_draft_folder, setup_demo
from ..diagnosis import Diagnosis, check_configs, diagnose
from ..evaluation import load_prompt_sets
from . import console
from .models import check_pair_arguments, load_models
from .options import Device, Draft, DType, JsonPath, Target

STYLES = {"ok": "green", "note": "yellow", "problem": "red"}


def check(
    target: Target = None,
    draft: Draft = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="JSONL or parquet of prompts.", show_default="three short questions"),
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Only the first so many of each file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 64,
    chat_template: Annotated[
        bool | None, typer.Option(help="Use the chat template; by default if there is one.")
    ] = None,
    thinking: Annotated[bool | None, typer.Option(help="Thinking mode of the chat template.")] = None,
    cache_implementation: Annotated[str | None, typer.Option(help="static examines the fast path.")] = None,
    chi_squared: Annotated[
        bool, typer.Option("--chi-squared", help="Also test that sampled text follows the target's distribution.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    dtype: Annotated[
        DType, typer.Option(help="Number format of both models; only float32 can show equal texts.")
    ] = DType.float32,
    device_map: Device = "auto",
    json: JsonPath = None,
) -> None:
    """Examine a pair: does it fit, is its text exact, and if little is accepted, why. Ends in a verdict."""
    console.check_json_path(json)
    check_pair_arguments(target, draft)
    texts = None if prompts is None else load_prompt_sets(prompts, limit=num_prompts)
    names = target or str(setup_demo()), draft or str(default_draft_folder())
    found = check_configs(AutoConfig.from_pretrained(names[0]), formats.open_checkpoint(names[1]).config)
    diagnosis = Diagnosis(found)
    if diagnosis.healthy:  # so far: the weights are worth loading
        models = load_models(target, draft, dtype=dtype.value, device_map=device_map, plain=False)
        assert models.draft is not None
        diagnosis = diagnose(
            models.target,
            models.draft,
            models.tokenizer,
            texts,
            max_new_tokens=max_new_tokens,
            chat_template=chat_template,
            thinking=thinking,
            cache_implementation=cache_implementation,
            chi_squared=chi_squared,
            seed=seed,
            progress=console.progress,
        )
    show(diagnosis)
    console.write_json(json, {"target": names[0], "draft": names[1]} | diagnosis.to_dict())
    if not diagnosis.healthy:
        raise typer.Exit(1)


def show(diagnosis: Diagnosis) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for finding in diagnosis.findings:
        table.add_row(Text(finding.level, style=STYLES[finding.level]), finding.topic, Text(finding.seen))
    console.out.print(table)
    for reading in diagnosis.measured.get("readings", ()):
        what = f"{reading['layout']}, taps {reading['target_layer_ids']}, mask token {reading['mask_token_id']}"
        console.out.print(f"  {reading['drafts_kept']:.2f} drafts a round: {what}", markup=False)
    console.out.print(f"\n[bold]Verdict:[/bold] {diagnosis.verdict}")
    for number, step in enumerate(diagnosis.next_steps, start=1):
        console.out.print(f"  {number}. {step}", markup=False)
