"""STATE: nothing of one call reaches the next, another thread, another target or another draft."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from accelerate import dispatch_model
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    pipeline,
)

import checks
import hf_dspark
import tiny
from hf_dspark._compat import CACHE_KEY

BOTH_PATHS = pytest.mark.parametrize("path", [{}, {"cache_implementation": "static"}], ids=["plain", "ragged"])
LONG, SHORT = [5, 9, 11, 3, 8, 2, 30, 31, 17], [40, 7]


def guided_pair():
    """T-rand and a draft whose proposals depend on all of its context; accepted on `LONG`'s text."""
    target = tiny.random_target()
    text = checks.plain(target, LONG)[0].tolist()
    return target, tiny.load_draft(*tiny.guided_files(tiny.text_table(text)))


class Trace:
    """Text and every round of a call, without the clock; confidences are equal up to rounding."""

    def __init__(self, output, stats):
        self.text = checks.sequences(output).tolist()
        self.rounds = [(r.position, r.anchor, r.draft_tokens, r.verified, r.accepted) for r in stats.rounds]
        self.confidence = torch.tensor([r.confidence for r in stats.rounds])

    def __eq__(self, other):
        same = (self.text, self.rounds) == (other.text, other.rounds)
        return same and torch.allclose(self.confidence, other.confidence, atol=1e-3)


def trace(target, draft, ids, **options) -> Trace:
    return Trace(*checks.generate(target, draft, ids, **options))


class Bomb(StoppingCriteria):
    """Raises once the text has `length` tokens."""

    def __init__(self, length, error):
        self.length, self.error = length, error

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] >= self.length:
            raise self.error
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class BombProcessor(LogitsProcessor):
    def __init__(self, length, error):
        self.bomb = Bomb(length, error)

    def __call__(self, input_ids, scores):
        self.bomb(input_ids, scores)
        return scores


BOMBS = {
    "stopping_criteria": lambda *bomb: StoppingCriteriaList([Bomb(*bomb)]),
    "logits_processor": lambda *bomb: LogitsProcessorList([BombProcessor(*bomb)]),
}


@BOTH_PATHS
@pytest.mark.parametrize("place", BOMBS)
@pytest.mark.parametrize(
    "error", [RuntimeError("user code failed"), KeyboardInterrupt(), torch.OutOfMemoryError("full")]
)
def test_state_1_calls_in_a_row_and_after_an_exception(error, place, path):
    target, draft = guided_pair()
    first, second = (trace(target, copy.deepcopy(draft), ids, **path) for ids in (LONG, SHORT))
    assert trace(target, draft, LONG, **path) == first
    assert trace(target, draft, SHORT, **path) == second
    with pytest.raises(type(error)), hf_dspark.record() as stats:
        bomb = {place: BOMBS[place](len(LONG) + 7, error)}
        target.generate(checks.tensor(LONG), assistant_model=draft, do_sample=False, max_new_tokens=20, **bomb, **path)
    assert stats.num_rounds >= 1, "the record shows what happened before the error"
    assert trace(target, draft, SHORT, **path) == second
    assert trace(target, draft, LONG, **path) == first


def test_state_1_one_path_leaves_nothing_to_the_other():
    target, draft = guided_pair()
    expected = [trace(target, copy.deepcopy(draft), ids) for ids in (LONG, SHORT)]
    for _ in range(2):
        for path in ({}, {"cache_implementation": "static"}):
            assert [trace(target, draft, ids, **path) for ids in (LONG, SHORT)] == expected


@pytest.mark.parametrize("family", ["qwen3", "qwen3_sliding"])
def test_state_1_a_cache_of_the_callers_survives_an_exception(family):
    """After an error the caller's cache holds no more than committed tokens, and it can be used again."""
    target = tiny.random_target(family)
    text = checks.plain(target, LONG, max_new_tokens=30)[0].tolist()
    draft = tiny.markov_draft(tiny.text_table(text))
    for length in range(len(LONG) + 1, len(LONG) + 12):
        cache, bomb = DynamicCache(config=target.config), StoppingCriteriaList([Bomb(length, RuntimeError("stop"))])
        with pytest.raises(RuntimeError, match="stop"):
            checks.generate(target, draft, LONG, **{CACHE_KEY: cache}, stopping_criteria=bomb)
        assert len(LONG) <= cache.get_seq_length() < length
        again, _ = checks.generate(target, draft, text[:length], **{CACHE_KEY: cache}, max_new_tokens=8)
        assert again[0].tolist() == text[: length + 8]


