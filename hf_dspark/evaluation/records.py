"""Finished prompts in a file beside the report, so that an interrupted run goes on where it ended."""

import json
import os
from pathlib import Path
from typing import Any


class Records:
    """What was measured, one record a prompt or batch; with a path also a JSONL file that grows with each of them.

    While the run lasts the file is `<report>.partial.jsonl`, its first line says what is being measured. `finish`
    renames it to `<report>.records.jsonl`, which holds every round for other tools.

    Args:
        report (`Path`, *optional*): the report's path; `None` keeps records in memory only.
        settings: what the measurement depends on, JSON values. Records of another measurement are not mixed in.

    Raises:
        ValueError: an interrupted run with other settings lies there.
    """

    def __init__(self, report: Path | None, settings: dict[str, Any]):
        self.partial = None if report is None else report.with_suffix(".partial.jsonl")
        self.finished = None if report is None else report.with_suffix(".records.jsonl")
        self.by_name: dict[str, dict[str, Any]] = {}
        self._settings = json.loads(json.dumps(settings))
        if self.partial is not None and self.partial.exists():
            self._read(self.partial)
        elif self.partial is not None:
            self._write(self._settings)

    def _read(self, path: Path) -> None:
        """Take over the records of an interrupted run; a line that was cut off is measured again."""
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        lines = [json.loads(line) for line in whole.splitlines()]
        if not lines:
            os.truncate(path, 0)
            self._write(self._settings)
            return
        if lines[0] != self._settings:
            keys = sorted(lines[0].keys() | self._settings.keys())
            changed = [key for key in keys if lines[0].get(key) != self._settings.get(key)]
            raise ValueError(
                f"`{path}` is an interrupted run with other settings ({', '.join(changed)}): repeat its command to go "
                "on, or delete the file to begin anew."
            )
        self.by_name = {record["name"]: record for record in lines[1:]}
        os.truncate(path, len(whole))

    def add(self, record: dict[str, Any]) -> None:
        self._write(record)
        self.by_name[record["name"]] = record

    def _write(self, value: dict[str, Any]) -> None:
        if self.partial is not None:
            with self.partial.open("a", encoding="utf-8") as file:
                file.write(json.dumps(value, ensure_ascii=False) + "\n")

    def finish(self) -> None:
        """Call it once the report is written."""
        if self.partial is not None and self.finished is not None:
            os.replace(self.partial, self.finished)
