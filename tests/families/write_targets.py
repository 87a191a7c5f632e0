"""Writes docs/targets.json and docs/targets.md: `python tests/families/write_targets.py [FAMILY ...]`.

Without names all families are run; with names only those, and the other rows stay as they are.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
VERSION = "5.24.0"
JSON, MARKDOWN = ROOT / "docs" / "targets.json", ROOT / "docs" / "targets.md"
HEAD = """# Targets

What happens when a model of a family is the target of a draft. Each family was run as a tiny random model in float32,
with a draft whose rounds accept 0, 1, 2, 3 and 4 of 4 drafts, and its greedy text compared with plain `generate()`,
token for token. `python tests/families/write_targets.py` writes the table from those runs (transformers {version},
CPU), and the tests in `tests/families/` repeat them.

| | |
|---|---|
| drafts | rounds of drafts over transformers' own cache (`stats.path` `"plain"`) |
| fast path | rounds on the cache of the fast path (`stats.path` `"ragged"`) |
| no drafts | plain decoding; the log and `stats.reason` give the reason below |
| refused | `ValueError` before anything is computed |

A static cache is `cache_implementation="static"`.

{table}

"""
WORDS = {"plain": "drafts", "ragged": "fast path", "target_only": "no drafts", "refused": "refused"}
COLUMNS = {
    "one": "one sequence",
    "static": '`cache_implementation="static"`',
    "batch": "batch",
    "image": "with an image",
}


def as_markdown(rows: dict[str, dict[str, Any]]) -> str:
    reasons: list[str] = []

    def cell(result: dict[str, str] | None) -> str:
        if result is None:
            return ""
        if result["path"] == "ragged" or result["reason"].startswith("one sequence over"):
            return WORDS[result["path"]]
        if result["reason"] not in reasons:
            reasons.append(result["reason"])
        return f"{WORDS[result['path']]} [{reasons.index(result['reason']) + 1}]"

    lines = ["| family | " + " | ".join(COLUMNS.values()) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name, row in rows.items():
        lines.append(f"| {name} | " + " | ".join(cell(row.get(form)) for form in COLUMNS) + " |")
    lines += ["", *(f"{number}. {reason}" for number, reason in enumerate(reasons, start=1))]
    return HEAD.format(version=VERSION, table="\n".join(lines)).rstrip() + "\n"


def main(names: list[str]) -> None:
    sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests")]
    import torch
    import transformers
    from tqdm import tqdm

    import survey
    from targets import FAMILIES

    assert transformers.__version__ == VERSION, f"the table is that of transformers {VERSION}"
    torch.set_num_threads(1)
    rows = json.loads(JSON.read_text()) if names else {}
    for name in tqdm(names or FAMILIES):
        rows[name] = survey.run(name)
        rows[name].pop("accepted")
    rows = {name: rows[name] for name in FAMILIES if name in rows}
    JSON.write_text(json.dumps(rows, indent=1) + "\n")
    MARKDOWN.write_text(as_markdown(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
