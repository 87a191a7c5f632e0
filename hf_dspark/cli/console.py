"""What the commands print. Results go to stdout; everything about the run goes to stderr."""

import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.text import Text

import hf_dspark

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def error(message: object) -> None:
    """One red line; line breaks of a message that was written for a traceback are folded."""
    err.print(Text(f"Error: {' '.join(str(message).split())}", style="red"))


def note(message: str) -> None:
    err.print(Text(message, style="dim"))


def progress(iterable: Iterable[Any], total: int) -> Iterable[Any]:
    return track(iterable, "measuring", total=total, console=err)


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    return {
        "hf_dspark": hf_dspark.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def check_json_path(path: Path | None, option: str = "--json") -> None:
    """Refuse an unwritable file of an option before the work, not after it.

    Raises:
        ValueError: its folder does not exist, or it is a folder.
    """
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"`{option} {path}` cannot be written: give a file in a folder that exists.")


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Write `result` and the versions, unless `path` is None."""
    if path is not None:
        text = json.dumps(result | {"versions": versions()}, indent=2, ensure_ascii=False, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")
