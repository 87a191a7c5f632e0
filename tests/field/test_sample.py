"""SAMPLE: parameters, seeds and processors (distributions are in `test_chi_squared.py`)."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import checks
import tiny

PROMPT = [5, 9, 11, 3]
STATIC = {"cache_implementation": "static"}
BOTH_PATHS = pytest.mark.parametrize("path", [{}, STATIC], ids=["plain", "ragged"])


def led_draft(target, **options):
    """A draft that follows the target's own plain text, so that many of its tokens are accepted."""
    text = checks.plain(target, PROMPT, max_new_tokens=40, **options)[0].tolist()
    return tiny.markov_draft(tiny.text_table(text, scale=10.0))


def sampled(target, draft, seed=0, **options):
    torch.manual_seed(seed)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.95} | options
    return checks.generate(target, draft, PROMPT, **options)[0][0].tolist()


@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
def test_sample_7_same_seed_same_text(method):
    target = tiny.random_target()
    draft = led_draft(target)
    draft.draft_sample_method = method
    first = sampled(target, draft)
    assert sampled(target, draft) == first
    assert sampled(target, draft, seed=1) != first
    checks.generate(target, draft, PROMPT[:2])
    assert sampled(target, draft) == first


def test_sample_5_cold_sampling_is_greedy():
    """At a temperature near zero the distribution is one-hot and sampling has only one outcome."""
    target = tiny.random_target()
    draft = led_draft(target)
    greedy = checks.plain(target, PROMPT)[0].tolist()
    assert sampled(target, draft, temperature=1e-4, top_k=0, top_p=1.0) == greedy
    assert sampled(target, draft, top_k=1) == greedy


def test_sampling_parameters_without_sampling_change_nothing():
    """Generation configs of chat models carry temperature and top_p; greedy calls ignore them."""
    target = tiny.random_target()
    checks.equal_to_plain(target, led_draft(target), PROMPT, temperature=0.3, top_k=2, top_p=0.2)


def test_unknown_draft_sample_method_is_refused():
    target, draft = tiny.random_target(), tiny.random_draft()
    draft.draft_sample_method = "argmax"
    with pytest.raises(ValueError, match="argmax"):
        checks.generate(target, draft, PROMPT, do_sample=True)


def test_sample_9_min_new_tokens():
    """The end-of-text token is the fourth; it must not end the text before the twelfth, inside a block or not."""
    target = tiny.random_target()
    text = checks.plain(target, PROMPT)[0].tolist()
    eos = text[len(PROMPT) + 3]
    draft = led_draft(target, eos_token_id=eos, min_new_tokens=12)
    for options in ({"min_new_tokens": 12}, {"min_length": 12}, {}, {"min_new_tokens": 3}):
        new, stats = checks.equal_to_plain(target, draft, PROMPT, eos_token_id=eos, **options)
        assert len(new) >= 12 if 12 in options.values() else len(new) == 4


class BanPrevious(LogitsProcessor):
    """Bans the last token and notes every prefix it is shown."""

    def __init__(self):
        self.prefixes = []

    def __call__(self, input_ids, scores):
        self.prefixes.append(input_ids[0].tolist())
        scores[:, input_ids[0, -1]] = -torch.inf
        return scores


@BOTH_PATHS
@pytest.mark.parametrize("do_sample", [False, True])
def test_sample_9_custom_processor_sees_each_true_prefix_once(do_sample, path):
    target = tiny.random_target()
    draft = led_draft(target, logits_processor=LogitsProcessorList([BanPrevious()]))
    processor = BanPrevious()
    options = {"logits_processor": LogitsProcessorList([processor]), "do_sample": do_sample}
    output, stats = checks.generate(target, draft, PROMPT, **options, **path)
    text = output[0].tolist()
    assert (stats.path == "ragged") == bool(path)
    assert processor.prefixes == [text[:i] for i in range(len(PROMPT), len(text))]
    assert all(a != b for a, b in zip(text[3:], text[4:], strict=False))
    if not do_sample:
        assert stats.num_accepted > 0
        fresh = {"logits_processor": LogitsProcessorList([BanPrevious()])}
        assert text == checks.plain(target, PROMPT, **fresh)[0].tolist()


def test_sample_9_scores_may_be_changed_in_place():
    """A processor that writes into its input must not reach the logits that are returned or used for other slots."""
    target = tiny.random_target()
    options = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    make = lambda: {"logits_processor": LogitsProcessorList([BanPrevious()])}  # noqa: E731
    expected = checks.plain(target, PROMPT, **make(), **options)
    output, _ = checks.generate(target, led_draft(target, **make()), PROMPT, **make(), **options)
    assert torch.equal(output.sequences, expected.sequences)
    torch.testing.assert_close(torch.cat(output.scores), torch.cat(expected.scores), atol=1e-4, rtol=1e-4)


class EverySecondCall(StoppingCriteria):
    """Stops at its n-th call, whatever the text is."""

    def __init__(self, calls):
        self.left = calls

    def __call__(self, input_ids, scores, **kwargs):
        self.left -= 1
        return torch.full((input_ids.shape[0],), self.left <= 0)


@pytest.mark.parametrize("calls", [1, 2, 5, 9])
def test_sample_9_stopping_criteria_with_state(calls):
    target = tiny.perm_target()
    make = lambda: {"stopping_criteria": StoppingCriteriaList([EverySecondCall(calls)])}  # noqa: E731
    new, _ = checks.equal_to_plain(target, tiny.perm_draft(), PROMPT, make)
    assert len(new) == calls
    checks.batch_equals_plain(target, tiny.perm_draft(), [PROMPT], make, lengths=[calls], **STATIC)


def test_sample_9_extra_model_arguments_reach_the_target():
    """token_type_ids (GPT-2 adds their embeddings) grow with the text as in plain generate."""
    target = tiny.random_target("gpt2")
    types = torch.tensor([[3, 3, 4, 4]])
    text = checks.plain(target, PROMPT, token_type_ids=types)[0].tolist()
    assert text != checks.plain(target, PROMPT)[0].tolist()
    draft = tiny.markov_draft(tiny.text_table(text))
    checks.equal_to_plain(target, draft, PROMPT, token_type_ids=types)
    for rows, path in ((1, "plain"), (2, "target_only")):
        prompts, given = checks.tensor(PROMPT).expand(rows, -1), types.expand(rows, -1)
        output, stats = checks.generate(target, draft, prompts, token_type_ids=given, pad_token_id=0, **STATIC)
        assert output.tolist() == [text] * rows
        assert stats.path == path and "token_type_ids" in stats.reason


def test_unknown_arguments_are_refused_as_in_plain_generate():
    with pytest.raises(ValueError, match="not_an_argument"):
        checks.generate(tiny.perm_target(), tiny.perm_draft(), PROMPT, not_an_argument=1)


@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
@pytest.mark.parametrize("new", [5, 7])
def test_a_block_may_run_into_prefixes_where_nothing_is_allowed(method, new):
    """Every token once: drafts behind the text's end meet a prefix that bans all tokens, which the text never does."""
    size = 8
    target = tiny.table_target(torch.randn(size, size), layers=1, mask=None)
    draft = tiny.markov_draft(torch.randn(size, size), target_hidden=size, taps=(-1,), mask=size - 1, gamma=7)
    draft.draft_sample_method = method
    options = {"do_sample": True, "max_new_tokens": new, "no_repeat_ngram_size": 1, "top_k": 0}
    for _ in range(20):
        output, _ = checks.generate(target, draft, [0], **options)
        assert len(set(output[0].tolist())) == new + 1
