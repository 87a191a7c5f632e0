"""VOCAB: vocabularies that are reduced, padded, or another's."""

import pytest
import torch
from family_files import some_ids, speculators_files, without

import checks
import tiny
from hf_dspark import DSparkForCausalLM

PROMPT = [7, 21, 40]


@pytest.mark.parametrize("anchor_first", [True, False])
def test_vocab_2_reduced_vocabulary_in_both_layouts(anchor_first):
    """V = 64, 24 tokens that can be proposed, offsets in the file: the right tokens, in the right slots."""
    ids = torch.tensor(sorted(tiny.chain(40, 24)))
    config, tensors = tiny.guided_files(tiny.one_hot_table(tiny.NEXT, 40.0), gamma=5)
    draft = tiny.load_draft(*speculators_files(config, tensors, ids, sample_from_anchor=anchor_first))
    assert draft.config.num_draft_tokens == (5 if anchor_first else 4)
    for options in ({}, {"cache_implementation": "static"}):
        output, stats = checks.generate(tiny.perm_target(), draft, PROMPT, max_new_tokens=40, **options)
        assert output[0, 3:].tolist() == tiny.chain(40, 40)
        full = [r for r in stats.rounds if r.position < 3 + 24 - 6]
        assert full and all(r.accepted == draft.config.num_draft_tokens for r in full)
        assert {token for r in stats.rounds for token in r.draft_tokens} <= set(ids.tolist())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("absolute", "token ids.*offsets"), ("missing", "lacks the tensor d2t"), ("out of range", r"lie in 0\.\.63"),
        ("not ascending", "ascend"), ("too short", "20 entries.*24 rows"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("anchor_first", [True, False])
def test_vocab_2_tables_that_are_no_offsets(change, message, anchor_first, tmp_path):
    ids, rows = some_ids(), torch.arange(24)
    config, tensors = tiny.guided_files(tiny.one_hot_table(tiny.NEXT))
    raw, stored = speculators_files(config, tensors, ids, sample_from_anchor=anchor_first)
    tables = {
        "absolute": ids, "out of range": ids - rows + 40, "not ascending": ids.flip(0) - rows,
        "too short": (ids - rows)[:20],
    }  # fmt: skip
    stored = without(stored, "d2t", "t2d") | ({"d2t": tables[change]} if change in tables else {})
    with pytest.raises(ValueError, match=message):
        DSparkForCausalLM.from_pretrained(tiny.write_draft(tmp_path, raw, stored))


MISFITS = {
    "hidden width": (lambda: tiny.random_target(hidden_size=32, seed=1), {}, (64, 32)),
    "depth": (lambda: tiny.random_target(layers=3), {}, (4, 3)),
    "vocabulary": (lambda: tiny.random_target(vocab_size=96), {}, (64, 96)),
    "number of taps": (lambda: tiny.random_target(), {"taps": (0, 2, 4, 9)}, (9, 6)),
}


@pytest.mark.parametrize("name", MISFITS)
def test_vocab_4_misfits_are_refused_with_both_numbers(name):
    make, settings, numbers = MISFITS[name]
    target = make()
    draft = tiny.random_draft(**settings)
    checks.refused(target, draft, PROMPT, *numbers)
    with pytest.raises(ValueError):
        draft.attach_target(target)
    fitting = tiny.random_target()
    if name != "number of taps":
        checks.equal_to_plain(fitting, draft, PROMPT)
    checks.equal_to_plain(target, tiny.random_draft(target, taps=(0, 1)), PROMPT)


def test_padded_vocabularies_of_one_tokenizer_fit():
    """Rows that pad an embedding may differ between draft and target."""
    table = tiny.one_hot_table([*range(1, 400), 0])
    target = tiny.table_target(table, layers=5, mask=None)
    for vocab in (398, 402):
        settings = {"vocab": vocab, "mask": 397, "confidence": None, "rank": 4}
        config = tiny.draft_config(taps=(0, 2), **settings)
        draft = tiny.load_draft(config, tiny.draft_tensors(config, target_hidden=400))
        checks.equal_to_plain(target, draft, [390], max_new_tokens=20)


def test_vocab_4_a_refused_pair_leaves_nothing_behind():
    """The next call with the right target is as the first, and the target decodes as before."""
    right, wrong = tiny.perm_target(), tiny.random_target(layers=3)
    draft = tiny.perm_draft()
    before = set(vars(draft)), set(vars(wrong))
    text = checks.plain(wrong, PROMPT).tolist()
    checks.refused(wrong, draft, PROMPT, 4, 3)
    assert (set(vars(draft)), set(vars(wrong))) == before
    assert checks.plain(wrong, PROMPT).tolist() == text
    _, stats = checks.equal_to_plain(right, draft, PROMPT)
    assert stats.num_accepted > 0
