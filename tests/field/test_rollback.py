"""ROLLBACK and NUMERIC: rejected tokens leave every kind of cache without a trace, on both paths."""

import copy

import pytest
import torch
from transformers import DynamicCache, StoppingCriteriaList

import checks
import oracle
import tiny
from hf_dspark._compat import CACHE_KEY
from hf_dspark.generation import recurrent
from hf_dspark.generation.ragged_cache import RaggedStore

PROMPT = [7, 21, 40, 3, 9, 30, 12, 50, 41, 5]
SLIDING = ("qwen3_sliding", "mistral", "gemma2", "gemma3_text")


def patterned(text: list[int], prompt: int, pattern, gamma: int = 4):
    """D-scripted for any target: along `text`, rounds accept about `pattern` drafts (repeated tokens share a row)."""
    table, anchor = tiny.text_table(text), prompt
    for accepted in pattern * 20:
        if accepted < gamma and anchor + accepted < len(text):
            row = text[anchor + accepted]
            table[row] = table[row].roll(1)
        anchor += accepted + 1
    return table


@pytest.mark.parametrize("family", SLIDING)
@pytest.mark.parametrize("attention,window,gamma", [("eager", 16, 4), ("sdpa", 16, 4), ("sdpa", 3, 7), ("eager", 2, 4)])
def test_rollback_2_sliding_windows(family, attention, window, gamma):
    """The text crosses the window, the window is smaller than the block, the prompt is longer than the window."""
    if family == "gemma2" and attention == "sdpa":
        pytest.skip("this family has no sdpa in transformers")
    target = tiny.random_target(family, layers=4, attention=attention, sliding_window=window)
    text = checks.plain(target, PROMPT, max_new_tokens=28)[0].tolist()
    table = patterned(text, len(PROMPT), [1, 4, 0, 2, 3], gamma)
    config, tensors = tiny.guided_files(table, gamma=gamma, taps=(0, 2))
    draft = tiny.load_draft(config, tensors)
    _, stats = checks.equal_to_plain(target, draft, PROMPT, max_new_tokens=28)
    assert 0 < stats.num_accepted < stats.num_verified
    checks.rounds_match(stats, oracle.Oracle(config, tensors), target, text)
    checks.equal_to_plain(target, draft, PROMPT[:2], max_new_tokens=20)
    checks.equal_to_plain(target, draft, PROMPT, max_new_tokens=10, prefill_chunk_size=4)


EVERY = ["qwen3", "qwen3_sliding", "mistral", "gemma2", "gemma3_text", "gpt2", "lfm2", "qwen3_next"]


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("accepted", range(5))
@pytest.mark.parametrize("ended_by", ["length", "criterion", "limit inside the block"])
def test_rollback_4_returned_cache_equals_a_fresh_one(family, accepted, ended_by):
    """After a round that accepts 0..γ drafts, one probe token through the returned cache and through a fresh cache."""
    target = tiny.random_target(family, layers=4)
    text = checks.plain(target, PROMPT, max_new_tokens=30)[0].tolist()
    start = len(PROMPT)
    table = torch.zeros(tiny.V, tiny.V)
    for k in range(accepted):
        table[text[start + k]] = 0
        table[text[start + k], text[start + k + 1]] = 40
    draft = tiny.markov_draft(table, taps=(0, 2))
    new = accepted + 2
    options = {"return_dict_in_generate": True, "max_new_tokens": new}
    if ended_by == "criterion":
        options = {
            "stopping_criteria": StoppingCriteriaList([checks.StopAt(start + new)]),
            "return_dict_in_generate": True,
        }
    if ended_by == "limit inside the block":
        options["stopping_criteria"] = StoppingCriteriaList([checks.StopAt(start + max(new - 1, 1))])
    expected = checks.plain(target, PROMPT, **options)
    output, _ = checks.generate(target, draft, PROMPT, **options)
    sequence = output.sequences[0].tolist()
    assert sequence == expected.sequences[0].tolist()
    cache, fresh = output[CACHE_KEY], expected[CACHE_KEY]
    assert cache.get_seq_length() == fresh.get_seq_length() == len(sequence) - 1
    for layer, plain_layer in zip(cache.layers, fresh.layers, strict=True):
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            states, plain_states = getattr(layer, name, None), getattr(plain_layer, name, None)
            torch.testing.assert_close(states, plain_states, atol=1e-4, rtol=1e-4, allow_subclasses=True)
        assert getattr(layer, "record_past", False) is getattr(plain_layer, "record_past", False)
    with torch.no_grad():
        probe = {"input_ids": checks.tensor(sequence[-1:]), "use_cache": True}
        after = target(**probe, **{CACHE_KEY: cache}).logits
        whole = target(checks.tensor(sequence)).logits[:, -1:]
    torch.testing.assert_close(after, whole, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 3}, {"return_dict_in_generate": True}])
