"""`benchmarks/scheduler_sim.py`: it runs, says what is made up, reads measured files; the policies differ as said."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from hf_dspark.scheduling.cost_model import CostModel

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "scheduler_sim.py"


@pytest.fixture(scope="module")
def sim():
    spec = importlib.util.spec_from_file_location("scheduler_sim", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["scheduler_sim"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["scheduler_sim"]


def run(sim, monkeypatch, output, *arguments):
    monkeypatch.setattr(sys, "argv", ["scheduler_sim.py", "--output", str(output), *map(str, arguments)])
    sim.main()
    return json.loads(output.read_text())


def test_without_files_it_says_that_its_tables_are_made_up(sim, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "sim.png"
    report = run(sim, monkeypatch, tmp_path / "sim.json", "--rows", 1, 64, "--steps", 300, "--plot", plot)
    assert (report["costs"], report["traces"]) == ("synthetic", "synthetic")
    assert "costs: synthetic" in capsys.readouterr().out and plot.stat().st_size > 1000
    speed = {(o["policy"], o["rows"]): o["tokens_per_second"] for o in report["results"]}
    best = {rows: max(speed[f"fixed {n}", rows] for n in range(1, 8)) for rows in (1, 64)}
    assert speed["lagged", 1] > 0.98 * best[1], "flat costs: as fast as whole blocks"
    assert speed["lagged", 64] > 1.03 * best[64], "rising costs: faster than any fixed length"


def trace(survival, accepted, call=0, verified=2):
    return {"call": call, "row": 0, "survival": survival, "accepted": accepted, "verified": verified}


def test_measured_files_are_used(sim, monkeypatch, tmp_path):
    """One text of one kind of round and costs by hand: every number can be computed."""
    costs, traces = tmp_path / "costs.json", tmp_path / "stats.json"
    CostModel({2: 10.0, 4: 20.0, 6: 40.0}, {2: 5.0}, {"device": "by hand"}).to_json(costs)
    whole, shortened = trace([0.75, 0.25], 1), trace([0.75, 0.25], 0, verified=1)
    traces.write_text(json.dumps({"rounds": [whole, whole, shortened]}))
    report = run(
        sim, monkeypatch, tmp_path / "o.json", "--rows", 2, "--costs", costs, "--traces", traces, "--steps", 50
    )
    assert (report["costs"], report["traces"], report["gamma"]) == ("costs.json", "stats.json", 2)
    assert report["environment"] == {"device": "by hand"}
    speed = {o["policy"]: o["tokens_per_second"] for o in report["results"]}
    assert speed["plain"] == pytest.approx(2 / 0.010)
    assert speed["fixed 1"] == pytest.approx(4 / 0.025)
    assert speed["fixed 2"] == pytest.approx(4 / 0.045)
    assert speed["threshold 0.5"] == speed["fixed 1"], "c_2 = 1/3"


@pytest.mark.parametrize("rounds", [[], [trace(None, 1)], [trace([0.5, 0.4], 1, verified=1)]])
def test_traces_that_cannot_be_used_are_refused(sim, tmp_path, rounds):
    path = tmp_path / "stats.json"
    path.write_text(json.dumps({"rounds": rounds}))
    with pytest.raises(SystemExit, match="no "):
        sim.read_traces(path)
