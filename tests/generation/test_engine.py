"""The ragged engine: each row of a batch gets the text that plain generate gives the batch (float32)."""

import random

import pytest
import torch

import tiny
from hf_dspark.generation import attention, hook
from hf_dspark.generation.engine import RaggedLoop
from hf_dspark.generation.record import CallRecord

FAMILIES = ("perm", "qwen3", "llama", "mistral", "gemma2")
DRAFTS = {
    "full": lambda target: tiny.perm_draft(),
    "never": lambda target: tiny.bad_draft(),
    "scripted": lambda target: tiny.scripted_draft([0, 1, 2, 3, 4], 5),
    "random": tiny.random_draft,
}


@pytest.fixture(autouse=True)
def ragged(monkeypatch):
    """generate() with a DSpark draft takes the ragged path."""

    def decode(target, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        record = CallRecord("ragged", "test", 4)
        draft, mask = kwargs["assistant_model"], kwargs.get("attention_mask")
        arguments = (input_ids, mask, logits_processor, stopping_criteria, generation_config, record)
        output = RaggedLoop(target, draft, *arguments).run()
        if generation_config.return_dict_in_generate:
            output.speculation = record.stats
        return output

    monkeypatch.setattr(hook, "decode", decode)


def make_target(family: str):
    return tiny.perm_target() if family == "perm" else tiny.random_target(family)


def random_batch(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded prompts of different lengths and their mask."""
    rows, width = rng.randint(1, 5), rng.randint(2, 20)
    ids = torch.tensor([[rng.randint(1, 60) for _ in range(width)] for _ in range(rows)])
    mask = torch.ones_like(ids)
    for row in range(rows if rows > 1 else 0):
        padding = rng.randint(0, width - 1)
        ids[row, :padding] = mask[row, :padding] = 0
    return ids, mask


def random_options(rng: random.Random) -> dict:
    options: dict = {"max_new_tokens": rng.randint(1, 25), "do_sample": False, "pad_token_id": 0}
    if rng.random() < 0.4:
        options["repetition_penalty"] = 1.2
    if rng.random() < 0.3:
        options["no_repeat_ngram_size"] = 3
    if rng.random() < 0.4:
        options["eos_token_id"] = [rng.randint(1, 60) for _ in range(8)]
    return options


@pytest.mark.parametrize("chunk", range(6))
def test_batches_equal_plain(chunk):
    rng = random.Random(chunk)
    for _ in range(20):
        family, draft = rng.choice(FAMILIES), rng.choice(list(DRAFTS))
        target = make_target(family)
        ids, mask = random_batch(rng)
        options = random_options(rng)
        plain = target.generate(ids, attention_mask=mask, **options)
        number = {"num_assistant_tokens": rng.randint(1, 4)} if rng.random() < 0.3 else {}
        output = target.generate(
            ids,
            attention_mask=mask,
            assistant_model=DRAFTS[draft](target),
            return_dict_in_generate=True,
            **options,
            **number,
        )
        assert torch.equal(output.sequences, plain), (family, draft, ids.shape, options)


def test_rows_accept_different_lengths_and_the_sums_add_up():
    target, draft = tiny.perm_target(), tiny.scripted_draft([0, 1, 2, 3, 4], 5)
    ids = torch.tensor([[3, 5], [9, 41], [12, 8]])
    output = target.generate(
        ids, max_new_tokens=30, do_sample=False, assistant_model=draft, return_dict_in_generate=True
    )
    rounds = output.speculation.rounds
    for row in range(3):
        assert output.sequences[row, 2:].tolist() == tiny.chain(int(ids[row, -1]), 30)
        committed = sum(r.num_committed for r in rounds if r.row == row)
        assert committed == 29
    assert len({tuple(r.accepted for r in rounds if r.row == row) for row in range(3)}) > 1


def test_the_target_is_left_alone():
    target, draft = tiny.perm_target(), tiny.perm_draft()
    before = {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}
    target.generate(torch.tensor([[3, 5], [9, 41]]), max_new_tokens=9, do_sample=False, assistant_model=draft)
    assert {name: tensor.data_ptr() for name, tensor in target.state_dict().items()} == before
    assert target.config._attn_implementation != attention.NAME
    assert not any(hasattr(module, "ragged_cache") for module in target.modules())