def test_layers_with_a_state_instead_of_keys(family, options):
    """Convolutions are cut like keys, recurrent states are put back."""
    target = tiny.random_target(family, layers=4)
    text = checks.plain(target, PROMPT)[0].tolist()
    draft = tiny.markov_draft(patterned(text, len(PROMPT), [1, 4, 0, 2]), taps=(0, 2))
    output, stats = checks.generate(target, draft, PROMPT, **options)
    assert checks.sequences(output)[0].tolist() == text
    checks.adds_up(stats, 20, 4)
    assert 0 < stats.num_accepted < stats.num_verified


def test_hidden_states_and_attentions_of_a_target_with_recurrent_states():
    """They begin behind the tokens that a round feeds once more."""
    target = tiny.random_target("qwen3_next", layers=4, attention="eager")
    text = checks.plain(target, PROMPT, max_new_tokens=30)[0].tolist()
    draft = tiny.markov_draft(patterned(text, len(PROMPT), [1, 0, 2, 4, 0, 0, 3]), taps=(0, 2))
    wanted = ("output_hidden_states", "output_attentions", "output_scores", "output_logits", "return_dict_in_generate")
    options = dict.fromkeys(wanted, True) | {"max_new_tokens": 30}
    found, stats = checks.generate(target, draft, PROMPT, **options)
    checks.same_outputs(found, checks.plain(target, PROMPT, **options))
    assert 0 < stats.num_accepted < stats.num_verified


def test_rejections_seldom_cost_a_forward_of_their_own():
    """Tokens behind a recurrent state that was put back go into the next round, until they are more than a block."""
    target = tiny.random_target("qwen3_next", layers=4)
    draft = tiny.bad_draft(taps=(0, 2))
    with checks.CallCounter(target.model) as counter:
        checks.generate(target, draft, PROMPT, max_new_tokens=2)  # the trial of the family is behind
        counter.shapes.clear()
        _, stats = checks.generate(target, draft, PROMPT, max_new_tokens=33)
    rounds = stats.num_rounds
    assert rounds > 28, "nearly all rejected"
    assert len(counter.shapes) <= 1 + rounds + 1 + rounds // 5  # prefill, rounds, the end, every γ + 1 rejections


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_a_cache_with_recurrent_states_at_committed_tokens(error):
    """Whatever layer it comes from: the cache holds a prefix of the text, and generate goes on from it."""
    target = copy.deepcopy(tiny.random_target("qwen3_next", layers=4))
    text = checks.plain(target, PROMPT, max_new_tokens=30)[0].tolist()
    draft = tiny.markov_draft(patterned(text, len(PROMPT), [1, 0, 2, 4, 0]), taps=(0, 2))
    checks.generate(target, draft, PROMPT, max_new_tokens=2)
    for layer in range(4):
        for at in range(2, 9):
            cache, calls = DynamicCache(config=target.config), []

            def fail(module, inputs, at=at, calls=calls):
                calls.append(1)
                if len(calls) == at:
                    raise error

            handle = target.model.layers[layer].mlp.register_forward_pre_hook(fail)
            with pytest.raises(error):
                checks.generate(target, draft, PROMPT, max_new_tokens=30, **{CACHE_KEY: cache})
            handle.remove()
            length = cache.get_seq_length()
            assert len(PROMPT) <= length < len(text)
            again, _ = checks.generate(target, draft, text[: length + 1], max_new_tokens=6, **{CACHE_KEY: cache})
            assert again[0].tolist() == text[: length + 7]


