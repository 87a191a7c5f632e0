"""The plain path on a CUDA device (skipped without one)."""

import copy

import pytest
import torch

import checks
import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROMPT = [5, 17, 9, 33, 2]


def pair(target, draft, device: str = "cuda", draft_device: str = "cuda"):
    return copy.deepcopy(target).to(device), copy.deepcopy(draft).to(draft_device)


DRAFTS = {
    "full": tiny.perm_draft,
    "never": tiny.bad_draft,
    "scripted": lambda: tiny.scripted_draft([0, 1, 2, 3, 4], tiny.NEXT[PROMPT[-1]]),
}


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("draft_device", ["cuda", "cpu"])
def test_greedy_text_equals_plain(name, draft_device):
    target, draft = pair(tiny.perm_target(), DRAFTS[name](), draft_device=draft_device)
    ids = torch.tensor([PROMPT], device="cuda")
    plain = target.generate(ids, max_new_tokens=40, do_sample=False)
    assert torch.equal(target.generate(ids, max_new_tokens=40, do_sample=False, assistant_model=draft), plain)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2, "min_new_tokens": 5}])
def test_random_weights_float32(options):
    target = tiny.random_target()
    target, draft = pair(target, tiny.random_draft(target))
    ids = torch.tensor([PROMPT], device="cuda")
    options = {"max_new_tokens": 40, "do_sample": False, **options}
    plain = target.generate(ids, **options)
    assert torch.equal(target.generate(ids, assistant_model=draft, **options), plain)


def test_left_padding_and_streamer():
    target, draft = pair(tiny.perm_target(), tiny.perm_draft())
    ids = torch.tensor([[0, 0, 0, *PROMPT]], device="cuda")
    options = {"attention_mask": (ids > 0).long(), "max_new_tokens": 20, "do_sample": False}
    plain = target.generate(ids, **options)
    streamer = checks.ListStreamer()
    assert torch.equal(target.generate(ids, assistant_model=draft, streamer=streamer, **options), plain)


def test_seeded_sampling_repeats():
    target, draft = pair(tiny.random_target(), tiny.perm_draft())
    ids = torch.tensor([PROMPT], device="cuda")
    texts = []
    for _ in range(2):
        torch.manual_seed(3)
        texts.append(target.generate(ids, max_new_tokens=30, do_sample=True, top_p=0.9, assistant_model=draft))
    assert torch.equal(*texts)


def test_bfloat16_pair_runs_with_full_acceptance():
    target, draft = pair(tiny.perm_target(), tiny.perm_draft())
    ids = torch.tensor([PROMPT], device="cuda")
    options = {"max_new_tokens": 41, "do_sample": False, "return_dict_in_generate": True}
    output = target.bfloat16().generate(ids, assistant_model=draft.bfloat16(), **options)
    assert output.sequences[0, len(PROMPT) :].tolist() == tiny.chain(PROMPT[-1], 41)
    assert output.speculation.mean_acceptance_length == 5.0
