"""The probe warns about drafts that are read the wrong way, and about nothing else; it changes nothing."""

import copy
import logging

import pytest
import torch

import checks
import tiny
import trained
from hf_dspark import default_pair
from hf_dspark.generation import probe

PROMPT = [7, 21, 40]
WRONG = "read the wrong way"


@pytest.fixture
def warnings(caplog):
    """Texts of the probe's warnings so far."""
    caplog.set_level(logging.WARNING, logger="hf_dspark.generation.probe")
    return lambda: [r.getMessage() for r in caplog.records if WRONG in r.getMessage()]


def test_layout_forced_the_wrong_way_warns_within_eight_rounds(warnings):
    draft = tiny.slot0_draft(sample_from_anchor=False)
    _, stats = checks.equal_to_plain(tiny.perm_target(), draft, PROMPT, max_new_tokens=9)
    assert stats.num_rounds == 8 and stats.num_accepted == 0
    (message,) = warnings()
    assert "sample_from_anchor=True" in message and "target_layer_ids" not in message and "0.0" in message
    assert WRONG in stats.reason and "sample_from_anchor=True" in stats.reason
    checks.equal_to_plain(tiny.perm_target(), draft, PROMPT, max_new_tokens=50)
    assert len(warnings()) == 1, "once for a pair"
    checks.equal_to_plain(copy.deepcopy(tiny.perm_target()), draft, PROMPT, max_new_tokens=9)
    checks.equal_to_plain(tiny.perm_target(), copy.deepcopy(draft), PROMPT, max_new_tokens=9)
    assert len(warnings()) == 3, "another target or another draft is another pair"


def test_a_calibrated_draft_is_scored_in_both_layouts(warnings):
    """Temperatures belong to the γ slots of the layout in use."""
    draft = tiny.random_draft()
    draft.config.confidence_temperatures = [0.5, 1.0, 2.0, 4.0]
    checks.equal_to_plain(tiny.perm_target(), draft, PROMPT, max_new_tokens=12)
    assert not warnings()


def test_the_right_layout_of_the_same_file_is_left_alone(warnings):
    checks.equal_to_plain(tiny.perm_target(), tiny.slot0_draft(), PROMPT, max_new_tokens=60)
    assert not warnings()


MISREAD = {
    "layout": ({"read_anchor_first": False}, "sample_from_anchor=True"),
    "taps one later": ({"read_taps": (1, 3, 5)}, "target_layer_ids = [0, 2, 4]"),
    "taps one earlier": ({"read_taps": (-1, 1, 3)}, "target_layer_ids = [0, 2, 4]"),
    "1+N": ({"anchor_first": False, "read_anchor_first": True}, "sample_from_anchor=False"),
}


@pytest.mark.parametrize("name", MISREAD)
def test_trained_drafts_read_the_wrong_way(name, warnings):
    settings, fix = MISREAD[name]
    draft = trained.draft(**settings)
    for text in trained.texts()[:3]:
        _, stats = checks.equal_to_plain(tiny.random_target(), draft, text[:6], max_new_tokens=41)
        assert stats.mean_acceptance_length < 2
    (message,) = warnings()
    assert fix in message


HEALTHY = {
    "good": {}, "mediocre": {"steps": 35}, "mediocre 1+N": {"anchor_first": False, "steps": 45},
}  # fmt: skip


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("name", HEALTHY)
def test_no_warning_on_healthy_pairs(name, sample, warnings, monkeypatch):
    """Every call gets a fresh probe, which is harder than what a pair ever sees."""
    looks = []
    monkeypatch.setattr(probe, "drafts_kept", lambda *a, real=probe.drafts_kept: looks.append(1) or real(*a))
    target, draft, rounds = tiny.random_target(), trained.draft(**HEALTHY[name]), 0
    for i, text in enumerate(trained.texts()):
        monkeypatch.setattr(probe, "_looks", {})
        torch.manual_seed(i)
        _, stats = checks.generate(target, draft, list(text[:6]), max_new_tokens=41, do_sample=sample)
        rounds += stats.num_rounds
    assert not warnings() and rounds > 100
    assert looks or name == "good"


@pytest.mark.slow
def test_no_warning_on_the_embedded_pair(warnings, monkeypatch):
    if not default_pair.is_prepared():
        pytest.skip("the embedded target is not prepared: run `hf-dspark setup-demo`")
    target, draft, tokenizer = default_pair.load_default_pair()
    rounds = 0
    for question in ("What is 17 + 25?", "Name three colours.", "Write a function that adds two numbers."):
        monkeypatch.setattr(probe, "_looks", {})
        chat = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        _, stats = checks.generate(target, draft, inputs["input_ids"], max_new_tokens=80, eos_token_id=None)
        rounds += stats.num_rounds
    assert not warnings() and rounds > 75


