"""`hf-dspark profile`: the file it writes is a cost model."""

import json

import pytest

import tiny
from hf_dspark import CostModel, PrefixScheduler, cli
from hf_dspark.cli import profile as verb
from hf_dspark.cli.models import Models


@pytest.fixture
def pair(monkeypatch):
    target, draft = tiny.random_target(layers=2), tiny.random_draft(taps=(-1, 0), confidence="markov")
    models = Models(target, draft, tiny.tokenizer(), "target", "draft")
    monkeypatch.setattr(verb, "load_models", lambda *args, **kwargs: models)


def test_the_file_is_a_cost_model(pair, tmp_path, capsys):
    path, picture = tmp_path / "costs.json", tmp_path / "costs.png"
    options = ["--batch-size", "1", "--batch-size", "3", "--context-length", "12", "--json", str(path)]
    with pytest.raises(SystemExit) as done:
        cli.main(["profile", *options, "--plot", str(picture)])
    assert done.value.code == 0
    costs = CostModel.from_json(path)
    assert list(costs.verify_ms) == [1, 2, 3, 4, 5, 6, 9, 12, 15] and list(costs.draft_ms) == [1, 3]
    assert PrefixScheduler(costs).schedule([[0.9, 0.8, 0.7, 0.6]])
    assert json.loads(path.read_text())["environment"]["context_length"] == 12
    assert picture.stat().st_size > 1000
    assert "tokens verified" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--batch-size", "0"], ["--context-length", "0"]])
def test_sizes_that_cannot_be_measured(pair, wrong, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["profile", *wrong])
    assert done.value.code == 2
    assert "at least 1" in capsys.readouterr().err
