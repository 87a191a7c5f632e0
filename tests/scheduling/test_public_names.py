"""The names of the room are public, and importing the package stays light."""

import subprocess
import sys

import hf_dspark


def test_names():
    from hf_dspark.scheduling import calibration, cost_model, scheduler

    assert hf_dspark.calibrate is calibration.calibrate
    assert hf_dspark.CostModel is cost_model.CostModel
    assert hf_dspark.PrefixScheduler is scheduler.PrefixScheduler
    assert {"calibrate", "CostModel", "PrefixScheduler"} <= set(hf_dspark.__all__)
    assert not hasattr(hf_dspark, "no_such_name")


def test_import_is_light():
    heavy = ("matplotlib", "pyarrow", "hf_dspark.evaluation", "hf_dspark.scheduling.calibration")
    code = f"import hf_dspark, sys; print([name for name in {heavy!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
