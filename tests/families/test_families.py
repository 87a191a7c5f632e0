"""Every family of targets decodes as plain generate does, with drafts or with a reason against them.

The results are those of docs/targets.md, which `python tests/families/write_targets.py` writes.
"""

import json

import pytest
import transformers

import checks
import survey
from hf_dspark.generation.target_cache import TargetCache
from targets import FAMILIES, target_of
from write_targets import JSON, MARKDOWN, VERSION, as_markdown

FEW = ("Llama", "Gemma 2, soft-cap", "Gemma 4, mixed windows", "Qwen3-Next", "Qwen3-VL", "ERNIE", "Jamba")


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_family(name):
    """Text, path, reason and coverage of all forms are what the table says."""
    found = survey.run(name)
    accepted = found.pop("accepted")
    if transformers.__version__ == VERSION:
        assert found == json.loads(JSON.read_text())[name]
    if found["one"]["path"] == "plain":
        assert accepted == list(range(survey.GAMMA + 1)), "all counts of accepted drafts occur"


DRAFTED = [name for name, row in json.loads(JSON.read_text()).items() if row["one"]["path"] == "plain"]


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTED)
def test_the_comparison_can_fail(name, monkeypatch):
    """Negative control: where rejected drafts stay in the cache, no family gives the text of plain generate."""
    target, calls = target_of(name), {"one": survey.forms(name)["one"]}
    texts = {"one": survey.new_tokens(target, calls["one"])}
    draft = survey.scripted(target, calls, texts)
    assert survey.new_tokens(target, calls["one"], assistant_model=draft).tolist() == texts["one"].tolist()

    def keep(self, num_tokens, forget=TargetCache.forget):
        forget(self, 0)

    monkeypatch.setattr(TargetCache, "forget", keep)
    try:
        found = survey.new_tokens(target, calls["one"], assistant_model=draft)
    except (RuntimeError, ValueError, IndexError):
        return  # masks and caches of different lengths
    assert found.tolist() != texts["one"].tolist()


def test_the_table_is_that_of_the_results():
    rows = json.loads(JSON.read_text())
    assert list(rows) == list(FAMILIES), "python tests/families/write_targets.py"
    assert MARKDOWN.read_text() == as_markdown(rows), "python tests/families/write_targets.py"


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].inputs])
def test_a_second_image_and_a_second_turn(name):
    """Text, image, text, image: nothing of one call reaches the next."""
    if json.loads(JSON.read_text())[name]["image"]["path"] == "refused":
        pytest.skip("refused")
    target, calls = target_of(name), survey.forms(name)
    texts = {form: survey.new_tokens(target, calls[form]) for form in ("one", "image")}
    draft = survey.scripted(target, {form: calls[form] for form in texts}, texts)
    for form in ("one", "image", "one", "image"):
        assert survey.new_tokens(target, calls[form], assistant_model=draft).tolist() == texts[form].tolist()
    assert checks.sequences(texts["one"]).tolist() != texts["image"].tolist(), "the image matters"
