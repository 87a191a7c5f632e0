"""`hf-dspark demo` and the Space folder: STREAM-7, defaults, limits."""

import ast
import json
import re
import runpy
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
from command import refused, run

import tiny
from demo_page import chat_tokenizer
from hf_dspark.cli import demo as demo_module

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tiny.perm_target().save_pretrained(root / "target")
    chat_tokenizer().save_pretrained(root / "target")
    config = tiny.draft_config(vocab=tiny.V, rank=tiny.V, confidence=None)
    tiny.write_draft(root / "draft", config, tiny.markov_tensors(config, tiny.one_hot_table(tiny.NEXT)))
    return str(root / "target"), str(root / "draft")


@pytest.fixture
def started(monkeypatch):
    """What the page would have been started with."""
    pytest.importorskip("gradio")
    calls = []
    monkeypatch.setattr(demo_module, "launch", lambda *pair, **options: calls.append((pair, options)))
    return calls


def test_it_is_for_this_machine_alone_unless_told(folders, started, capsys):
    code, _, _ = run(["demo", "--target", folders[0], "--draft", folders[1]], capsys)
    ((pair, options),) = started
    assert code == 0 and type(pair[0]).__name__ == "Qwen3ForCausalLM" and pair[1].config.num_draft_tokens == 4
    assert options["share"] is False and options["server_name"] == "127.0.0.1" and options["inbrowser"] is False
    assert options["max_prompt_tokens"] == 2048 and options["max_new_tokens"] == 512
    assert options["title"] == "target and draft"


def test_flags_reach_the_page(folders, started, capsys):
    flags = ["--server-name", "0.0.0.0", "--server-port", "7999", "--max-new-tokens", "64", "--max-prompt-tokens", "99",
             "--share"]  # fmt: skip
    assert run(["demo", "--target", folders[0], "--draft", folders[1], *flags], capsys)[0] == 0
    _, options = started[0]
    names = ("server_name", "server_port", "max_new_tokens", "max_prompt_tokens", "share")
    assert [options[name] for name in names] == ["0.0.0.0", 7999, 64, 99, True]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--target", "{draft}", "--draft", "{target}"], "swap"),
        (["--target", "{target}", "--draft", "{target}"], "both"),
        (["--target", "{draft}", "--draft", "{draft}"], "both"),
        (["--target", "{draft}"], "pass it as `--draft`"),
        (["--draft", "{target}"], "is not a DSpark draft"),
        (["--target", "./nowhere"], "there is no such folder"),
        (["--draft", "./nowhere"], "there is no such folder"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
        (["--calibration", "./nowhere.json"], "nowhere.json"),
    ],
)
def test_stream_7_wrong_models_are_one_sentence_and_no_server(folders, started, capsys, arguments, says):
    arguments = [a.format(target=folders[0], draft=folders[1]) for a in arguments]
    assert says in refused(["demo", *arguments], capsys) and not started


@pytest.mark.parametrize("content", ["not json", "[]", '{"temperatures": [1]}'])
def test_a_file_that_is_no_calibration_report(started, capsys, tmp_path, content):
    path = tmp_path / "report.json"
    path.write_text(content)
    assert "`calibration` must be" in refused(["demo", "--calibration", str(path)], capsys) and not started


def test_without_gradio_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert 'pip install "hf-dspark[demo]"' in refused(["demo"], capsys)


def test_importing_the_command_line_does_not_import_gradio():
    import subprocess

    code = "import sys, hf_dspark.cli, hf_dspark.demo; assert 'gradio' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_stream_5_the_page_is_built_without_warnings():
    pytest.importorskip("gradio")
    from hf_dspark.demo.generation import Models
    from hf_dspark.demo.page import build

    report = json.loads((ROOT / "benchmarks" / "calibrate_smollm2.json").read_text())
    models = Models(tiny.perm_target(), tiny.perm_draft(), chat_tokenizer())
    with warnings.catch_warnings():
        for kind in (UserWarning, DeprecationWarning, FutureWarning):
            warnings.simplefilter("error", kind)
        build(models, title="a pair", calibration=report)


def test_the_demo_uses_public_names_only():
    """Absolute imports of `hf_dspark` and what its packages list in `__all__`; relative ones stay inside the demo."""
    import importlib

    for path in (ROOT / "hf_dspark" / "demo").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1, path
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_dspark"):
                public = importlib.import_module(node.module).__all__
                assert {alias.name for alias in node.names} <= set(public), path
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hf_dspark":
                import hf_dspark

                assert node.attr in hf_dspark.__all__, (path, node.attr)


# ---- the Space folder


def test_the_space_runs_the_pinned_gradio():
    front = (ROOT / "app" / "README.md").read_text().split("---")[1]
    fields = dict(line.split(": ", 1) for line in front.strip().splitlines())
    pins = (ROOT / "constraints.txt").read_text()
    assert f"gradio=={fields['sdk_version']}\n" in pins and fields["sdk"] == "gradio"
    assert (ROOT / "app" / fields["app_file"]).is_file() and len(fields["short_description"]) <= 60
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (line,) = (ROOT / "app" / "requirements.txt").read_text().split()
    assert set(re.fullmatch(r"hf-dspark\[(.*)\]", line)[1].split(",")) <= set(extras)


def test_the_space_starts_the_command(folders, started, monkeypatch, capsys):
    monkeypatch.setenv("GRADIO_SERVER_NAME", "0.0.0.0")
    monkeypatch.setenv("DEMO_ARGUMENTS", f"--target '{folders[0]}' --draft '{folders[1]}'")
    monkeypatch.setattr(sys, "argv", ["app.py", "--max-new-tokens", "33"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "app" / "app.py"), run_name="__main__")
    assert end.value.code == 0 and started[0][1]["server_name"] == "0.0.0.0" and started[0][1]["max_new_tokens"] == 33
