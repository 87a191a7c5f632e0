"""`hf-dspark check` on tiny pairs in folders."""

import json

import pytest
from command import refused, run

import hf_dspark
import tiny
import trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """T-rand with a tokenizer, prompts, and the trained draft as it is and with other taps in its config."""
    root = tmp_path_factory.mktemp("models")
    tiny.random_target().save_pretrained(root / "target")
    tiny.tokenizer().save_pretrained(root / "target")
    config, tensors = trained.files()
    tiny.write_draft(root / "draft", config, tensors)
    tiny.write_draft(root / "shifted", config | {"target_layer_ids": [1, 3, 5]}, tensors)
    texts = [{"turns": [tiny.tokenizer().decode(text[:6])]} for text in trained.texts()[:3]]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    return root


def arguments(folder, draft: str) -> list[str]:
    pair = ["--target", str(folder / "target"), "--draft", str(folder / draft)]
    return ["check", *pair, "--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "40"]


def test_a_healthy_pair_is_success(folder, tmp_path, capsys):
    path = tmp_path / "check.json"
    code, out, _ = run([*arguments(folder, "draft"), "--json", str(path)], capsys)
    assert code == 0 and "Verdict: healthy" in out and "anchor-first, taps [0, 2, 4]" in out
    result = json.loads(path.read_text())
    assert result["healthy"] and result["verdict"] == "healthy" and result["next_steps"] == []
    assert result["draft"] == str(folder / "draft") and result["dtype"] == "torch.float32"
    assert result["versions"]["hf_dspark"] == hf_dspark.__version__ and len(result["readings"]) == 6


def test_a_misread_draft_fails_with_the_fix(folder, tmp_path, capsys):
    path = tmp_path / "check.json"
    code, out, _ = run([*arguments(folder, "shifted"), "--json", str(path)], capsys)
    assert code == 1 and "read the wrong way" in out and "1. Set `draft.config.target_layer_ids = [0, 2, 4]`" in out
    assert not json.loads(path.read_text())["healthy"]


def test_a_pair_that_does_not_fit_fails_before_weights_are_read(folder, tmp_path, capsys, monkeypatch):
    tiny.random_target(hidden_size=32).config.save_pretrained(tmp_path / "other")
    monkeypatch.setattr(hf_dspark.cli.check, "load_models", None)
    command = ["check", "--target", str(tmp_path / "other"), "--draft", str(folder / "draft")]
    code, out, _ = run([*command, "--json", str(tmp_path / "check.json")], capsys)
    assert code == 1 and "does not fit" in out and "width 64" in out and "width 32" in out
    assert json.loads((tmp_path / "check.json").read_text())["findings"][0]["topic"] == "pairing"


def test_wrong_usage_is_refused(folder, tmp_path, capsys):
    target, draft = str(folder / "target"), str(folder / "draft")
    assert "swap the two" in refused(["check", "--target", draft, "--draft", target], capsys)
    missing = str(tmp_path / "nothing.jsonl")
    assert missing in refused(["check", "--target", target, "--draft", draft, "--prompts", missing], capsys)