def test_a_family_that_cannot_go_on_from_a_state_decodes_without_drafts(monkeypatch):
    """A model that starts every block of several tokens from an empty state, as some do, must not verify drafts."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    original = modeling_qwen3_next.torch_chunk_gated_delta_rule

    def forgetful(*args, initial_state=None, **kwargs):
        return original(*args, initial_state=None, **kwargs)

    monkeypatch.setattr(recurrent, "_TRIED", {})
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", forgetful)
    target = tiny.random_target("qwen3_next", layers=4)
    text = checks.plain(target, PROMPT)[0].tolist()
    output, stats = checks.generate(target, tiny.random_draft(taps=(0, 2)), PROMPT)
    assert output[0].tolist() == text
    assert stats.path == "target_only" and "several tokens behind a state" in stats.reason


@pytest.mark.parametrize("family", SLIDING)
@pytest.mark.parametrize("window,gamma", [(16, 4), (3, 7), (2, 4)])
def test_rollback_2_sliding_windows_on_the_ragged_path(family, window, gamma):
    """The text crosses the window, the window is smaller than the block, prompts are shorter and longer than it."""
    target = tiny.random_target(family, layers=4, sliding_window=window)
    text = checks.plain(target, PROMPT, max_new_tokens=28)[0].tolist()
    config, tensors = tiny.guided_files(patterned(text, len(PROMPT), [1, 4, 0, 2, 3], gamma), gamma=gamma, taps=(0, 2))
    draft, static = tiny.load_draft(config, tensors), {"cache_implementation": "static"}
    _, stats, _ = checks.batch_equals_plain(target, draft, [PROMPT], max_new_tokens=28, **static)
    assert 0 < stats.num_accepted < stats.num_verified
    checks.rounds_match(stats, oracle.Oracle(config, tensors), target, text)
    checks.batch_equals_plain(target, draft, [PROMPT, PROMPT[:2], PROMPT * 2], max_new_tokens=28)


@pytest.mark.parametrize("family", ["qwen3", *SLIDING])
@pytest.mark.parametrize("accepted", range(5))
def test_rollback_4_logits_after_a_round_are_those_of_the_committed_prefix(family, accepted):
    """After a round that accepts 0..γ drafts, the logits of what follows equal those of the whole text at once."""
    target = tiny.random_target(family, layers=4)
    text = checks.plain(target, PROMPT, max_new_tokens=30)[0].tolist()
    table = patterned(text, len(PROMPT), [accepted, 0, accepted])
    draft = tiny.markov_draft(table, taps=(0, 2))
    options = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 16}
    for rows in ([PROMPT], [PROMPT[3:], PROMPT]):
        more = {"cache_implementation": "static"} if len(rows) == 1 else {}
        _, _, output = checks.batch_equals_plain(target, draft, rows, **options, **more)
        with torch.no_grad():
            whole = target(checks.tensor(text[: len(PROMPT) + 16])).logits[0, len(PROMPT) - 1 : -1]
        found = torch.stack(output.logits)[:, len(rows) - 1]
        torch.testing.assert_close(found, whole, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_sliding"])
def test_the_stale_part_of_the_ragged_cache_never_reaches_attention(family, monkeypatch):
    """Invariant 7: whatever lies behind a row's tokens, and in the spare row, is large numbers each time."""
    target = tiny.random_target(family, layers=3)
    text = checks.plain(target, PROMPT)[0].tolist()
    draft = tiny.markov_draft(patterned(text, len(PROMPT), [1, 4, 0, 2]), taps=(0, 2))
    original, poisoned = RaggedStore.add, []

    def add(store, tokens, keys, values):
        stores = original(store, tokens, keys, values)
        for row in range(stores[0].shape[0]):
            mine = tokens.positions[tokens.rows == row] if row < store.num_rows else tokens.positions[:0]
            if len(mine) or row == store.num_rows:
                start = int(mine.max()) + 1 if len(mine) else 0
                for states in stores:
                    states[row, :, start:] = 1e4
                    poisoned.append(states[row, :, start:].numel())
        return stores

    monkeypatch.setattr(RaggedStore, "add", add)
    checks.batch_equals_plain(target, draft, [PROMPT], cache_implementation="static")
    checks.batch_equals_plain(target, draft, [PROMPT, PROMPT[:3], text[:15]])
    assert sum(poisoned) > 0


def test_a_cache_that_cannot_be_rolled_back_still_gives_the_text():
    target = tiny.random_target()
    text = checks.plain(target, PROMPT)[0].tolist()

    class Stubborn(DynamicCache):
        is_croppable = False

        def crop(self, *args):
            raise AssertionError("must not be asked")

    draft = tiny.markov_draft(tiny.text_table(text))
    output, stats = checks.generate(target, draft, PROMPT, **{CACHE_KEY: Stubborn(config=target.config)})
    assert output[0].tolist() == text
    assert stats.path == "target_only" and "Stubborn" in stats.reason
    assert (stats.num_rounds, stats.num_tokens) == (0, 20)


GAMMA = 4


@pytest.mark.parametrize("length", range(1, 2 * GAMMA + 2))
@pytest.mark.parametrize("family", ["qwen3_sliding", "llama"])
def test_numeric_2_every_prompt_length(length, family):
    target = tiny.random_target(family, layers=3)
    prompt = (PROMPT * 2)[:length]
    text = checks.plain(target, prompt, max_new_tokens=16)[0].tolist()
    for draft in (tiny.markov_draft(patterned(text, length, [2, 4, 0]), taps=(0, 2)), tiny.random_draft(taps=(0, 2))):
        checks.equal_to_plain(target, draft, prompt, max_new_tokens=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numeric_2_dtypes(dtype):
    """T-perm has no near ties, so text is equal in low precision too; logits agree where they can."""
    target = tiny.perm_target(layers=2, dtype=dtype)
    for length in range(1, 2 * GAMMA + 2):
        prompt = tiny.chain(40, length)
        draft = tiny.scripted_draft([2, 4, 0, 1, 3], tiny.NEXT[prompt[-1]], taps=(0, 1)).to(dtype)
        new, _ = checks.equal_to_plain(target, draft, prompt)
        assert new == tiny.chain(prompt[-1], 20)
