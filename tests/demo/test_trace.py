"""Where every token came from: pure functions of rounds."""

import json
from dataclasses import replace

import pytest

import checks
import hf_dspark
import tiny
from hf_dspark.demo.trace import ORIGINS, Answer, Pieces, tokens_of

PROMPT = [7, 21, 40]


def answer(draft, **options) -> Answer:
    """A greedy answer of T-perm with q and p."""
    with hf_dspark.record(probabilities=True) as stats:
        output = checks.sequences(
            tiny.perm_target().generate(
                checks.tensor(PROMPT), assistant_model=draft, do_sample=False, **({"max_new_tokens": 20} | options)
            )
        )
    pieces = Pieces(tiny.tokenizer())
    ids = output[0, len(PROMPT) :].tolist()
    drafts = [pieces.drafts(r) for r in stats.rounds]
    tokens = tokens_of(ids, pieces, stats.rounds, len(PROMPT), stats.path != "target_only")
    return Answer("abc", {"max_new_tokens": 20}, tokens, drafts, stats, seconds=2.0, state="finished")


def scripted(pattern=(4, 0, 2), **settings):
    return tiny.scripted_draft(list(pattern), anchor=tiny.NEXT[40], **settings)


def test_origins_follow_the_rounds():
    """The first token, then rounds that accept 4, 0 and 2 of 4 drafts."""
    found = answer(scripted())
    origins = [t.origin for t in found.tokens]
    blocks = ["first", *["accepted"] * 4, "bonus", "correction", *["accepted"] * 2, "correction"]
    assert origins[: len(blocks)] == blocks and len(origins) == 20 and set(origins) <= set(ORIGINS)
    assert [t.round for t in found.tokens[:10]] == [None, 0, 0, 0, 0, 0, 1, 2, 2, 2]
    assert [t.slot for t in found.tokens[:10]] == [None, 1, 2, 3, 4, None, 1, 1, 2, 3]
    assert [t.position for t in found.tokens] == list(range(3, 23))
    assert found.text == tiny.tokenizer().decode([t.id for t in found.tokens])


def test_tokens_carry_the_numbers_of_their_round():
    found = answer(scripted(confidence=None))
    kept, fixed = found.tokens[1], found.tokens[6]
    first, second = found.stats.rounds[:2]
    assert (kept.q, kept.p) == (first.q[0], first.p[0]) and kept.c is None and kept.a is None
    assert fixed.origin == "correction" and fixed.q is None and fixed.p == second.p[1]
    assert (fixed.replaced_q, fixed.replaced_p) == (second.q[0], second.p[0])
    assert fixed.replaced == tiny.tokenizer().decode([second.draft_tokens[0]])


def test_confidence_of_a_token_is_that_of_its_slot():
    import torch

    draft = tiny.markov_draft(
        tiny.one_hot_table(tiny.scripted_table([1, 4], tiny.NEXT[40])), confidence=torch.linspace(0, 2, tiny.V)
    )
    found = answer(draft)
    r = found.stats.rounds[0]
    kept, fixed = found.tokens[1:3]
    assert (kept.c, kept.a) == (r.confidence[0], r.survival[0])
    assert (fixed.origin, fixed.slot, fixed.c, fixed.a) == ("correction", 2, r.confidence[1], r.survival[1])


def test_tokens_ahead_of_the_rounds_wait():
    found = answer(scripted())
    ids, rounds, pieces = [t.id for t in found.tokens], found.stats.rounds, Pieces(tiny.tokenizer())
    assert tokens_of([], pieces, [], 3, True) == []
    assert [t.origin for t in tokens_of(ids[:4], pieces, [], 3, True)] == ["first"]
    assert tokens_of(ids[:8], pieces, rounds[:1], 3, True) == found.tokens[:6]
    assert tokens_of(ids, pieces, rounds, 3, True) == found.tokens


def test_without_drafts_every_token_is_the_targets():
    assert {t.origin for t in tokens_of([1, 2, 3], Pieces(tiny.tokenizer()), [], 5, False)} == {"target"}


def test_a_round_cut_to_nothing_gives_a_bonus_token():
    found = answer(tiny.markov_draft(tiny.one_hot_table(tiny.NEXT), confidence=-tiny.torch.ones(tiny.V)),
                   assistant_confidence_threshold=0.9, max_new_tokens=3)  # fmt: skip
    assert [t.origin for t in found.tokens] == ["first", "bonus", "bonus"]
    assert all(r.verified == 0 for r in found.stats.rounds)


def test_a_text_that_ends_in_a_block_ends_there():
    found = answer(scripted([4]), eos_token_id=tiny.chain(40, 4)[3])
    assert [t.origin for t in found.tokens] == ["first", "accepted", "accepted", "accepted"]


def test_the_trace_is_json_with_the_statistics_of_the_run():
    found = answer(scripted())
    read = json.loads(json.dumps(found.to_dict()))
    assert read["statistics"] == found.stats.to_dict() and read["tokens_per_second"] == 10.0
    assert read["tokens"][0]["origin"] == "first" and len(read["drafts"]) == found.stats.num_rounds
    assert read["text"] == found.text


class Bytes:
    """A tokenizer of UTF-8 bytes; id 0 is special and ids are bytes otherwise."""

    all_special_ids = [0]

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        assert skip_special_tokens and not clean_up_tokenization_spaces
        return bytes(i for i in ids if i).decode("utf-8", errors="replace")

    def convert_ids_to_tokens(self, token):
        return "<end>"


@pytest.mark.parametrize("text", ["abc", "héllo", "日本語", "a👍🏽b", "ñ"])
def test_a_character_comes_with_the_token_that_completes_it(text):
    ids = list(text.encode())
    pieces = Pieces(Bytes())
    for n in range(1, len(ids) + 1):
        assert "\ufffd" not in "".join(pieces.extend(ids[:n]))
    assert "".join(pieces.texts) == text and len(pieces.texts) == len(ids)


def test_special_tokens_have_a_name_and_are_not_text():
    pieces = Pieces(Bytes())
    tokens = tokens_of([97, 0, 98], pieces, [], 0, False)
    assert [(t.text, t.special) for t in tokens] == [("a", False), ("<end>", True), ("b", False)]
    assert Answer("x", tokens=tokens).text == "ab"


def test_rounds_shown_are_those_whose_drafts_are_read():
    found = answer(scripted())
    assert replace(found, drafts=found.drafts[:2]).rounds == found.stats.rounds[:2]
