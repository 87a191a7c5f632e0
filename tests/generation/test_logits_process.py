"""`MarkovLogitsProcessor`: the bias of each slot, as a processor of transformers."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import oracle
import tiny
from hf_dspark import MarkovLogitsProcessor


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_it_adds_the_oracles_bias_slot_by_slot(head):
    config = tiny.draft_config(head=head)
    tensors = tiny.draft_tensors(config)
    slow = oracle.Oracle(config, tensors)
    processor = MarkovLogitsProcessor(tiny.load_draft(config, tensors).markov_head)
    assert isinstance(processor, LogitsProcessor)
    hidden, scores = torch.randn(2, 4, 64), torch.randn(4, 2, 64)
    ids = torch.tensor([[1, 2, 3], [9, 8, 7]])
    for _ in range(2):  # `begin` forgets the block before
        processor.begin(hidden)
        states, prefix = [torch.zeros(8)] * 2, ids
        for k in range(4):
            with torch.no_grad():
                found = LogitsProcessorList([processor])(prefix, scores[k].clone())
            for row in range(2):
                bias, states[row] = slow.markov_step(int(prefix[row, -1]), hidden[row, k], states[row])
                torch.testing.assert_close(found[row], scores[k, row] + bias, atol=1e-5, rtol=1e-5)
            prefix = torch.cat((prefix, torch.tensor([[k], [20 + k]])), dim=-1)


def test_misuse_is_an_error():
    processor = MarkovLogitsProcessor(tiny.random_draft().markov_head)
    with pytest.raises(ValueError, match="begin"):
        processor(torch.tensor([[1]]), torch.zeros(1, 64))
    processor.begin(torch.zeros(1, 1, 64))
    processor(torch.tensor([[1]]), torch.zeros(1, 64))
    with pytest.raises(ValueError, match="1 slot|begin"):
        processor(torch.tensor([[1]]), torch.zeros(1, 64))