# ---- it changes nothing


CALLS = {
    "greedy": {}, "sampled": {"do_sample": True}, "chunked prefill": {"prefill_chunk_size": 2},
    "padded": {"attention_mask": torch.tensor([[0, 1, 1]])},
    "hidden states": {"return_dict_in_generate": True, "output_hidden_states": True},
    "few drafts": {"num_assistant_tokens": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_without_the_probe(name, warnings):
    outputs, states = [], []
    for on in (True, False):
        draft = tiny.slot0_draft(sample_from_anchor=False)
        draft.probe = on
        torch.manual_seed(3)
        output, stats = checks.generate(tiny.perm_target(), draft, PROMPT, max_new_tokens=40, **CALLS[name])
        assert (WRONG in stats.reason) == on
        outputs.append(output)
        states.append(torch.get_rng_state())
    assert len(warnings()) == 1
    assert torch.equal(*map(checks.sequences, outputs)) and torch.equal(*states)
    if "return_dict_in_generate" in CALLS[name]:
        assert len(outputs[0].hidden_states[3]) == 7
        checks.same_outputs(*outputs)


def test_embeddings_as_input_and_inference_mode(warnings):
    target = tiny.perm_target()
    embeds = target.get_input_embeddings()(checks.tensor(PROMPT)).detach()
    checks.generate(target, tiny.slot0_draft(sample_from_anchor=False), None, inputs_embeds=embeds)
    with torch.inference_mode():
        checks.generate(target, tiny.slot0_draft(sample_from_anchor=False), PROMPT)
    assert len(warnings()) == 2


# ---- what it costs


def requested(target, draft, prompt=PROMPT, **options):
    """Hidden states that each forward of the target was asked for."""
    seen = []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["output_hidden_states"]), with_kwargs=True
    )
    checks.generate(target, draft, prompt, **options)
    handle.remove()
    return seen


def test_a_good_pair_is_scored_never_and_watched_for_six_rounds(monkeypatch):
    monkeypatch.setattr(probe, "drafts_kept", None)
    target, draft = copy.deepcopy(tiny.perm_target()), tiny.perm_draft()
    first, second = (requested(target, draft, max_new_tokens=41) for _ in range(2))
    usual = [i + 1 for i in tiny.TAPS]
    if first[0] is True:
        pytest.skip("this transformers returns all hidden states or none")
    assert first[:7] == [[0, 1, 2, 3, 4, 5, 6]] * 7
    assert first[7:] == [usual] * 2 and second == [usual] * 9


def test_calls_that_end_early_are_not_looked_at_for_ever(monkeypatch):
    looks = []
    monkeypatch.setattr(probe, "drafts_kept", lambda *a, real=probe.drafts_kept: looks.append(1) or real(*a))
    target, draft = copy.deepcopy(tiny.perm_target()), tiny.bad_draft()
    for _ in range(6):
        checks.generate(target, draft, PROMPT, max_new_tokens=12)
    assert len(looks) == probe.MOST_LOOKS


NOT_PROBED = {
    "switched off": lambda target, draft: setattr(draft, "probe", False),
    "hooks of the caller": lambda target, draft: draft.fc.register_forward_hook(lambda *_: None),
    "a compiled target": lambda target, draft: target.model.compile(backend="eager"),
}


@pytest.mark.parametrize("name", NOT_PROBED)
def test_calls_that_carry_no_probe(name, warnings):
    target, draft = copy.deepcopy(tiny.perm_target()), tiny.slot0_draft(sample_from_anchor=False)
    NOT_PROBED[name](target, draft)
    assert probe.Probe.of(target, draft, draft.vocabulary, 3) is None
    _, stats = checks.generate(target, draft, PROMPT)
    assert not warnings() and WRONG not in stats.reason


def test_no_probe_with_a_long_prompt_or_on_the_fast_path(warnings, monkeypatch):
    target, draft = tiny.perm_target(), tiny.slot0_draft(sample_from_anchor=False)
    assert probe.Probe.of(target, draft, draft.vocabulary, probe.LONGEST_PROMPT + 1) is None
    _, stats = checks.generate(target, draft, PROMPT, cache_implementation="static")
    assert stats.path == "ragged" and not warnings()


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}])
def test_hardly_any_draft_kept_is_said_on_both_paths(options):
    def reason(draft, length=41):
        return checks.generate(tiny.perm_target(), draft, PROMPT, max_new_tokens=length, **options)[1].reason

    assert "hf-dspark check" in reason(tiny.bad_draft())
    assert "hf-dspark check" not in reason(tiny.bad_draft(), length=20), "a few rounds prove nothing"
    assert "hf-dspark check" not in reason(tiny.slot0_draft(), length=81)
    quiet = tiny.bad_draft()
    quiet.probe = False
    assert "hf-dspark check" not in reason(quiet)
