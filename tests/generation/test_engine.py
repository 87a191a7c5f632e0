"""What the engine keeps of a pair: built once, grown when needed, rebuilt for changed models, given back."""

import copy
import functools
import random

import pytest
import torch

import checks
import tiny
from hf_dspark.generation import attention
from hf_dspark.generation import engine as engine_module
from hf_dspark.generation.engine import FastPath
from hf_dspark.generation.engines import engine_of, release
from hf_dspark.generation.prompts import pack

ROWS = [[3, 5], [9, 41, 7, 20], [12]]


def run(target, draft, rows=ROWS, **options):
    return checks.batch_equals_plain(target, draft, rows, **({"max_new_tokens": 12} | options))


def test_rows_accept_different_lengths():
    target, draft = tiny.perm_target(), tiny.scripted_draft([0, 1, 2, 3, 4], 5)
    new, stats, _ = run(target, draft, [[3, 5], [9, 41], [12, 8]], max_new_tokens=30)
    assert new == [tiny.chain(token, 30) for token in (5, 41, 8)]
    assert len({tuple(r.accepted for r in stats.rounds if r.row == row) for row in range(3)}) > 1


def test_one_engine_serves_calls_of_any_shape():
    target, draft = copy.deepcopy(tiny.perm_target()), tiny.perm_draft()
    run(target, draft)
    engine = engine_of(target, draft)
    for rows in (ROWS, ROWS[:1], ROWS * 3, [[7] * 30] * 2):
        run(target, draft, rows, **({"cache_implementation": "static"} if len(rows) == 1 else {}))
    assert engine_of(target, draft) is engine


def test_buffers_grow_with_rows_and_length_and_keep_the_text_of_the_call(monkeypatch):
    """Room that runs out in the middle of a call is made then; what the rows hold is kept."""
    monkeypatch.setattr(engine_module, "FIRST_SLOTS", 64)
    table = tiny.one_hot_table(tiny.NEXT, 80.0)
    target = tiny.table_target(table, layers=1, max_position_embeddings=4096)
    draft, sizes = tiny.perm_draft(taps=(0,), max_position_embeddings=4096), []
    for rows, new in ((ROWS[:2], 12), (ROWS * 3, 12), (ROWS[:2], 700), (ROWS * 3, 12)):
        options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        ids = target.generate(**checks.batch(rows), assistant_model=draft, **options)
        assert ids[:, -new:].tolist() == [tiny.chain(row[-1], new) for row in rows]
        sizes.append(engine_of(target, draft).num_bytes)
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[3] < sizes[2], "many short rows after few long ones do not make the product of both"


def test_each_target_and_each_draft_has_its_own():
    """Pairs in turn do not push each other out, and releasing one target leaves the text of the others."""
    targets = [copy.deepcopy(tiny.perm_target()) for _ in range(2)]
    drafts = [tiny.perm_draft() for _ in range(2)]
    pairs = [(target, draft) for target in targets for draft in drafts]
    for pair in pairs:
        run(*pair)
    engines = [engine_of(*pair) for pair in pairs]
    assert len(set(map(id, engines))) == 4
    for pair in pairs:
        run(*pair)
    assert all(engine_of(*pair) is engine for pair, engine in zip(pairs, engines, strict=True))
    release(targets[0])
    for pair in pairs:
        run(*pair)


def test_a_copy_of_a_draft_starts_without_engines():
    target, draft = copy.deepcopy(tiny.perm_target()), tiny.perm_draft()
    run(target, draft)
    other = copy.deepcopy(draft)
    assert engine_of(target, other) is not engine_of(target, draft)
    run(target, other)


def test_the_target_is_left_alone():
    target, draft = copy.deepcopy(tiny.perm_target()), tiny.perm_draft()
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    run(target, draft)
    after = target.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert target.config._attn_implementation != attention.NAME
    assert not any(hasattr(module, "ragged_cache") for module in target.modules())


def test_a_call_that_the_ragged_path_refuses_leaves_the_fused_weights_to_release():
    target = copy.deepcopy(tiny.random_target("qwen3", layers=2))
    draft = tiny.random_draft(target, taps=(-1, 0))
    attention, mlp = target.model.layers[0].self_attn, target.model.layers[0].mlp

    def fused() -> bool:
        return attention.q_proj.weight.untyped_storage() == attention.k_proj.weight.untyped_storage()

    def call() -> str:
        rows = checks.batch(ROWS)
        options = {"attention_mask": rows["attention_mask"], "max_new_tokens": 6, "pad_token_id": 0}
        return checks.generate(target, draft, rows["input_ids"], **options)[1].path

    assert call() == "ragged" and fused()
    mlp.forward = functools.partial(type(mlp).forward, mlp)
    assert call() == "target_only"
    del mlp.forward
    release(target)
    assert not fused()
    assert call() == "ragged" and fused()


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_pack_covers_every_prompt_in_order(chunk):
    rng = random.Random(chunk)
    for _ in range(30):
        lengths = [rng.randint(1, 20) for _ in range(rng.randint(1, 6))]
        groups = pack(lengths, chunk)
        assert all(sum(count for _, _, count in group) <= chunk for group in groups)
        spans = [span for group in groups for span in group]
        places = [(row, start + i) for row, start, count in spans for i in range(count)]
        assert places == [(row, i) for row, length in enumerate(lengths) for i in range(length)]


def test_options_of_the_fast_path_change_nothing_but_speed():
    target, draft = copy.deepcopy(tiny.random_target("gemma2")), tiny.random_draft()
    for fuse in (True, False, True):
        draft.fast_path = FastPath(fuse_projections=fuse)
        run(target, draft)
