"""`hf-dspark card`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from .. import hub
from . import console


def card(
    draft: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of the draft; the card goes there.")],
    target: Annotated[str, typer.Option(help="Hub id of the target, the card's base_model.")],
    results: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="What eval, bench, calibrate, train or synthesize wrote with --json."),
    ] = None,
    repo_id: Annotated[str, typer.Option(help="Where it will be published.")] = "USER/NAME",
    license: Annotated[str | None, typer.Option(help="Of the draft, such as apache-2.0.")] = None,
    language: Annotated[list[str] | None, typer.Option(help="Of the texts, such as en; may be repeated.")] = None,
    datasets: Annotated[list[str] | None, typer.Option(help="Hub ids of training data; may be repeated.")] = None,
    tags: Annotated[list[str] | None, typer.Option(help="More tags; may be repeated.")] = None,
    notes: Annotated[Path | None, typer.Option(metavar="FILE", help="Markdown that goes in as it is.")] = None,
) -> None:
    """Make a draft's folder ready for the hub: a model card from measured numbers, and the file that
    `trust_remote_code=True` looks for. Nothing is uploaded; the command that does is printed."""
    if not draft.is_dir():
        raise ValueError(f"`--draft {draft}` must be a local folder: the card is written into it.")
    path = hub.write_card(
        draft,
        results or (),
        target=target,
        repo_id=None if repo_id == "USER/NAME" else repo_id,
        license=license,
        language=language or (),
        datasets=datasets or (),
        tags=tags or (),
        notes=None if notes is None else notes.read_text(encoding="utf-8"),
    )
    console.note(f"written: {path}")
    console.out.print(f"To publish:\n  hf upload {repo_id} {shlex.quote(str(draft))}", markup=False)
