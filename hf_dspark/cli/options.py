"""Options that several verbs share."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class DType(StrEnum):
    """Values of `--dtype`."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Target = Annotated[
    str | None, typer.Option(help="Folder or hub id of the target.", show_default="the embedded SmolLM2-135M-Instruct")
]
Draft = Annotated[
    str | None, typer.Option(help="Folder or hub id of the DSpark draft.", show_default="the embedded draft")
]
ModelDType = Annotated[DType, typer.Option(help="Number format of both models; auto is that of the target's file.")]
Device = Annotated[str, typer.Option(help="Where the target goes: auto, cpu, cuda, cuda:1 ... The draft follows it.")]
JsonPath = Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write the result to this file.")]