OVERRIDES = {"num_assistant_tokens": 2, "assistant_confidence_threshold": 0.6}


@BOTH_PATHS
def test_state_3_options_of_a_call_stay_in_the_call(path):
    target, draft = guided_pair()
    before = trace(target, draft, LONG, **path)
    configs = [copy.deepcopy(c.to_dict()) for c in (target.generation_config, draft.generation_config, draft.config)]
    short = trace(target, draft, LONG, **OVERRIDES, **path)
    assert short.text == before.text and max(r[3] for r in short.rounds) <= 2 < max(r[3] for r in before.rounds)
    passed = GenerationConfig(max_new_tokens=20, do_sample=False, **OVERRIDES, **path)
    kept = copy.deepcopy(passed.to_dict())
    with hf_dspark.record() as stats:
        target.generate(checks.tensor(LONG), generation_config=passed, assistant_model=draft)
    assert max(r.verified for r in stats.rounds) <= 2
    assert passed.to_dict() == kept
    assert [c.to_dict() for c in (target.generation_config, draft.generation_config, draft.config)] == configs
    assert trace(target, draft, LONG, **path) == before


@BOTH_PATHS
def test_state_3_pairs_do_not_influence_each_other(path):
    target, draft = guided_pair()
    other_target = tiny.random_target(seed=5)
    other_draft = tiny.random_draft(seed=9)
    fresh = lambda t, d: trace(t, copy.deepcopy(d), LONG, **path)  # noqa: E731
    pairs = [(target, draft), (other_target, draft), (target, other_draft), (other_target, other_draft)]
    expected = [fresh(t, d) for t, d in pairs]
    for _ in range(2):
        assert [trace(t, d, LONG, **path) for t, d in pairs] == expected


def test_state_3_shared_embeddings_follow_the_target_at_hand():
    """A draft without its own head used with two targets in turn takes each one's, also when it was attached before."""
    config = tiny.draft_config()
    tensors = tiny.draft_tensors(config)
    del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    targets = [tiny.random_target(), tiny.random_target(seed=5)]
    expected = [trace(t, tiny.load_draft(config, tensors), LONG) for t in targets]
    draft = tiny.load_draft(config, tensors).attach_target(targets[1])
    for i in (0, 1, 0):
        assert trace(targets[i], draft, LONG) == expected[i]


@pytest.mark.parametrize("static", [0, 2, 4], ids=["plain", "mixed", "ragged"])
def test_state_5_threads_on_one_pair(static):
    """Each of four threads ten times; the first `static` of them on the ragged path."""
    target, draft = guided_pair()
    prompts = [LONG, SHORT, LONG[3:], SHORT + [9]]
    paths = [{"cache_implementation": "static"} if i < static else {} for i in range(4)]
    expected = [trace(target, draft, p) for p in prompts]
    found = [[] for _ in prompts]

    def work(i):
        found[i] = [trace(target, draft, prompts[i], **paths[i]) for _ in range(10)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[one] * 10 for one in expected]


def test_state_5_two_threads_with_shared_head_and_two_targets():
    config = tiny.draft_config()
    tensors = tiny.draft_tensors(config)
    del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    targets = [tiny.random_target(), tiny.random_target(seed=5)]
    draft = tiny.load_draft(config, tensors)
    expected = [trace(t, draft, LONG) for t in targets]
    found = [None, None]

    def work(i):
        found[i] = [trace(targets[i], draft, LONG) for _ in range(6)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[expected[0]] * 6, [expected[1]] * 6]


class Nested(StoppingCriteria):
    """Runs another generation with the same pair in the middle of one."""

    def __init__(self, run):
        self.run, self.results = run, []

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] == len(LONG) + 6:
            self.results.append(self.run())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def test_a_generation_inside_a_generation():
    target, draft = guided_pair()
    expected_long, expected_short = trace(target, draft, LONG), trace(target, draft, SHORT)
    nested = Nested(lambda: trace(target, draft, SHORT))
    assert trace(target, draft, LONG, stopping_criteria=StoppingCriteriaList([nested])).text == expected_long.text
    assert nested.results == [expected_short]


