"""STOP: end-of-text ids, stop strings, criteria and limits end the text at exactly the token of plain generate."""

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

import checks
import tiny

PROMPT = [7, 21, 40]
CHAIN = tiny.chain(40, 60)
STATIC = {"cache_implementation": "static"}
BOTH_PATHS = pytest.mark.parametrize("path", [{}, STATIC], ids=["plain", "ragged"])


class DraftCalls:
    """Counts backbone forwards of the draft and rows of context it is given."""

    def __init__(self, draft):
        self.blocks, self.rows = 0, 0
        self.handles = [
            draft.layers[0].register_forward_pre_hook(lambda *_: self._block()),
            draft.fc.register_forward_pre_hook(lambda module, args: self._rows(args[0].shape[1])),
        ]

    def _block(self):
        self.blocks += 1

    def _rows(self, count):
        self.rows += count

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()


@pytest.mark.parametrize("drafts", ["full", "bad", "scripted"])
@pytest.mark.parametrize("gamma", [1, 4, 7])
def test_stop_2_every_limit(drafts, gamma):
    """1..20 new tokens: exactly the requested count, in as many rounds as needed and not one more."""
    make = {"full": tiny.perm_draft, "bad": tiny.bad_draft}.get(drafts)
    draft = make(gamma) if make else tiny.scripted_draft([*range(gamma + 1), gamma], CHAIN[0], gamma)
    for limit in range(1, 21):
        with DraftCalls(draft) as calls:
            new, stats = checks.equal_to_plain(tiny.perm_target(), draft, PROMPT, max_new_tokens=limit)
        assert new == CHAIN[:limit]
        assert calls.blocks == stats.num_rounds
        if drafts == "full":
            assert stats.num_rounds == -(-(limit - 1) // (gamma + 1))
        if drafts == "bad":
            assert stats.num_rounds == limit - 1


def test_stop_2_one_token_makes_no_round_and_no_draft_call():
    draft = tiny.perm_draft()
    for options in ({"max_new_tokens": 1}, {"max_length": len(PROMPT) + 1}):
        with DraftCalls(draft) as calls, checks.CallCounter(tiny.perm_target()) as target_calls:
            output, stats = checks.generate(tiny.perm_target(), draft, PROMPT, **options)
        assert output[0].tolist() == PROMPT + CHAIN[:1]
        assert calls.blocks == 0 and len(target_calls.shapes) == 1
        assert (stats.num_rounds, stats.num_drafted, stats.num_tokens) == (0, 0, 1)


def test_stop_2_target_never_reads_past_the_limit():
    """ℓ is cut to the room left, so that no position is used that plain generate would not use."""
    target, widths = tiny.perm_target(), []
    handle = target.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        for limit in range(2, 12):
            widths.clear()
            _, stats = checks.generate(target, tiny.perm_draft(), PROMPT, max_new_tokens=limit)
            for here, width in zip(stats.rounds, widths[1:], strict=True):
                assert width == here.verified + 1
                assert here.position + width <= len(PROMPT) + limit - 1
    finally:
        handle.remove()


@pytest.mark.parametrize("cap,eos_at,expected", [(5, 3, 3), (2, 3, 2), (3, 3, 3), (20, 1, 1), (20, 2, 2), (20, 8, 8)])
@pytest.mark.parametrize("kind", ["id", "list", "tensor", "criterion", "two criteria"])
def test_stop_4_whatever_comes_first_ends_the_text(cap, eos_at, expected, kind):
    eos = CHAIN[eos_at - 1]
    options = {
        "id": lambda: {"eos_token_id": eos}, "list": lambda: {"eos_token_id": [63, eos, 0]},
        "tensor": lambda: {"eos_token_id": torch.tensor([eos, 63])},
        "criterion": lambda: {"stopping_criteria": StoppingCriteriaList([checks.StopAt(3 + eos_at)])},
        "two criteria": lambda: {
            "stopping_criteria": StoppingCriteriaList([checks.StopAt(50), checks.StopAt(3 + eos_at)]),
            "eos_token_id": 63,
        },
    }[kind]  # fmt: skip
    target, draft = tiny.perm_target(), tiny.perm_draft(gamma=6)
    new, _ = checks.equal_to_plain(target, draft, PROMPT, options, max_new_tokens=cap)
    assert len(new) == expected
    new, _, _ = checks.batch_equals_plain(
        target, draft, [PROMPT], options, lengths=[expected], max_new_tokens=cap, **STATIC
    )
    assert len(new[0]) == expected


def test_stop_token_inside_a_block_is_counted_as_an_accepted_draft():
    _, stats = checks.equal_to_plain(tiny.perm_target(), tiny.perm_draft(gamma=6), PROMPT, eos_token_id=CHAIN[3])
    (only,) = stats.rounds
    assert (only.verified, only.accepted, only.next_token) == (6, 3, None)
    assert stats.acceptance_by_position == [1.0, 1.0, 1.0, None, None, None]
    _, stats = checks.equal_to_plain(tiny.perm_target(), tiny.perm_draft(gamma=3), PROMPT, eos_token_id=CHAIN[4])
    (only,) = stats.rounds
    assert (only.verified, only.accepted, only.next_token) == (3, 3, CHAIN[4])


@pytest.mark.parametrize("end", ["eos", "criterion", "length"])
@pytest.mark.parametrize("at", [2, 4, 5, 6])
def test_stop_inside_a_block_that_is_decided_slot_by_slot(end, at):
    """With a caller's processor each slot is decided by itself; nothing is asked of it behind the end."""
    processors = []

    def options():
        processors.append(checks.LeaveAlone())
        ends = {
            "eos": {"eos_token_id": CHAIN[at - 1]}, "length": {"max_new_tokens": at},
            "criterion": {"stopping_criteria": StoppingCriteriaList([checks.StopAt(3 + at)])},
        }  # fmt: skip
        return {"logits_processor": LogitsProcessorList([processors[-1]]), **ends[end]}

    target, draft = tiny.perm_target(), tiny.perm_draft(gamma=4)
    new, stats = checks.equal_to_plain(target, draft, PROMPT, options)
    checks.batch_equals_plain(target, draft, [PROMPT], options, lengths=[at], **STATIC)
    assert len(new) == at and [processor.calls for processor in processors] == [at] * 4
    assert stats.num_accepted > 0 or (end, at) == ("length", 2), "only there the limit leaves no room for a draft"


def test_stop_token_in_the_prompt_or_the_first_token():
    draft = tiny.perm_draft()
    checks.equal_to_plain(tiny.perm_target(), draft, PROMPT, eos_token_id=PROMPT[1])
    new, stats = checks.equal_to_plain(tiny.perm_target(), draft, PROMPT, eos_token_id=CHAIN[0])
    assert new == CHAIN[:1] and stats.num_rounds == 0


@BOTH_PATHS
@pytest.mark.parametrize("stop_at", range(1, 12))
def test_criteria_see_each_committed_prefix_once(stop_at, path):
    criterion = checks.StopAt(3 + stop_at)
    draft = tiny.scripted_draft([2, 4, 0, 1], CHAIN[0])
    options = {"stopping_criteria": StoppingCriteriaList([criterion])}
    _, stats = checks.generate(tiny.perm_target(), draft, PROMPT, **options, **path)
    assert (stats.path == "ragged") == bool(path)
    assert criterion.seen == [PROMPT + CHAIN[: i + 1] for i in range(stop_at)]


class ScoreStop(StoppingCriteria):
    """Stops by what `scores` holds: one entry a new token, the last of them of this token."""

    def __init__(self, entries):
        self.entries, self.argmax = entries, []

    def __call__(self, input_ids, scores, **kwargs):
        self.argmax = [int(s.argmax()) for s in scores]
        return torch.full((input_ids.shape[0],), len(scores) >= self.entries)


@pytest.mark.parametrize("entries", [1, 3, 6])
def test_criteria_see_the_scores_so_far(entries):
    criteria = []

    def make():
        criteria.append(ScoreStop(entries))
        stopping = StoppingCriteriaList([criteria[-1]])
        return {"stopping_criteria": stopping, "return_dict_in_generate": True, "output_scores": True}

    new, _ = checks.equal_to_plain(tiny.perm_target(), tiny.perm_draft(), PROMPT, make)
    assert len(new) == entries and criteria[-1].argmax == new


@pytest.mark.parametrize("text", ["single", "across", "first", "never", "several"])
@pytest.mark.parametrize("drafts", ["full", "scripted"])
def test_stop_strings(text, drafts):
    """A stop string ends the text inside a block, across tokens and across rounds."""
    tokenizer = tiny.tokenizer()
    spell = tokenizer.convert_ids_to_tokens(CHAIN)
    strings = {
        "single": spell[6], "across": "".join(spell[4:7]), "first": spell[0], "never": "".join(spell[3:5]) + spell[0],
        "several": ["".join(spell[9:11]), "".join(spell[5:8])],
    }[text]  # fmt: skip
    draft = tiny.perm_draft() if drafts == "full" else tiny.scripted_draft([3, 1, 0, 4], CHAIN[0])
    new, _ = checks.equal_to_plain(tiny.perm_target(), draft, PROMPT, stop_strings=strings, tokenizer=tokenizer)
    assert len(new) == {"single": 7, "across": 7, "first": 1, "never": 20, "several": 8}[text]


class LaterEos(EosTokenCriteria):
    """A caller's own idea of an end-of-text token: only from the fifth new token on."""

    def __call__(self, input_ids, scores, **kwargs):
        return super().__call__(input_ids, scores, **kwargs) & (input_ids.shape[1] >= len(PROMPT) + 5)


CALLERS = {
    "length": (lambda: MaxLengthCriteria(len(PROMPT) + 7), 7), "eos": (lambda: EosTokenCriteria([CHAIN[8], 63]), 9),
    "own eos": (lambda: LaterEos([CHAIN[2], CHAIN[6]]), 7),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLERS)
def test_the_callers_own_criteria_of_transformers_kinds(name):
    make, expected = CALLERS[name]
    options = lambda: {"stopping_criteria": StoppingCriteriaList([make()]), "pad_token_id": 0}  # noqa: E731
    new, _ = checks.equal_to_plain(tiny.perm_target(), tiny.perm_draft(), PROMPT, options)
    assert len(new) == expected


def test_max_time_ends_the_text():
    _, stats = checks.generate(tiny.perm_target(), tiny.perm_draft(), PROMPT, max_new_tokens=400, max_time=1e-9)
    assert stats.num_tokens == 1


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
@pytest.mark.parametrize(
    "prompt_length,new", [(20, 12), (20, 13), (20, 14), (20, 30), (31, 2), (31, 5), (32, 1), (32, 2)]
)
def test_stop_6_end_of_the_position_table(family, prompt_length, new):
    """The same text, or the same error, as plain generate; GPT-2's table really ends at position 31."""
    target = tiny.random_target(family, max_position_embeddings=32)
    prompt = [1 + i % 60 for i in range(prompt_length)]
    try:
        text = checks.plain(target, prompt, max_new_tokens=new)[0].tolist()
    except IndexError:
        draft = tiny.random_draft()
        with pytest.raises(IndexError):
            checks.generate(target, draft, prompt, max_new_tokens=new)
    else:
        for draft in (tiny.markov_draft(tiny.text_table(text), gamma=7), tiny.random_draft(gamma=7)):
            checks.equal_to_plain(target, draft, prompt, max_new_tokens=new)


def test_limits_that_leave_nothing_to_do_behave_as_in_plain_generate():
    draft = tiny.perm_draft()
    for options in ({"max_length": 3}, {"max_length": 2}, {"max_new_tokens": 0}):
        with pytest.raises(ValueError) as expected:
            checks.plain(tiny.perm_target(), PROMPT, **options)
        with pytest.raises(ValueError) as found:
            checks.generate(tiny.perm_target(), draft, PROMPT, **options)
        assert str(found.value) == str(expected.value)
