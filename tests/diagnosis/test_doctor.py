"""The doctor: right verdicts and fixes for healthy pairs and for pairs that were broken on purpose."""

import copy
import json

import pytest
import torch

import checks
import tiny
import trained
from hf_dspark.diagnosis import check_configs, diagnose
from hf_dspark.diagnosis.findings import HEALTHY, VERDICTS
from hf_dspark.evaluation import Prompt
from hf_dspark.generation import verify


def questions(count: int = 3) -> list[Prompt]:
    """The prompts of the texts that trained drafts know."""
    return [Prompt("texts", i, (tiny.tokenizer().decode(t[:6]),)) for i, t in enumerate(trained.texts()[:count])]


def examine(target, draft, **options):
    return diagnose(target, draft, tiny.tokenizer(), questions(), **({"max_new_tokens": 40} | options))


def finding(diagnosis, topic):
    return next(f for f in diagnosis.findings if f.topic == topic)


def test_a_healthy_pair():
    draft = trained.draft()
    diagnosis = examine(tiny.random_target(), draft)
    assert diagnosis.verdict == HEALTHY and diagnosis.healthy and not diagnosis.next_steps
    assert {f.level for f in diagnosis.findings} == {"ok"}
    assert "equal those of the target alone" in finding(diagnosis, "exactness").seen and draft.probe
    result = json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))
    assert result["verdict"] == HEALTHY and result["mean_acceptance_length"] > 4
    best = max(result["readings"], key=lambda row: row["drafts_kept"])
    assert (best["layout"], best["target_layer_ids"]) == ("anchor-first", [0, 2, 4])


MISREAD = {
    "layout": ({"read_anchor_first": False}, "sample_from_anchor=True"),
    "taps": ({"read_taps": (1, 3, 5)}, "target_layer_ids = [0, 2, 4]"),
}


@pytest.mark.parametrize("name", MISREAD)
def test_a_draft_that_is_read_the_wrong_way(name):
    settings, fix = MISREAD[name]
    diagnosis = examine(tiny.random_target(), trained.draft(**settings))
    assert diagnosis.verdict == VERDICTS["reading"] and fix in diagnosis.next_steps[0]
    assert finding(diagnosis, "exactness").level == "ok" and finding(diagnosis, "acceptance").level != "ok"
    assert not any("Suspect" in step for step in diagnosis.next_steps), "the cause is known"


def test_another_mask_token_is_found_among_the_special_ones(monkeypatch):
    config, tensors = trained.files()
    draft = tiny.load_draft(config | {"mask_token_id": 30}, tensors)
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.add_special_tokens({"mask_token": "#"})  # id 63
    diagnosis = diagnose(tiny.random_target(), draft, tokenizer, questions(), max_new_tokens=40)
    assert diagnosis.verdict == VERDICTS["reading"] and "mask_token_id = 63" in diagnosis.next_steps[0]


def test_another_target_of_the_same_shape():
    diagnosis = examine(tiny.random_target(seed=5), trained.draft())
    assert diagnosis.verdict == VERDICTS["acceptance"]
    assert "another target" in diagnosis.next_steps[0] and finding(diagnosis, "reading").level == "ok"
    assert any("very checkpoint" in step for step in diagnosis.next_steps), (
        "embeddings in the file are not the target's"
    )


def test_a_target_that_does_not_fit_is_not_run():
    target = tiny.random_target(hidden_size=32)
    with checks.CallCounter(target) as calls:
        diagnosis = examine(target, trained.draft())
    assert not calls.shapes and diagnosis.verdict == VERDICTS["pairing"]
    assert "64" in diagnosis.problems[0].seen and "32" in diagnosis.problems[0].seen


def test_text_that_differs_is_a_problem(monkeypatch):
    """The target is shown another first draft than the one that is decided about."""
    target = tiny.random_target()
    original = type(target).prepare_inputs_for_generation

    def forgetful(self, ids, next_sequence_length=None, **kwargs):
        if (next_sequence_length or 1) > 1:
            ids = ids.index_fill(1, torch.tensor(ids.shape[1] - next_sequence_length + 1), 60)
        return original(self, ids, next_sequence_length=next_sequence_length, **kwargs)

    monkeypatch.setattr(type(target), "prepare_inputs_for_generation", forgetful)
    diagnosis = examine(target, trained.draft())
    assert diagnosis.verdict == VERDICTS["exactness"] and diagnosis.measured["differences"]


def test_chi_squared_tells_a_right_sampler_from_a_wrong_one(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    target = tiny.table_target(torch.randn(64, 64, generator=generator), mask=None)
    draft = tiny.markov_draft(3 * torch.randn(64, 64, generator=generator))
    options = {"chi_squared": True, "max_new_tokens": 30}
    right = examine(target, draft, **options)
    assert finding(right, "sampling").level == "ok" and right.measured["sampling"]["num_tokens"] == 360
    monkeypatch.setattr(verify, "accept", lambda tokens, q, p, uniform: torch.full((len(tokens),), tokens.shape[1]))
    wrong = examine(target, draft, **options)
    assert wrong.verdict == VERDICTS["sampling"] and wrong.measured["sampling"]["p_value"] < 1e-8


def test_the_fast_path_is_examined_on_request():
    diagnosis = examine(tiny.random_target(), trained.draft(), cache_implementation="static", max_new_tokens=20)
    assert diagnosis.healthy and "ragged path" in finding(diagnosis, "exactness").seen


def test_half_precision_tells_near_ties_apart():
    target = copy.deepcopy(tiny.perm_target()).to(torch.bfloat16)
    diagnosis = examine(target, tiny.perm_draft().to(torch.bfloat16), max_new_tokens=20)
    assert finding(diagnosis, "exactness").level == "ok" and diagnosis.measured["dtype"] == "torch.bfloat16"


def test_formats_of_the_prompt_are_compared():
    """A template that the draft has never seen: the text without it is accepted much better, and said so."""
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = "ZYXWV{% for m in messages %}{{ m['content'] }}{% endfor %}QPONM"
    diagnosis = diagnose(tiny.random_target(), trained.draft(), tokenizer, questions(), max_new_tokens=40)
    assert set(diagnosis.measured["formats"]) == {"chat", "none"}
    assert finding(diagnosis, "template").level == "note"
    assert any("prompts as the draft knows them: none" in step for step in diagnosis.next_steps)


# ---- what configs tell


def test_configs_tell_other_targets_and_quantisation():
    target, draft = copy.deepcopy(tiny.random_target().config), copy.deepcopy(trained.draft().config)
    assert [f.level for f in check_configs(target, draft)] == ["ok"]
    draft.target_name_or_path = "owner/Model-8B"
    for name, differs in (
        ("mirror/model-8b", False),
        ("/cache/models--owner--Model-8B/snapshots/0", False),
        ("owner/Model-8B-Base", True),
    ):
        target._name_or_path = name
        topics = [f.topic for f in check_configs(target, draft) if f.level == "note"]
        assert topics == ["target"] * differs
    target._name_or_path, target.quantization_config = "", {"quant_method": "gptq"}
    assert [f.topic for f in check_configs(target, draft)] == ["pairing", "quantisation"]
    draft.num_target_layers = 12
    assert "12 layers" in check_configs(target, draft)[1].seen
    draft.num_target_layers = 3  # the number of taps, as some formats write it
    assert [f.topic for f in check_configs(target, draft)] == ["pairing", "quantisation"]
