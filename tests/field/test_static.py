"""STATIC, LAYOUT-3: a static cache is the ragged path; its buffers are reused, grow, and go when nobody needs them."""

import copy
import gc
import weakref

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StaticCache, StoppingCriteria, StoppingCriteriaList

import checks
import hf_dspark
import tiny
from hf_dspark._compat import CACHE_KEY
from hf_dspark.generation import twin as twin_module

PROMPT = [7, 21, 40, 3, 9]
CHAIN = tiny.chain(9, 80)
STATIC = {"cache_implementation": "static"}
FAMILIES = ("qwen3", "llama", "qwen3_sliding", "mistral", "gemma2", "gemma3_text")


def led(family: str, prompt=PROMPT, **settings):
    """A target of `family` and a draft that is right about two in three of its tokens."""
    target = tiny.random_target(family, layers=3)
    text = checks.plain(target, prompt, max_new_tokens=40)[0].tolist()
    table = tiny.text_table(text)
    for token in text[len(prompt) + 2 :: 3]:
        table[token] = table[token].roll(1)
    return target, tiny.markov_draft(table, **({"taps": (0, 1)} | settings))


def static_equals_plain(target, draft, prompt=PROMPT, options=None, **more):
    return checks.batch_equals_plain(target, draft, [prompt], options, **STATIC, **more)


# ---- STATIC-1: supported combinations equal plain generate, the others are refused with the alternative


@pytest.mark.parametrize("family", FAMILIES)
def test_static_1_text_is_that_of_a_dynamic_cache(family):
    """Sliding layers included, with the prompt shorter and longer than the window."""
    target, draft = led(family)
    _, stats, _ = static_equals_plain(target, draft, max_new_tokens=40)
    assert 0 < stats.num_accepted < stats.num_verified
    for prompt in (PROMPT[:1], PROMPT * 3):
        static_equals_plain(target, draft, prompt)


def test_static_1_said_in_a_config_of_the_call_or_of_the_target():
    target, draft = copy.deepcopy(tiny.perm_target()), tiny.perm_draft()
    config = GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=0, **STATIC)
    output, stats = checks.generate(target, draft, PROMPT, generation_config=config, max_new_tokens=9)
    assert output[0, 5:].tolist() == CHAIN[:9] and stats.path == "ragged"
    target.generation_config.cache_implementation = "static"
    output, stats = checks.generate(target, draft, PROMPT, max_new_tokens=9)
    assert output[0, 5:].tolist() == CHAIN[:9] and stats.path == "ragged"


@pytest.mark.parametrize("rows", [1, 2])
def test_static_1_a_callers_own_static_cache_is_refused_with_the_alternative(rows):
    target, draft = tiny.perm_target(), tiny.perm_draft()
    cache = StaticCache(config=target.config, max_cache_len=64)
    ids = torch.tensor([PROMPT] * rows)
    with checks.CallCounter(target) as calls, pytest.raises(ValueError, match='cache_implementation="static"'):
        checks.generate(target, draft, ids, **{CACHE_KEY: cache})
    assert not calls.shapes
    static_equals_plain(target, draft)


@pytest.mark.parametrize("wanted", ["output_hidden_states", "output_attentions"])
def test_static_1_what_only_the_other_path_has_goes_there_and_says_so(wanted):
    """Plain generate with a static cache is no yardstick for attentions: theirs are as wide as the cache."""
    target = tiny.random_target("qwen3", layers=3, attention="eager")
    _, draft = led("qwen3")
    options = {wanted: True, "return_dict_in_generate": True}
    expected = checks.plain(target, PROMPT, **options)
    output, stats = checks.generate(target, draft, PROMPT, **STATIC, **options)
    checks.same_outputs(output, expected)
    assert stats.path == "plain" and wanted in stats.reason
    assert output.speculation.reason == stats.reason


