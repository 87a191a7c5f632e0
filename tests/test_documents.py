"""What the documents show works: Python blocks run, commands run or parse, tables and numbers are up to date."""

import copy
import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import typer
from command import run
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import hf_dspark
import tiny
from hf_dspark.cli import app, models

ROOT = Path(__file__).resolve().parents[1]
NAMES = "README.md", "docs/usage.md", "docs/cli.md", "docs/troubleshooting.md", "docs/training.md"
README, USAGE, CLI, TROUBLES, TRAINING = ((ROOT / name).read_text() for name in NAMES)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
HUB_IDS = {"Qwen/Qwen3-8B": "target", "deepseek-ai/dspark_qwen3_8b_block7": "draft"}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    lines = "".join(blocks(text, "bash")).splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.startswith("hf-dspark ")]


def tokenizer():
    one = copy.deepcopy(tiny.tokenizer())
    one.chat_template, one.pad_token = "{% for m in messages %}{{ m['content'] }}{% endfor %}", "_"
    return one


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A tiny pair in place of what is loaded by name, and the files that the blocks read."""
    pair = copy.deepcopy(tiny.perm_target()), tiny.perm_draft(), tokenizer()
    for kind, thing in zip((AutoModelForCausalLM, AutoModel, AutoTokenizer), pair, strict=True):
        monkeypatch.setattr(kind, "from_pretrained", lambda *args, thing=thing, **kwargs: thing)
    monkeypatch.setattr(hf_dspark.DSparkForCausalLM, "from_pretrained", lambda *args, **kwargs: pair[1])
    monkeypatch.setattr(hf_dspark, "load_default_pair", lambda: pair)
    monkeypatch.chdir(tmp_path)
    hf_dspark.CostModel({1: 6.0, 5: 6.3}).to_json("costs.json")


@pytest.mark.parametrize("text", [README, USAGE], ids=["README", "usage"])
def test_python_blocks_run_in_order(text, hub):
    names: dict = {}
    for block in blocks(text, "python"):
        exec(compile(block, "a document", "exec"), names)
    mask = names["batch"]["attention_mask"]
    assert mask[:, -1].all() and not mask[:, 0].all()  # padded, and on the left
    assert names["out"].shape[0] == 2 and names["stats"].path == "plain" and names["stats"].num_rounds > 1


@pytest.fixture
def tiny_folders(monkeypatch, tmp_path):
    """A working folder in which every command finds a tiny pair, whatever it calls it."""
    monkeypatch.chdir(tmp_path)
    tiny.perm_target().save_pretrained("target")
    tokenizer().save_pretrained("target")
    config = tiny.draft_config(vocab=tiny.V, rank=tiny.V)
    tensors = tiny.markov_tensors(config, tiny.one_hot_table(tiny.NEXT), torch.zeros(tiny.V))
    for folder in ("draft", "run/draft"):
        tiny.write_draft(tmp_path / folder, config, tensors)
    Path("questions.jsonl").write_text(json.dumps({"turns": ["abc"]}) + "\n")
    monkeypatch.setattr(models, "setup_demo", lambda: "target")
    monkeypatch.setattr(models, "default_draft_folder", lambda: "draft")


@pytest.mark.parametrize("text", [README, USAGE], ids=["README", "usage"])
def test_commands_run_in_order(text, tiny_folders, monkeypatch, capsys):
    """On the tiny pair; the demo up to where it would serve its page."""
    served = []
    monkeypatch.setattr("hf_dspark.cli.demo.launch", lambda *args, **kwargs: served.append(args))
    for line in commands(text):
        verb, *arguments = shlex.split(line)[1:]
        monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n\n"))  # for a chat
        if verb != "card":  # it does not read the target, only names it
            arguments = [HUB_IDS.get(one, one) for one in arguments]
        code, out, err = run([verb, *arguments], capsys)
        assert code == 0, f"{line}: {err}"
        assert served.pop() if verb == "demo" else out.strip(), line


def test_what_is_installed_exists():
    text = "".join(path.read_text() for path in PAGES)
    extras = {extra for group in re.findall(r'pip install "[^"\n]*\[(.*?)\]"', text) for extra in group.split(",")}
    assert extras and extras <= set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )
    targets = set(re.findall(r"^`?make ([a-z-]+)", text, re.MULTILINE))
    assert targets and all(f"\n{target}:" in (ROOT / "Makefile").read_text() for target in targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        to = (page.parent / path) if path else page
        assert to.exists(), link
        assert not anchor or anchor in anchors(to.read_text()), link


def test_the_design_page_names_every_room():
    text = (ROOT / "docs" / "design.md").read_text()
    package = ROOT / "hf_dspark"
    folders = [f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()]
    modules = [path.name for path in (*package.glob("*.py"), *package.glob("generation/*.py"))]
    assert not [name for name in (*folders, *modules) if name not in text and name != "__init__.py"]


def anchors(text: str) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("line", commands(CLI + TROUBLES + TRAINING))
def test_commands_parse(line):
    verb, *arguments = shlex.split(line)[1:]
    typer.main.get_command(app).commands[verb].make_context(verb, arguments)


def test_an_unknown_option_does_not_parse():
    command = typer.main.get_command(app)
    with pytest.raises(Exception, match="--no-such-option"):
        command.commands["bench"].make_context("bench", ["--no-such-option"])


@pytest.mark.parametrize("script", ["benchmarks/write_numbers.py", "benchmarks/write_card.py", "docs/write_cli.py"])
def test_generated_parts_are_up_to_date(script):
    result = subprocess.run([sys.executable, str(ROOT / script), "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_stale_table_of_flags_is_found(tmp_path):
    """Negative control: another default, or a verb without a section."""
    script = tmp_path / "write_cli.py"
    script.write_text((ROOT / "docs" / "write_cli.py").read_text())
    for wrong in (CLI.replace("| 256 |", "| 255 |", 1), CLI.replace("## bench", "## bensh")):
        (tmp_path / "cli.md").write_text(wrong)
        result = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
        assert result.returncode == 1 and "cli.md" in result.stderr
