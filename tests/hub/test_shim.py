"""The file that travels with a draft: `trust_remote_code=True` with and without the package, in fresh processes."""

import json
import logging
import os
import subprocess
import sys

import pytest

import tiny
from hf_dspark import formats
from hf_dspark.hub import loader

LOAD = """
import json, sys
import transformers
{before}
draft = transformers.{auto}.from_pretrained({folder!r}, trust_remote_code=True)
print(type(draft).__module__, type(draft).__name__, "hf_dspark" in sys.modules)
draft.save_pretrained({folder!r} + "/again")
"""
MISSING = "sys.modules['hf_dspark'] = None  # as if it were not installed"


@pytest.fixture
def folder(tmp_path):
    config = tiny.draft_config()
    folder = tiny.write_draft(tmp_path / "draft", config, tiny.draft_tensors(config))
    loader.add_loader(folder)
    return folder


def load(folder, before="", auto="AutoModel") -> subprocess.CompletedProcess:
    code = LOAD.format(before=before, auto=auto, folder=str(folder))
    environment = os.environ | {"HF_MODULES_CACHE": str(folder.parent / "modules"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForCausalLM"])
def test_with_the_package_the_draft_is_its_own_class(folder, auto):
    result = load(folder, auto=auto)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["hf_dspark.modeling_dspark", "DSparkForCausalLM", "True"]
    assert {path.name for path in (folder / "again").iterdir()} == {"config.json", "model.safetensors"}


def test_without_the_package_it_is_asked_for(folder):
    result = load(folder, MISSING)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError") and "`pip install hf-dspark`" in last


def test_other_faults_of_an_installed_package_are_not_hidden(folder, tmp_path):
    broken = tmp_path / "hf_dspark.py"
    broken.write_text("import a_module_that_is_missing")
    result = load(folder, f"sys.path.insert(0, {str(tmp_path)!r})")
    assert result.returncode == 1 and "pip install hf-dspark" not in result.stderr
    assert "a_module_that_is_missing" in result.stderr


def test_the_loader_leaves_the_rest_of_the_config_alone(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("auto_map").keys() == {"AutoModel", "AutoModelForCausalLM"} and config == tiny.draft_config()
    before = (folder / "config.json").read_bytes()
    loader.add_loader(folder)
    assert (folder / "config.json").read_bytes() == before


def test_the_packages_own_loader_is_no_reason_for_a_warning(folder, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hf_dspark"), "propagate", True)
    checkpoint = formats.open_checkpoint(folder)
    assert "never run" in checkpoint.config.resolution["code"] and not caplog.records
    (folder / "more.py").write_text("")
    formats.open_checkpoint(folder)
    assert "more.py" in caplog.text


def test_a_config_without_model_type_gets_no_loader(tmp_path):
    (tmp_path / "config.json").write_text('{"speculators_model_type": "dspark"}')
    loader.add_loader(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
