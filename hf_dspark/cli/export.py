"""`hf-dspark export`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from transformers import AutoModelForCausalLM

from .. import hub
from ..default_pair import default_draft_folder, setup_demo
from ..modeling_dspark import DSparkForCausalLM
from . import console
from .models import check_pair_arguments
from .options import Draft, JsonPath, Target


class Format(StrEnum):
    """Values of `--format`."""

    deepspec = "deepspec"
    speculators = "speculators"


def export(
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="New folder to write.")],
    target: Target = None,
    draft: Draft = None,
    format: Annotated[Format, typer.Option(help="deepspec for vLLM and SGLang, speculators for vLLM.")] = (
        Format.deepspec
    ),
    include_shared: Annotated[
        bool, typer.Option(help="Also write embeddings and head; without them engines take the target's.")
    ] = True,
    json: JsonPath = None,
) -> None:
    """Write a draft as vLLM and SGLang serve it, and print the commands that do."""
    console.check_json_path(json)
    if output.exists():
        raise ValueError(f"`--output {output}` exists: give a new folder.")
    check_pair_arguments(target, draft)
    target = target or str(setup_demo())
    one = DSparkForCausalLM.from_pretrained(draft or default_draft_folder())
    if include_shared and not (one.config.has_embed_tokens and one.config.has_lm_head):
        one.attach_target(AutoModelForCausalLM.from_pretrained(target, dtype=one.dtype))
    result = hub.export(one, output, format=format.value, target=target, include_shared=include_shared)
    for engine, command in result.commands.items():
        console.out.print(f"{engine}:\n  {command}", markup=False)
    for engine, reason in result.refusals.items():
        console.note(f"not with {engine}: {reason}")
    console.write_json(json, {"folder": str(output), "commands": result.commands, "refusals": result.refusals})
