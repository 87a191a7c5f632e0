"""Prompt sets from files: JSONL or parquet, one object a prompt, as DeepSpec and SPEED-Bench write them."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# SPEED-Bench ships some texts as this sentence; its own script fetches them from their sources.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True)
class Prompt:
    """One conversation to play: the user's messages.

    Attributes:
        set: name of its file without suffix.
        index: place in the file, from 0.
        turns: the user's messages in order; all of them are played.
        category: `None` if the file states none.
        details: the other fields of the file (`question_id`, `sub_category`, `difficulty` ...).
    """

    set: str
    index: int
    turns: tuple[str, ...]
    category: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.set}/{self.index}"


def load_prompt_sets(paths: Iterable[str | Path], *, limit: int | None = None) -> list[Prompt]:
    """The prompts of several files in order; arguments and errors as for `load_prompts`.

    Raises:
        ValueError: no file, or two files with one name.
    """
    files = [Path(path) for path in paths]
    if not files:
        raise ValueError("No prompts: give at least one file.")
    for number, file in enumerate(files):
        if file.stem in [other.stem for other in files[:number]]:
            raise ValueError(f"Two prompt files are named {file.stem}: rename one, their tables would be mixed.")
    return [prompt for file in files for prompt in load_prompts(file, limit=limit)]


def load_prompts(path: str | Path, *, limit: int | None = None) -> list[Prompt]:
    """The prompts of one file.

    Args:
        path (`str` or `Path`): `.jsonl` or `.parquet`; each object has `turns`, a list of the user's messages, and may
            have `category`. SPEED-Bench files have both, and `question_id`, `sub_category`, `source`, `src_id`,
            `difficulty` and `multiturn`, which are kept.
        limit (`int`, *optional*): only the first so many.

    Raises:
        ValueError: the file does not exist, is of another kind, is empty, or an object has no usable `turns`; the
            message says which.
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise ValueError(f"The number of prompts must be at least 1, got {limit}.")
    if not path.is_file():
        raise ValueError(f"`{path}`: there is no such file of prompts.")
    prompts: list[Prompt] = []
    for where, row in _rows(path):
        prompts.append(_prompt(path.stem, len(prompts), where, row))
        if len(prompts) == limit:
            break
    if not prompts:
        raise ValueError(f"`{path}` holds no prompts.")
    return prompts


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, object) of each prompt."""
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{path}, line {number}"
                    try:
                        yield where, json.loads(line)
                    except ValueError as error:
                        raise ValueError(f"{where} is not JSON: {error}") from error
    else:
        raise ValueError(f"`{path}`: prompts are read from .jsonl and .parquet files.")


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise ValueError(f'Reading `{path}` needs pyarrow: pip install "hf-dspark[eval]".') from error
    try:
        file = parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise ValueError(f"`{path}` is not a parquet file: {error}") from error
    number = 0
    for batch in file.iter_batches(batch_size=64):
        for row in batch.to_pylist():
            number += 1
            yield f"{path}, row {number}", row


def _prompt(name: str, index: int, where: str, row: Any) -> Prompt:
    if not isinstance(row, dict) or "turns" not in row:
        raise ValueError(f"{where}: expected an object with `turns`, a list of the user's messages.")
    turns, category = row["turns"], row.get("category")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise ValueError(f"{where}: `turns` must be a list of texts that are not empty, got {turns!r:.80}.")
    if any(PLACEHOLDER in turn for turn in turns):
        raise ValueError(
            f"{where}: the text is SPEED-Bench's placeholder. Fetch the texts with the data set's own script first."
        )
    details = {key: value for key, value in row.items() if key not in ("turns", "category")}
    return Prompt(name, index, tuple(turns), None if category is None else str(category), details)
