"""What the documents show works: Python blocks run, commands parse, numbers are those of the JSON files."""

import copy
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, LogitsProcessor

import hf_dspark
import tiny
from hf_dspark.cli import app

ROOT = Path(__file__).resolve().parents[1]
README, CLI = (ROOT / "README.md").read_text(), (ROOT / "docs" / "cli.md").read_text()
COMMANDS = sorted({line.split("  #")[0].strip() for line in re.findall(r"^hf-dspark .*$", README + CLI, re.MULTILINE)})


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def hub(monkeypatch):
    """A tiny pair in place of what is loaded by name."""
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template, tokenizer.pad_token = "{% for m in messages %}{{ m['content'] }}{% endfor %}", "_"
    pair = copy.deepcopy(tiny.perm_target()), tiny.perm_draft(), tokenizer
    for kind, thing in zip((AutoModelForCausalLM, AutoModel, AutoTokenizer), pair, strict=True):
        monkeypatch.setattr(kind, "from_pretrained", lambda *args, thing=thing, **kwargs: thing)
    monkeypatch.setattr(hf_dspark, "load_default_pair", lambda: pair)


def test_python_blocks_of_the_readme_run_in_order(hub):
    names = {"LogitsProcessor": LogitsProcessor}
    for block in blocks(README, "python"):
        exec(compile(block, "README.md", "exec"), names)
    mask = names["batch"]["attention_mask"]
    assert mask[:, -1].all() and not mask[:, 0].all()  # padded, and on the left
    assert names["out"].shape[0] == 2 and names["stats"].path == "plain" and names["stats"].num_rounds > 1


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line):
    command = typer.main.get_command(app)
    verb, *arguments = shlex.split(line)[1:]
    if verb == "VERB":
        return
    command.commands[verb].make_context(verb, arguments)


def test_an_unknown_option_does_not_parse():
    command = typer.main.get_command(app)
    with pytest.raises(Exception, match="--no-such-option"):
        command.commands["bench"].make_context("bench", ["--no-such-option"])


@pytest.mark.parametrize("script", ["write_numbers.py", "write_card.py"])
def test_numbers_are_up_to_date(script):
    script = ROOT / "benchmarks" / script
    result = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
