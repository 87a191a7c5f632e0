"""VERSION, library part: outside the supported range one sentence says so at import."""

import importlib.util
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

import checks
import hf_dspark
import tiny


def compat_under(version: str, monkeypatch):
    """`hf_dspark._compat`, executed anew as if transformers had this version."""
    monkeypatch.setattr(transformers, "__version__", version)
    path = Path(hf_dspark.__file__).with_name("_compat.py")
    spec = importlib.util.spec_from_file_location("compat_copy", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("version", ["4.57.1", "5.17.1", "6.0.0", "6.1.0.dev0"])
def test_version_1_unsupported_versions_are_refused_with_the_range(version, monkeypatch):
    with pytest.raises(ImportError) as error:
        compat_under(version, monkeypatch)
    message = str(error.value)
    assert version in message and "5.18" in message and "6" in message and "\n" not in message


@pytest.mark.parametrize("version", ["5.18.0", "5.20.2", "5.24.0", "5.99.0"])
def test_version_1_supported_versions_import(version, monkeypatch):
    compat = compat_under(version, monkeypatch)
    assert ("cache" if Version(version) >= Version("5.24") else "past_key_values") == compat.CACHE_KEY


def test_version_1_end_to_end_on_this_version():
    new, stats = checks.equal_to_plain(tiny.perm_target(), tiny.perm_draft(), [7, 21, 40])
    assert new == tiny.chain(40, 20) and stats.num_accepted == 15


def test_only_compat_asks_for_the_version():
    """Version differences live in one file."""
    package = Path(hf_dspark.__file__).parent
    assert [p.name for p in package.rglob("*.py") if "Version(" in p.read_text()] == ["_compat.py"]
