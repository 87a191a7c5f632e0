"""`hf-dspark bench`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..evaluation import ChatFormat, load_prompt_sets, measure_speed
from ..evaluation.speed import default_prompts
from . import console, eval_tables
from .models import load_models
from .options import Draft, DType, JsonPath, ModelDType, Target


def bench(
    target: Target = None,
    draft: Draft = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="JSONL or parquet of prompts.", show_default="three short questions"),
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Only the first so many, of each file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of every answer.")] = 128,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Rows of a call; may be repeated.", show_default="1")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Adds rows that sample.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Adds rows that sample.")] = None,
    repeats: Annotated[int, typer.Option(help="Passes over the prompts; numbers are their medians.")] = 5,
    no_compile: Annotated[
        bool, typer.Option("--no-compile", help="Leave out plain decoding compiled by transformers.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    dtype: ModelDType = DType.auto,
    device_map: Annotated[
        str, typer.Option("--device-map", "--device", help="Where the pair goes: auto, cpu, cuda, cuda:1 ...")
    ] = "auto",
    profile: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write a trace of a few rounds, for Perfetto.")
    ] = None,
    json: JsonPath = None,
) -> None:
    """Measure the speed of a pair on this machine against plain decoding, eager and compiled, in one run."""
    console.check_json_path(json)
    console.check_json_path(profile, "--profile")
    texts = default_prompts(num_prompts) if prompts is None else load_prompt_sets(prompts, limit=num_prompts)
    models = load_models(target, draft, dtype=dtype.value, device_map=device_map, plain=False)
    assert models.draft is not None
    report = measure_speed(
        models.target,
        models.draft,
        ChatFormat(models.tokenizer),
        texts,
        max_new_tokens=max_new_tokens,
        batch_sizes=batch_size or (1,),
        sampling=sampling(temperature, top_p),
        repeats=repeats,
        compiled=not no_compile,
        seed=seed,
        about={"target": models.target_name, "draft": models.draft_name},
        profile_path=profile,
        progress=console.progress,
    )
    eval_tables.show_speed(report)
    console.write_json(json, report)
    if profile is not None:
        console.note(f"trace: {profile}")
    if report["outputs"] == "different":
        console.error("Texts of DSpark differ from plain decoding's by more than a near tie: see `differences`.")
        raise typer.Exit(1)


def sampling(temperature: float | None, top_p: float | None) -> dict[str, Any] | None:
    """Options of the rows that sample; `None` without such rows."""
    if temperature is None and top_p is None:
        return None
    values = {"temperature": 1.0 if temperature is None else temperature, "top_p": 1.0 if top_p is None else top_p}
    return {"do_sample": True, "top_k": 0} | values