def test_static_1_scores_and_logits():
    target, draft = led("qwen3")
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.3}
    expected = checks.plain(target, PROMPT, **options)
    output, stats = checks.generate(target, draft, PROMPT, **STATIC, **options)
    assert torch.equal(output.sequences, expected.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(output[name], expected[name], atol=2e-4, rtol=2e-4)
    assert output.speculation.to_dict() == stats.to_dict() and stats.path == "ragged"


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_static_1_layers_without_keys_are_never_served_in_silence(family):
    """Convolutions and recurrent layers have no place in a ragged cache: another path with the reason, same text."""
    target, draft = tiny.random_target(family, layers=4), tiny.random_draft(taps=(0, 2))
    expected = checks.plain(target, PROMPT)
    try:
        output, stats = checks.generate(target, draft, PROMPT, **STATIC)
    except ValueError as error:
        assert "static" in str(error)
        return
    assert torch.equal(output, expected)
    assert stats.path != "ragged" and stats.reason


@pytest.mark.parametrize("options", [{"prefill_chunk_size": 2}, {"max_length": 12}, {"min_new_tokens": 9,
                                     "eos_token_id": CHAIN[3]}, {"eos_token_id": [CHAIN[7], 62]}])  # fmt: skip
def test_static_1_with_other_options(options):
    target, draft = tiny.perm_target(), tiny.scripted_draft([2, 0, 4, 1], CHAIN[0])
    expected = checks.plain(target, PROMPT, **options)
    output, stats = checks.generate(target, draft, PROMPT, **STATIC, **options)
    assert output.tolist() == expected.tolist() and stats.path == "ragged"
    checks.rows_add_up(stats, [PROMPT], [output[0, 5:].tolist()], 4)


def test_static_1_prompts_that_are_not_ids():
    """Embeddings as prompt, or a cache that is filled already: the right text on whatever path, or a clear refusal."""
    target, draft = led("qwen3")
    text = checks.plain(target, PROMPT)[0].tolist()
    embeds = target.get_input_embeddings()(checks.tensor(PROMPT)).detach()
    try:
        output, stats = checks.generate(target, draft, None, inputs_embeds=embeds, **STATIC)
    except ValueError as error:
        assert "embed" in str(error)
    else:
        assert output[0].tolist() == text[5:]
        assert stats.path == "ragged" or "embed" in stats.reason


def test_static_1_no_cache_and_stateful_processors_go_to_the_target_alone():
    target, draft = led("qwen3")
    options = {"guidance_scale": 1.7, "negative_prompt_ids": checks.tensor([5, 6])}
    expected = checks.plain(target, PROMPT, **options)
    output, stats = checks.generate(target, draft, PROMPT, **STATIC, **options)
    assert torch.equal(output, expected)
    assert stats.path == "target_only" and "Guidance" in stats.reason


@pytest.mark.parametrize("options", [{}, {"max_new_tokens": 1}, {"eos_token_id": CHAIN[6]}, {"eos_token_id": CHAIN[0]}])
def test_static_1_streams_each_token_once(options):
    target, streamers = tiny.perm_target(), [checks.ListStreamer() for _ in range(2)]
    checks.plain(target, PROMPT, streamer=streamers[0], **options)
    draft = tiny.scripted_draft([2, 0, 4], CHAIN[0])
    _, stats = checks.generate(target, draft, PROMPT, streamer=streamers[1], **STATIC, **options)
    assert streamers[1].puts == streamers[0].puts and streamers[1].ends == 1
    assert stats.path == "ragged"


def test_layout_3_both_read_outs_accept_the_same_on_both_paths():
    """DFlash without a Markov head, anchor-first and 1+N: one width of block does not fit the other."""
    for anchor_first, gamma in ((None, 7), (False, 6)):
        draft = tiny.slot0_draft(gamma=7, sample_from_anchor=anchor_first)
        assert draft.config.num_draft_tokens == gamma
        _, plain = checks.equal_to_plain(tiny.perm_target(), draft, PROMPT)
        _, static, _ = static_equals_plain(tiny.perm_target(), draft)
        assert [r.accepted for r in static.rounds] == [r.accepted for r in plain.rounds]
        assert {r.accepted for r in static.rounds[:-1]} == {int(anchor_first is None)}


# ---- STATIC-3: nothing is retained but what release() frees


def live_bytes() -> int:
    """Bytes of all storages that Python still refers to."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not thing.is_meta and type(thing) in (torch.Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


class Bomb(StoppingCriteria):
    def __init__(self, error, length):
        self.error, self.length = error, length

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] >= self.length:
            raise self.error("user code failed")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def run(target, draft, error=None, rows=2, **more):
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 30} | STATIC | more
    if error is None:
        target.generate(torch.tensor([PROMPT] * rows), assistant_model=draft, return_dict_in_generate=True, **options)
        return
    options["stopping_criteria"] = StoppingCriteriaList([Bomb(error, 12)])
    with pytest.raises(error):
        target.generate(torch.tensor([PROMPT] * rows), assistant_model=draft, **options)


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("end", ["release", "release target", "forget draft", "forget target"])
def test_static_3_buffers_go(error, end):
    target, draft = copy.deepcopy(tiny.random_target()), tiny.random_draft()
    run(target, draft)
    hf_dspark.release()
    before, attributes = live_bytes(), set(vars(target)) | set(vars(target.model))
    run(target, draft, error)
    assert set(vars(target)) | set(vars(target.model)) == attributes, "nothing is left on the target"
    references = weakref.ref(draft), weakref.ref(target)
    if end.startswith("release"):
        hf_dspark.release(*([target] if "target" in end else []))
        assert live_bytes() <= before
        run(target, draft, error)
    elif end == "forget draft":
        del draft
        gc.collect()
        assert references[0]() is None
        assert live_bytes() < before
    else:
        del target
        gc.collect()
        assert references[1]() is None
        assert live_bytes() < before


@pytest.mark.parametrize("rows,path", [(1, {}), (2, {}), (1, {"cache_implementation": None})])
@pytest.mark.parametrize("error", [None, RuntimeError])
def test_static_3_a_call_ends_with_its_output(rows, path, error):
    """What a call was given and has made goes with it at once, not when Python next looks for cycles."""
    target, draft = copy.deepcopy(tiny.random_target()), tiny.random_draft()
    run(target, draft, rows=rows, **path)
    gc.collect()
    gc.disable()
    try:
        processor = checks.LeaveAlone()
        given = {"logits_processor": LogitsProcessorList([processor]), "output_scores": True} | path
        run(target, draft, error, rows, **given)
        references = weakref.ref(processor), weakref.ref(draft)
        del given, processor, draft
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


def test_static_3_release_touches_the_named_target_only():
    """Releasing one target, or one that never ran, leaves the other's buffers and text as they are."""
    targets, draft = [copy.deepcopy(tiny.random_target(seed=seed)) for seed in (0, 5)], tiny.random_draft()
    for target in targets:
        static_equals_plain(target, draft)
    hf_dspark.release(targets[0])
    hf_dspark.release(tiny.random_target(seed=9))
    for target in targets:
        static_equals_plain(target, draft)
    hf_dspark.release()
    hf_dspark.release()
    for target in targets:
        static_equals_plain(target, draft)


def test_static_3_the_target_shares_no_state_with_its_twin():
    target, draft = copy.deepcopy(tiny.random_target()), tiny.random_draft()
    names, config = list(target.state_dict()), copy.deepcopy(target.config.to_dict())
    hooks = {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in target.named_modules()}
    attention = target.config._attn_implementation
    run(target, draft)
    assert list(target.state_dict()) == names and target.config.to_dict() == config
    assert target.config._attn_implementation == attention
    assert {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in target.named_modules()} == hooks
    copy.deepcopy(target), copy.deepcopy(draft)
    target.train()
    target(torch.tensor([PROMPT])).logits.sum().backward()
    assert target.lm_head.weight.grad is not None, "a target that has generated can still be trained"


# ---- STATIC-5: the number of preparations does not grow with the number of prompts


@pytest.fixture
def twins(monkeypatch):
    """Counts the twins that are built; each is a warm-up (compilation and capture on an accelerator)."""
    built, original = [], twin_module.Twin.__init__

    def count(self, *args, **kwargs):
        built.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(twin_module.Twin, "__init__", count)
    return built


def test_static_5_prompts_of_many_lengths_share_one_preparation(twins):
    target, draft = copy.deepcopy(tiny.perm_target()), tiny.perm_draft()
    static_equals_plain(target, draft, tiny.chain(3, 40), max_new_tokens=30)
    first = len(twins)
    for length in (1, 2, 3, 5, 8, 13, 21, 34, 39, 40):
        static_equals_plain(target, draft, tiny.chain(length, length), max_new_tokens=5 + length % 7)
    assert len(twins) == first == 1


def test_static_5_growing_prompts_grow_the_buffers_a_few_times(twins):
    target, draft = copy.deepcopy(tiny.perm_target()), tiny.perm_draft()
    for length in range(2, 62, 4):
        static_equals_plain(target, draft, tiny.chain(3, length), max_new_tokens=6)
    assert len(twins) <= 6


def test_static_5_warmup_does_it_beforehand(twins):
    target, draft = copy.deepcopy(tiny.perm_target()), tiny.perm_draft()
    with hf_dspark.record() as stats:
        hf_dspark.warmup(target, draft, batch_size=3, max_length=64)
    assert stats.num_rounds == stats.num_tokens == 0, "warming up is no generation"
    assert len(twins) == 1
    rows = [tiny.chain(3, 9), [5], tiny.chain(8, 20)]
    checks.batch_equals_plain(target, draft, rows)
    checks.batch_equals_plain(target, draft, rows[:2])
    static_equals_plain(target, draft)
    assert len(twins) == 1, "a smaller batch or a shorter text fits into what is there"
    checks.batch_equals_plain(target, draft, [*rows, PROMPT, PROMPT])
    checks.batch_equals_plain(target, draft, rows, max_new_tokens=100)


@pytest.mark.parametrize("arguments", [{"batch_size": 0}, {"batch_size": -1}, {"max_length": 0}])
def test_static_5_warmup_refuses_what_it_cannot_size(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        hf_dspark.warmup(tiny.perm_target(), tiny.perm_draft(), **arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_static_5_captures_are_bounded(monkeypatch):
    captured, original = [], torch.cuda.graph.__enter__

    def count(self):
        captured.append(self)
        return original(self)

    monkeypatch.setattr(torch.cuda.graph, "__enter__", count)
    target, draft = copy.deepcopy(tiny.perm_target()).cuda(), copy.deepcopy(tiny.perm_draft()).cuda()
    hf_dspark.warmup(target, draft, max_length=80)
    warm = len(captured)
    assert warm > 0
    for length in (1, 2, 3, 5, 8, 13, 21, 34, 39, 40):
        ids = torch.tensor([tiny.chain(3, length)], device="cuda")
        output, stats = checks.generate(target, draft, ids, pad_token_id=0, **STATIC)
        assert output[0, length:].tolist() == tiny.chain(int(ids[0, -1]), 20)
        assert stats.captured and stats.path == "ragged"
    assert len(captured) == warm


# ---- STATIC-7: the end of the buffers


@pytest.mark.parametrize("gamma", [1, 4])
def test_static_7_every_length_around_the_capacity(gamma):
    """Texts that end before, at and behind what was prepared, in steps of one, with full blocks all the way."""
    target, draft = copy.deepcopy(tiny.perm_target()), tiny.perm_draft(gamma)
    capacity = 40
    hf_dspark.warmup(target, draft, max_length=capacity)
    for max_length in [*range(capacity - gamma - 1, capacity + gamma + 2), 2 * capacity]:
        new, _, _ = static_equals_plain(target, draft, max_new_tokens=max_length - len(PROMPT))
        assert new[0] == CHAIN[: max_length - len(PROMPT)]
        checks.batch_equals_plain(target, draft, [PROMPT, PROMPT[2:]], max_new_tokens=max_length - len(PROMPT))


@pytest.mark.parametrize("positions", [32, 33])
def test_static_7_the_end_of_the_context_window(positions):
    """Never a position that plain generate would not use; the draft's table may be smaller than the target's."""
    table = tiny.one_hot_table(tiny.NEXT, 80.0)
    target = tiny.table_target(table, layers=5, max_position_embeddings=positions)
    for most in (positions, 16):
        draft = tiny.perm_draft(max_position_embeddings=most)
        for length in (20, positions - 5, positions - 4, positions - 1):
            prompt = tiny.chain(3, length)
            new, _, _ = static_equals_plain(target, draft, prompt, max_new_tokens=positions - length)
            assert new[0] == tiny.chain(prompt[-1], positions - length)


def test_static_7_a_criterion_without_a_length_limit_ends_the_text():
    """Without `max_new_tokens` the limit is the generation config's default; a criterion ends the text before it."""
    target, draft = tiny.perm_target(), tiny.perm_draft()
    make = lambda: {"stopping_criteria": StoppingCriteriaList([checks.StopAt(30)])}  # noqa: E731
    new, _, _ = static_equals_plain(target, draft, options=make, max_new_tokens=400)
    assert new[0] == CHAIN[:25]
