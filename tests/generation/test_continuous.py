"""Many texts over few rows: each is what the target would have written alone."""

import copy

import pytest
import torch
from transformers import GenerationConfig

import tiny
from hf_dspark.generation.continuous import ContinuousDecoder

END = 7


def alone(target, text: list[int], most: int, ends=(END,)) -> list[int]:
    config = GenerationConfig(do_sample=False, max_new_tokens=most, eos_token_id=list(ends), pad_token_id=0)
    return target.generate(torch.tensor([text]), generation_config=config)[0, len(text) :].tolist()


@pytest.fixture(scope="module")
def texts():
    stream = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 40, (23,), generator=stream).tolist()
    return [torch.randint(8, 60, (n,), generator=stream).tolist() for n in lengths]


@pytest.mark.parametrize("num_rows", [1, 4, 32])
def test_each_text_is_the_targets_own(texts, num_rows):
    target = tiny.random_target()
    decoder = ContinuousDecoder(target, num_rows, 64)
    ends = [END, int(target(torch.tensor([texts[0]])).logits[0, -1].argmax())]  # the first text ends at once
    found = decoder.write(texts, temperature=0.0, ends=ends, at_most=17)
    for text, ids in zip(texts, found, strict=True):
        assert ids == alone(target, text, min(17, 64 - len(text)), ends)
    assert len(found[0]) == 1 and len({len(ids) for ids in found}) > 1
    # Nothing of the first call is left in the rows.
    again = decoder.write(texts[5:8], temperature=0.0, ends=[END])
    assert again == [alone(target, text, 64 - len(text)) for text in texts[5:8]]


def test_samples_follow_the_target_and_the_seed():
    target = tiny.table_target(tiny.one_hot_table(tiny.NEXT, 6.0))
    decoder = ContinuousDecoder(target, 64, 8)
    found = decoder.write([[5]] * 1024, temperature=2.0, ends=[], at_most=2, seed=1)
    p = (target(torch.tensor([[5]])).logits[0, -1] / 2).softmax(-1)
    counts = torch.tensor([row[0] for row in found]).bincount(minlength=tiny.V).float()
    assert ((counts - 1024 * p) ** 2 / (1024 * p)).sum() < 120  # 63 degrees of freedom: p = 1e-5
    assert found == decoder.write([[5]] * 1024, temperature=2.0, ends=[], at_most=2, seed=1)
    assert found != decoder.write([[5]] * 1024, temperature=2.0, ends=[], at_most=2, seed=2)


def test_each_text_has_its_temperature():
    target = tiny.table_target(tiny.one_hot_table(tiny.NEXT, 6.0))
    decoder = ContinuousDecoder(target, 3, 8)
    temperatures = [0.0, 9.0, 0.0, 9.0, 0.0]
    found = decoder.write([[5]] * 5, temperature=temperatures, ends=[], seed=1)
    assert [ids == tiny.chain(5, 7) for ids in found] == [t == 0 for t in temperatures]


def test_texts_that_leave_no_room_are_refused():
    decoder = ContinuousDecoder(tiny.random_target(), 2, 8)
    for text in ([], [1] * 8):
        with pytest.raises(ValueError, match="it must have from 1 to 7"):
            decoder.write([text], temperature=0.0, ends=[END])
    with pytest.raises(ValueError, match="must be token ids below 64"):
        decoder.write([[5]], temperature=0.0, ends=[END, 64])
    with pytest.raises(ValueError, match="`at_most` must be at least 1"):
        decoder.write([[5]], temperature=0.0, ends=[END], at_most=0)


def test_unsuitable_targets_are_named():
    target = copy.deepcopy(tiny.random_target())  # other tests share it
    target.train()
    with pytest.raises(NotImplementedError, match="train mode"):
        ContinuousDecoder(target, 2, 8)
