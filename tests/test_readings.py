"""Scores of readings are what rounds really accept, and only a clear difference counts."""

from dataclasses import replace

import pytest
import torch

import checks
import tiny
import trained
from hf_dspark.readings import KnownText, Reading, clearly_better, drafts_kept, neighbours


def known_text(target, ids: list[int]) -> KnownText:
    with torch.no_grad():
        hidden = target(checks.tensor(ids), output_hidden_states=True).hidden_states
    return KnownText(torch.tensor(ids), {i - 1: state[0] for i, state in enumerate(hidden)})


@pytest.mark.parametrize("head", [None, "vanilla", "gated", "rnn"])
@pytest.mark.parametrize("anchor_first", [True, False])
def test_scores_equal_what_greedy_rounds_accept(anchor_first, head):
    """For the reading in use and for any other: the other one is loaded and generates."""
    target = tiny.random_target()
    prompt = trained.texts()[0][:6]
    text = checks.plain(target, prompt, max_new_tokens=40)[0].tolist()
    files = tiny.guided_files(tiny.text_table(text, scale=12.0), head=head or "vanilla")
    if head is None:
        files = trained.files()
    config, tensors = files
    draft = tiny.load_draft(config, tensors)
    current = Reading.of(draft.config)
    other = replace(current, sample_from_anchor=anchor_first, target_layer_ids=(1, 3, 5), mask_token_id=60)
    for reading in (current, other):
        file = config | {
            "target_layer_ids": list(reading.target_layer_ids), "mask_token_id": reading.mask_token_id
        }  # fmt: skip
        loaded = tiny.load_draft(file, tensors, sample_from_anchor=reading.sample_from_anchor)
        loaded.probe = False
        _, stats = checks.equal_to_plain(target, loaded, prompt, max_new_tokens=40)
        anchors = [r.position for r in stats.rounds[:-1]]
        # Each anchor by itself, so that its context is the whole text before it.
        kept = [
            drafts_kept(draft, draft.vocabulary, known_text(target, text), [a], [current, reading])[reading]
            for a in anchors
        ]
        assert torch.cat(kept).tolist() == [r.accepted for r in stats.rounds[:-1]]
    assert stats.num_rounds > 2


def test_anchors_share_a_window_and_the_end_of_the_text_counts_what_is_known():
    target, draft = tiny.perm_target(), tiny.perm_draft()
    text = known_text(target, [9, *tiny.chain(9, 100)])
    current = Reading.of(draft.config)
    kept = drafts_kept(draft, draft.vocabulary, text, range(80, 100), [current])[current]
    assert kept.tolist() == [4.0] * 17 + [3.0, 2.0, 1.0]


def test_neighbours_stay_inside_the_target():
    reading = Reading((-1, 3), True, 63)
    assert {r.target_layer_ids for r in neighbours(reading, 6, 4)} == {(-1, 3), (0, 4)}
    assert {r.target_layer_ids for r in neighbours(Reading((0, 5), True, 63), 6, 4)} == {(0, 5), (-1, 4)}
    assert len(neighbours(Reading((0, 2), True, 63), 6, 4)) == 6
    assert all(r.sample_from_anchor for r in neighbours(reading, 6, 1)), "one slot leaves nothing to 1+N"


def test_only_a_clear_difference_counts():
    current, other = Reading((0,), True, 1), Reading((1,), True, 1)

    def judged(here, there):
        kept = {current: torch.tensor(here).double(), other: torch.tensor(there).double()}
        return clearly_better(kept, current)

    assert judged([0, 0, 0, 0], [1, 1, 1, 1]) == other
    assert judged([1, 1, 1, 1], [1, 1, 1, 1]) is None
    assert judged([1, 1, 1, 1], [0, 0, 0, 0]) is None
    assert judged([0, 1, 0, 2], [1, 1, 2, 1]) is None, "within the noise"
    assert judged([0] * 10, [0] * 6 + [1] * 4) is None, "too little to gain"
    assert judged([0], [4]) is None, "one anchor is none"


def test_of_two_readings_about_as_good_the_one_with_fewer_changes_is_named():
    current, layout = Reading((0,), True, 1), Reading((0,), False, 1)
    both = Reading((1,), False, 1)
    kept = {current: [0, 0, 0, 0], both: [2, 2, 2, 3], layout: [2, 2, 2, 2]}
    assert clearly_better({r: torch.tensor(v).double() for r, v in kept.items()}, current) == layout
    kept[both] = [4, 4, 4, 4]
    assert clearly_better({r: torch.tensor(v).double() for r, v in kept.items()}, current) == both


def test_the_fix_names_what_to_change():
    current = Reading((0, 2), False, 63)
    fix = replace(current, sample_from_anchor=True).fix(current)
    assert "sample_from_anchor=True" in fix and "anchor-first" in fix and "target_layer_ids" not in fix
    fix = Reading((1, 3), False, 7).fix(current)
    assert "target_layer_ids = [1, 3]" in fix and "mask_token_id = 7" in fix and "sample_from_anchor" not in fix
