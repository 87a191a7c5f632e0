"""`hf-dspark synthesize`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from ..training import SynthesisConfig
from ..training import synthesize as run_synthesis
from . import console
from .options import JsonPath, Target
from .train import SavedDType


def synthesize(
    output: Annotated[Path, typer.Option(help="JSONL to write, a conversation a line.")],
    target: Target = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(help="JSONL with `messages`, `turns` or `prompt`, or *.txt; may be repeated.")
    ] = None,
    samples_per_prompt: Annotated[int, typer.Option(help="Conversations for each prompt.")] = 1,
    num_own: Annotated[int, typer.Option(help="Conversations whose user turns the target writes too.")] = 0,
    topics: Annotated[list[Path] | None, typer.Option(help="A topic a line, for these user turns.")] = None,
    turns: Annotated[int, typer.Option(help="Most user turns of its own conversations.")] = 1,
    temperatures: Annotated[str, typer.Option(help="Of the answers, in turn for each batch.")] = "0,0.7,0,1",
    user_temperature: Annotated[float, typer.Option(help="Of user turns.")] = 0.8,
    max_length: Annotated[int, typer.Option(help="Tokens of a conversation.")] = 1024,
    max_user_tokens: Annotated[int, typer.Option(help="Tokens of a user turn.")] = 128,
    max_answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Conversations at a time.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    dtype: Annotated[SavedDType, typer.Option(help="Number format of the target.")] = SavedDType.bfloat16,
    device: Annotated[str | None, typer.Option(help="cuda, cpu ...", show_default="cuda if there is one")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")] = False,
    json: JsonPath = None,
) -> None:
    """Let a target write the texts that a draft for it is trained on."""
    console.check_json_path(json)
    config = SynthesisConfig(
        output=str(output),
        target=target,
        prompts=[str(path) for path in prompts or []],
        samples_per_prompt=samples_per_prompt,
        num_own=num_own,
        topics=[str(path) for path in topics or []],
        turns=turns,
        temperatures=_temperatures(temperatures),
        user_temperature=user_temperature,
        max_length=max_length,
        max_user_tokens=max_user_tokens,
        max_answer_tokens=max_answer_tokens,
        batch_size=batch_size,
        seed=seed,
        dtype=dtype.value,
        device=device,
        resume=resume,
    )
    result = run_synthesis(config)
    console.out.print(
        f"{result.output}: {result.num_conversations:,} conversations of {result.num_tokens:,} tokens, "
        f"{result.num_supervised_tokens:,} of them supervised; {result.num_dropped:,} conversations dropped",
        markup=False,
    )
    console.note(f"{result.tokens_per_second:,.0f} tokens/s")
    values = dataclasses.asdict(result) | {"output": str(result.output)}
    console.write_json(json, {"config": dataclasses.asdict(config)} | values)


def _temperatures(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"`--temperatures {text}` must be numbers with commas between, such as 0,0.7.") from error
