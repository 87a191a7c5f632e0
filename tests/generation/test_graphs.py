"""Rounds decided on the device, uncaptured on the CPU and one CUDA graph each on a GPU: tokens equal plain generate."""

import copy
import random

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

import tiny
from hf_dspark.generation import fuse
from hf_dspark.generation.engine import RaggedLoop
from hf_dspark.generation.graphs import DeviceRounds
from hf_dspark.generation.record import CallRecord

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DRAFTS = {
    "full": lambda target: tiny.perm_draft(),
    "never": lambda target: tiny.bad_draft(),
    "scripted": lambda target: tiny.scripted_draft([0, 1, 2, 3, 4], 5),
    "random": tiny.random_draft,
}


def start(target, draft, ids: torch.Tensor, mask: torch.Tensor, max_length: int) -> tuple[RaggedLoop, DeviceRounds]:
    config = GenerationConfig(max_length=max_length, do_sample=False)
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length)])
    record = CallRecord("ragged", "test", 4)
    loop = RaggedLoop(target, draft, ids, mask, LogitsProcessorList(), criteria, config, record)
    loop._prefill()
    rounds = DeviceRounds(loop._forward, loop.proposer, loop.context, len(loop.rows), 0.0)
    rounds.anchors.copy_(torch.stack([row.anchor for row in loop.rows]))
    rounds.lengths.copy_(torch.tensor([row.length for row in loop.rows]))
    return loop, rounds


@torch.no_grad()
def finish(loop: RaggedLoop, rounds: DeviceRounds, most: int) -> torch.Tensor:
    column = (rounds.result.shape[1] - 3) // 2 + 1  # the accepted count; before it the target's token, first the drafts
    while not all(row.transcript.stopped for row in loop.rows):
        limits = [-1 if row.transcript.stopped else min(most, row.transcript.room - 1) for row in loop.rows]
        for row, limit, result in zip(loop.rows, limits, rounds.run(limits).tolist(), strict=True):
            if limit >= 0:
                own, accepted = result[column - 1], result[column]
                row.transcript.commit([*result[:accepted], own], None, None)
    return torch.stack([row.transcript.ids[0] for row in loop.rows])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["perm", "qwen3", "mistral", "gemma2"])
def test_tokens_equal_plain(device, family):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    rng = random.Random(family)
    target = tiny.perm_target() if family == "perm" else tiny.random_target(family)
    for name, draft in DRAFTS.items():
        rows, width = rng.randint(1, 4), rng.randint(2, 12)
        ids = torch.tensor([[rng.randint(1, 60) for _ in range(width)] for _ in range(rows)])
        mask = torch.ones_like(ids)
        for row in range(rows if rows > 1 else 0):
            padding = rng.randint(0, width - 1)
            ids[row, :padding] = mask[row, :padding] = 0
        here, there = copy.deepcopy(target).to(device), copy.deepcopy(draft(target)).to(device)
        ids, mask = ids.to(device), mask.to(device)
        plain = here.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
        with torch.no_grad():
            loop, rounds = start(here, there, ids, mask, width + 20)
        assert torch.equal(finish(loop, rounds, rng.randint(1, 4)), plain), name


def test_fused_projections_leave_the_targets_values():
    target = copy.deepcopy(tiny.random_target())
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    ids = torch.tensor([[3, 5, 9]])
    plain = target.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        loop, rounds = start(target, tiny.perm_draft(), ids, torch.ones_like(ids), 23)
    fuse.fuse_projections(loop.twin.model)
    assert torch.equal(finish(loop, rounds, 4), plain)
    after = target.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
