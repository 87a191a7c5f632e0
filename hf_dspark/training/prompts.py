"""Prompt files of `synthesize`: JSONL with `messages`, `turns` or `prompt`, or plain text with one prompt a line."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Prompt(NamedTuple):
    """What a file gives of a conversation: a system prompt, perhaps, and the user's turns."""

    system: str | None
    turns: tuple[str, ...]


def read_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Number and text of each line. `str.splitlines` would also break at separators that JSON leaves inside strings."""
    with Path(path).open(encoding="utf-8") as file:
        yield from enumerate((line.rstrip("\n") for line in file), start=1)


def read_prompts(paths: Iterable[str | Path]) -> list[Prompt]:
    """All prompts of some files, each once. Answers in chats are left out: the target writes its own.

    Raises:
        ValueError: a line without a user's turn; names file and line.
    """
    found: dict[Prompt, None] = {}
    for path in map(Path, paths):
        for number, line in read_lines(path):
            if line.strip():
                prompt = Prompt(None, (line.strip(),)) if path.suffix == ".txt" else _parse(line, f"{path}:{number}")
                found[prompt] = None
    return list(found)


def _parse(line: str, place: str) -> Prompt:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is not JSON. Files with one prompt a line are called *.txt.") from error
    keys = record if isinstance(record, dict) else {}
    system, turns = None, keys.get("turns") or keys.get("prompt") or []
    if isinstance(keys.get("messages"), list):
        texts = [(m.get("role"), m.get("content")) for m in keys["messages"] if isinstance(m, dict)]
        system = next((content for role, content in texts if role == "system"), None)
        turns = [content for role, content in texts if role == "user"]
    turns = [turns] if isinstance(turns, str) else turns
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{place} has no user turns: give `messages`, `turns` or `prompt`.")
    return Prompt(system, tuple(turns))


def read_topics(paths: Iterable[str | Path]) -> list[str]:
    """Topics, one a line, each once."""
    lines = (line.strip() for path in paths for _, line in read_lines(path))
    return list(dict.fromkeys(line for line in lines if line))
