"""Write the tables of flags in docs/cli.md from the command line itself; the words around them are written by hand.

python docs/write_cli.py            # rewrite
python docs/write_cli.py --check    # exit code 1 if they are not up to date
"""

import re
import sys
from pathlib import Path

import typer

from hf_dspark.cli import app

PAGE = Path(__file__).with_name("cli.md")
BEGIN, END = "<!-- flags:begin -->", "<!-- flags:end -->"
DEFAULT = re.compile(r"\s*\[(?:default: )?(.*)\]$")  # how typer ends the help of an option


def flags(verb: str) -> str:
    """The table of a verb: a flag with its kind of value, its default, its help."""
    command = typer.main.get_command(app).commands[verb]
    context = command.make_context(verb, [], resilient_parsing=True)
    lines = ["| flag | default | |", "|---|---|---|"]
    for record in filter(None, (one.get_help_record(context) for one in command.params)):
        flag, meaning = (text.replace("|", "\\|") for text in record)
        default = DEFAULT.search(meaning)
        shown = default[1].removeprefix("(").removesuffix(")") if default else ""
        lines.append(f"| `{flag}` | {shown} | {DEFAULT.sub('', meaning)} |")
    if len(lines) == 2:
        return "No flags."
    return "\n".join(["<details><summary>All flags</summary>", "", *lines, "", "</details>"])


def page(text: str) -> str:
    """The page with fresh tables, each at the end of its verb's section."""
    text = re.sub(f"{BEGIN}.*?{END}\n+", "", text, flags=re.DOTALL)
    head, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    verbs = [section.splitlines()[0].removeprefix("## ") for section in sections]
    if wrong := set(verbs) ^ set(typer.main.get_command(app).commands):
        sys.exit(f"{PAGE.name} needs one section for each verb and no other; see {', '.join(sorted(wrong))}.")
    done = [f"{s.strip()}\n\n{BEGIN}\n{flags(v)}\n{END}\n" for v, s in zip(verbs, sections, strict=True)]
    return head + "\n".join(done)


def main() -> None:
    before = PAGE.read_text()
    after = page(before)
    if "--check" in sys.argv[1:]:
        sys.exit("Run `python docs/write_cli.py`: cli.md is not up to date." if before != after else 0)
    PAGE.write_text(after)


if __name__ == "__main__":
    main()
