"""STATE: nothing of one call reaches the next, another thread, another target or another draft."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList

import checks
import hf_dspark
import tiny
from hf_dspark._compat import CACHE_KEY

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


@pytest.mark.parametrize(
    "error", [RuntimeError("user code failed"), KeyboardInterrupt(), torch.OutOfMemoryError("full")]
)
def test_state_1_calls_in_a_row_and_after_an_exception(error):
    target, draft = guided_pair()
    first, second = trace(target, copy.deepcopy(draft), LONG), trace(target, copy.deepcopy(draft), SHORT)
    assert trace(target, draft, LONG) == first
    assert trace(target, draft, SHORT) == second
    bomb = StoppingCriteriaList([Bomb(len(LONG) + 7, error)])
    with pytest.raises(type(error)), hf_dspark.record() as stats:
        target.generate(
            checks.tensor(LONG), assistant_model=draft, stopping_criteria=bomb, do_sample=False, max_new_tokens=20
        )
    assert stats.num_rounds >= 1, "the record shows what happened before the error"
    assert trace(target, draft, SHORT) == second
    assert trace(target, draft, LONG) == first


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


def test_state_3_options_of_a_call_stay_in_the_call():
    target, draft = guided_pair()
    before = trace(target, draft, LONG)
    configs = [copy.deepcopy(c.to_dict()) for c in (target.generation_config, draft.generation_config, draft.config)]
    short = trace(target, draft, LONG, **OVERRIDES)
    assert short.text == before.text and max(r[3] for r in short.rounds) <= 2 < max(r[3] for r in before.rounds)
    passed = GenerationConfig(max_new_tokens=20, do_sample=False, **OVERRIDES)
    kept = copy.deepcopy(passed.to_dict())
    with hf_dspark.record() as stats:
        target.generate(checks.tensor(LONG), generation_config=passed, assistant_model=draft)
    assert max(r.verified for r in stats.rounds) <= 2
    assert passed.to_dict() == kept
    assert [c.to_dict() for c in (target.generation_config, draft.generation_config, draft.config)] == configs
    assert trace(target, draft, LONG) == before


def test_state_3_pairs_do_not_influence_each_other():
    target, draft = guided_pair()
    other_target = tiny.random_target(seed=5)
    other_draft = tiny.random_draft(seed=9)
    fresh = lambda t, d: trace(t, copy.deepcopy(d), LONG)  # noqa: E731
    pairs = [(target, draft), (other_target, draft), (target, other_draft), (other_target, other_draft)]
    expected = [fresh(t, d) for t, d in pairs]
    for _ in range(2):
        assert [trace(t, d, LONG) for t, d in pairs] == expected


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


def test_state_5_two_threads_on_one_pair():
    target, draft = guided_pair()
    prompts = [LONG, SHORT, LONG[3:], SHORT + [9]]
    expected = [trace(target, draft, p) for p in prompts]
    found = [[] for _ in prompts]

    def work(i):
        found[i] = [trace(target, draft, prompts[i]) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[one] * 5 for one in expected]


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
