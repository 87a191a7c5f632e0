"""PROC: stateful processors and constraints see committed text only, each prefix once."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import checks
import tiny

PROMPT = [5, 9, 11, 3]
STATIC = {"cache_implementation": "static"}


class CommittedOnly(LogitsProcessor):
    """A grammar: its state is the text so far, and text that is taken back is an error. Allows each token k times."""

    def __init__(self, times=1):
        self.text, self.times = None, times

    def __call__(self, input_ids, scores):
        ids = input_ids[0].tolist()
        assert self.text is None or (ids[:-1] == self.text), "not the committed prefix plus one token"
        self.text = ids
        counts = torch.bincount(input_ids[0], minlength=scores.shape[-1])
        return scores.masked_fill(counts >= self.times, -torch.inf)


class Recorder(LogitsProcessor):
    """Notes the prefixes it sees; declares that unverified drafts do no harm to it."""

    draft_safe = True

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        return scores


def draft_for(target, **options):
    """A draft that is led along the plain text of these options, off the track at every fifth token."""
    text = checks.plain(target, PROMPT, max_new_tokens=40, **options)[0].tolist()
    table = tiny.text_table(text, scale=10.0)
    for token in text[6::5]:
        table[token] = table[token].roll(1)
    return tiny.markov_draft(table)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("do_sample", [False, True])
def test_proc_2_stateful_processor(times, do_sample):
    target = tiny.random_target()
    make = lambda: {"logits_processor": LogitsProcessorList([CommittedOnly(times)])}  # noqa: E731
    draft = draft_for(target, **make())
    if do_sample:
        for path in ({}, STATIC):
            output, _ = checks.generate(target, draft, PROMPT, do_sample=True, **make(), **path)
            assert torch.bincount(output[0]).max() <= times
    else:
        _, stats = checks.equal_to_plain(target, draft, PROMPT, make, max_new_tokens=30)
        assert 0 < stats.num_accepted < stats.num_verified
        _, fast, _ = checks.batch_equals_plain(target, draft, [PROMPT], make, max_new_tokens=30, **STATIC)
        assert [r.accepted for r in fast.rounds] == [r.accepted for r in stats.rounds]


OPTIONS = {
    "repetition_penalty": {"repetition_penalty": 1.8}, "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "encoder_repetition": {"encoder_repetition_penalty": 1.5}, "bad_words": {"bad_words_ids": [[36], [49, 1]]},
    "sequence_bias": {"sequence_bias": [[[41], 6.0], [[49, 36], -9.0]]}, "suppress": {"suppress_tokens": [49, 36]},
    "begin_suppress": {"begin_suppress_tokens": [2, 24]}, "forced_bos_eos": {"forced_eos_token_id": 12},
    "decay": {"eos_token_id": 12, "exponential_decay_length_penalty": (4, 1.6)},
    "renormalize": {"renormalize_logits": True}, "remove_invalid": {"remove_invalid_values": True},
    "min_new_tokens": {"eos_token_id": 49, "min_new_tokens": 9},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_every_processor_of_transformers(name):
    target = tiny.random_target()
    _, stats = checks.equal_to_plain(target, draft_for(target, **OPTIONS[name]), PROMPT, **OPTIONS[name])
    assert stats.num_accepted > 0
    checks.equal_to_plain(target, draft_for(target), PROMPT, **OPTIONS[name])


def test_prefix_allowed_tokens_fn_is_a_custom_processor():
    """The caller's function inside transformers' own processor may keep state too."""
    target = tiny.random_target()
    seen = []

    def allowed(batch, ids):
        seen.append(ids.tolist())
        return [t for t in range(tiny.V) if t % 3 == len(ids) % 3]

    options = {"prefix_allowed_tokens_fn": allowed}
    draft = draft_for(target, **options)
    checks.equal_to_plain(target, draft, PROMPT, **options)
    seen.clear()
    output, _ = checks.generate(target, draft, PROMPT, **options)
    text = output[0].tolist()
    assert seen == [text[:i] for i in range(len(PROMPT), len(text))]


def test_order_of_processors_is_kept():
    """A custom processor between transformers' own sees the scores that those before it made, as in plain generate."""
    target = tiny.random_target()

    class Halve(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores = scores.clone()
            scores[:, ::2] *= 0.5
            return scores

    make = lambda: {"logits_processor": LogitsProcessorList([Halve()])}  # noqa: E731
    options = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    checks.equal_to_plain(target, draft_for(target, **make(), **options), PROMPT, make, **options)


def test_draft_safe_processor_runs_on_drafts_too():
    target = tiny.random_target()
    draft = draft_for(target)
    safe = Recorder()
    output, stats = checks.generate(target, draft, PROMPT, logits_processor=LogitsProcessorList([safe]))
    text = output[0].tolist()
    assert text == checks.plain(target, PROMPT)[0].tolist()
    assert any(ids != text[: len(ids)] for ids in safe.seen), "it was shown drafts that were then rejected"
    for length in range(len(PROMPT), len(text)):
        assert text[:length] in safe.seen


def test_not_draft_safe_wins_over_the_class_it_inherits_from():
    """A user's subclass of a transformers processor is the user's: it is not shown unverified drafts."""
    from transformers import RepetitionPenaltyLogitsProcessor

    class Counting(RepetitionPenaltyLogitsProcessor):
        seen = []

        def __call__(self, input_ids, scores):
            self.seen.append(input_ids[0].tolist())
            return super().__call__(input_ids, scores)

    target = tiny.random_target()
    make = lambda: {"logits_processor": LogitsProcessorList([Counting(1.7)])}  # noqa: E731
    draft = draft_for(target, **make())
    checks.equal_to_plain(target, draft, PROMPT, make)
    Counting.seen.clear()
    text = checks.generate(target, draft, PROMPT, **make())[0][0].tolist()
    assert Counting.seen == [text[:i] for i in range(len(PROMPT), len(text))]


def test_a_processor_that_raises_in_the_middle_leaves_the_pair_as_it_was():
    target, draft = tiny.perm_target(), tiny.perm_draft()

    class Fails(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 9:
                raise RuntimeError("grammar engine died")
            return scores

    with pytest.raises(RuntimeError, match="grammar engine died"):
        checks.generate(target, draft, PROMPT, logits_processor=LogitsProcessorList([Fails()]))
    new, _ = checks.equal_to_plain(target, draft, PROMPT)
    assert new == tiny.chain(3, 20)