def test_train_mode_and_gradients_are_left_alone():
    target, draft = guided_pair()
    expected = trace(target, draft, LONG)
    draft.train()
    assert trace(target, draft, LONG) == expected
    assert draft.training and not target.training
    assert all(p.grad is None and p.requires_grad and p.is_leaf for p in draft.parameters())
    draft.eval()
    hidden = draft.fc(torch.randn(1, 2, 192)).sum()
    hidden.backward()
    assert draft.fc.weight.grad is not None, "a draft that has generated can still be trained"


def test_a_pair_can_be_copied_moved_and_forgotten():
    target, draft = guided_pair()
    expected = trace(target, draft, LONG)
    assert trace(copy.deepcopy(target), copy.deepcopy(draft), LONG) == expected
    assert trace(target, copy.deepcopy(draft).to(torch.float64).to(torch.float32), LONG) == expected
    output = target.generate(checks.tensor(LONG), assistant_model=draft, return_dict_in_generate=True, max_new_tokens=5)
    reference = weakref.ref(draft)
    del draft, output
    gc.collect()
    assert reference() is None, "something still holds the draft"


def test_weights_changed_between_calls_take_effect():
    """No stale copy of the weights: after training or loading new weights the next call uses them."""
    target, draft = guided_pair()
    trace(target, draft, LONG)
    other = tiny.load_draft(*tiny.guided_files(tiny.text_table(LONG), seed=77))
    expected = trace(target, other, LONG)
    draft.load_state_dict(other.state_dict())
    assert trace(target, draft, LONG) == expected
    with torch.no_grad():
        draft.layers[0].self_attn.k_proj.weight.add_(1.0)
        other.layers[0].self_attn.k_proj.weight.add_(1.0)
    assert trace(target, draft, LONG) == trace(target, copy.deepcopy(other), LONG)
    draft.layers[0].self_attn.v_proj.weight = torch.nn.Parameter(
        torch.zeros_like(draft.layers[0].self_attn.v_proj.weight)
    )
    other.layers[0].self_attn.v_proj.weight.data.zero_()
    assert trace(target, draft, LONG) == trace(target, copy.deepcopy(other), LONG)


def test_a_pipeline_forgets_a_call_before_the_next():
    """transformers' pipeline with the draft as its assistant: prompts in any order, chats and lists of prompts."""
    target, draft = copy.deepcopy(tiny.perm_target()), tiny.perm_draft()
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.pad_token, tokenizer.padding_side = "_", "left"
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    drafted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=draft)
    options = {"max_new_tokens": 9, "do_sample": False}
    chat = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "d"}, {"role": "user", "content": "e"}]
    for prompt in ("abc", "z", "abc", chat, ["ab", "xyz"], "abc"):
        with hf_dspark.record() as stats:
            found = drafted(prompt, **options)
        assert found == plain(prompt, **options)
        assert stats.num_accepted > 0 and stats.path == "plain"
    with hf_dspark.record() as stats:
        found = drafted(["ab", "xyz", "q"], batch_size=3, **options)
    assert found == plain(["ab", "xyz", "q"], batch_size=3, **options) and stats.path == "ragged"


DISPATCHED = {
    "cpu": {"": "cpu"},
    "offloaded": {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu",
                  **{f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(6)}},
}  # fmt: skip


@pytest.mark.parametrize("placement", DISPATCHED)
def test_a_target_dispatched_by_accelerate(placement, tmp_path):
    """Hooks move weights in and out around each layer: the same text, in sessions and in a second call too."""
    target, draft = guided_pair()
    dispatched = dispatch_model(
        copy.deepcopy(target), DISPATCHED[placement], offload_dir=tmp_path, main_device="cpu", force_hooks=True
    )
    expected = trace(target, draft, LONG)
    for _ in range(2):
        assert trace(dispatched, draft, LONG) == expected
        found, stats = checks.generate(dispatched, draft, LONG, cache_implementation="static")
        assert found.tolist() == expected.text and stats.reason
    session = hf_dspark.Session(dispatched, draft)
    ids = session.generate(checks.tensor(LONG), do_sample=False, max_new_tokens=20)
    longer = torch.cat((ids, torch.tensor([[7]])), dim=1)
    with hf_dspark.record() as stats:
        found = session.generate(longer, do_sample=False, max_new_tokens=9)
    assert found.tolist() == checks.plain(target, longer, max_new_tokens=9).tolist()
    assert stats.num_reused == longer.shape[1] - 2
