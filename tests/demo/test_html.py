"""Answers, rounds, charts and the picture as text: escaped, complete, and with the numbers of the statistics."""

import copy
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch

import checks
import hf_dspark
import tiny
from hf_dspark.demo import charts, html, poster
from hf_dspark.demo.trace import Answer, Pieces, Token, tokens_of

NASTY = '<b onclick="x()">&amp;\'{{1+1}}${x}`</b>'


@pytest.fixture(scope="module")
def answer():
    """Rounds that accept 4, 0 and 2 of 4 drafts, with confidence and probabilities, some of them cut."""
    table = tiny.one_hot_table(tiny.scripted_table([4, 0, 2], tiny.NEXT[40]))
    draft = tiny.markov_draft(table, confidence=torch.linspace(-1, 3, tiny.V))
    with hf_dspark.record(probabilities=True) as stats:
        output = tiny.perm_target().generate(
            checks.tensor([7, 21, 40]), assistant_model=draft, do_sample=False, max_new_tokens=30,
            assistant_confidence_threshold=0.55,
        )  # fmt: skip
    pieces = Pieces(tiny.tokenizer())
    drafts = [pieces.drafts(r) for r in stats.rounds]
    tokens = tokens_of(output[0, 3:].tolist(), pieces, stats.rounds, 3, True)
    found = Answer("a question", {"max_new_tokens": 30}, tokens, drafts, stats, seconds=2.0, state="finished")
    assert {"first", "accepted", "correction", "bonus"} == {t.origin for t in tokens}
    return found


def parse(markup: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<div>{markup}</div>")


def everything(answer: Answer) -> list[str]:
    return [
        html.question(answer.prompt), html.answer(answer), html.legend(answer.tokens), html.rounds(answer),
        html.round_legend(), html.numbers(answer), html.problem(answer.error), html.comparison(answer, answer),
        charts.charts(answer.stats), poster.poster(answer), poster.poster(answer, dark=True),
    ]  # fmt: skip


def test_all_of_it_is_well_formed(answer):
    for markup in everything(answer):
        parse(markup)


def test_texts_are_escaped_everywhere(answer):
    tokens = [replace(t, text=NASTY, replaced=t.replaced and NASTY) for t in answer.tokens]
    drafts = [[NASTY] * len(row) for row in answer.drafts]
    stats = copy.copy(answer.stats)
    stats.reason = NASTY
    nasty = replace(answer, prompt=NASTY, tokens=tokens, drafts=drafts, stats=stats, error=NASTY)
    for markup in everything(nasty):
        root = parse(markup)
        assert "<b onclick" not in markup and not any(element.get("onclick") for element in root.iter())
        assert not re.search(r"\{\{|\$\{|`", markup), "Gradio reads these as templates"
    assert "".join(parse(html.question(NASTY)).itertext()).endswith(NASTY)


def test_every_token_is_shown_once_in_order(answer):
    found = parse(html.answer(answer)).findall(".//span[@role='option']")
    assert [element.text for element in found] == [t.text for t in answer.tokens]
    assert [element.get("tabindex") for element in found] == ["0"] + ["-1"] * (len(found) - 1)


def test_what_became_of_each_draft(answer):
    for r, article in zip(answer.stats.rounds, parse(html.rounds(answer)).findall(".//article"), strict=True):
        kinds = [slot.get("class").split()[1] for slot in article.findall(".//li") if "ds-own" not in slot.get("class")]
        states = [html.slot_state(r, k) for k in range(4)]
        assert kinds == [f"ds-{state}" for state in states]
        assert states.count("accepted") == r.accepted and states.count("unverified") == 4 - r.verified
        assert states.count("rejected") == (r.accepted < r.verified)
        heights = [slot.find("div/i").get("style") for slot in article.findall(".//li")][:4]
        assert heights == [f"height:{round(100 * a, 1)}%" for a in r.survival]
        cut = [i for i, slot in enumerate(article.findall(".//li")) if "ds-cut" in slot.get("class").split()]
        assert cut == ([r.verified] if r.verified < 4 else [])


def test_only_the_latest_rounds_where_asked(answer):
    assert html.rounds(answer, 2).count("<article") == 2 and "Round 1<" not in html.rounds(answer, 2)
    assert html.rounds(answer).count("<article") == answer.stats.num_rounds


def test_numbers_are_those_of_the_statistics(answer):
    found = {e.get("data-stat"): e.text for e in parse(html.numbers(answer)).iter() if e.get("data-stat")}
    stats = answer.stats
    for name in ("num_tokens", "num_rounds", "num_drafted", "num_verified", "num_accepted"):
        assert found[name] == str(getattr(stats, name))
    assert found["mean_acceptance_length"] == f"{stats.mean_acceptance_length:.2f}"
    assert found["tokens_per_second"] == "15.0" and found["path"] == "plain"


def test_charts_say_the_numbers(answer):
    rates = answer.stats.acceptance_by_position
    bars = parse(charts.acceptance_by_position(answer.stats)).findall(".//rect/title")
    assert [bar.text for bar in bars] == [f"{rate:.3f}" for rate in rates if rate is not None]
    dots = parse(charts.tau_over_time(answer.stats)).findall(".//circle/title")
    assert [dot.text for dot in dots] == [f"{r.num_committed:.3f}" for r in answer.stats.rounds]


def test_mean_confidence_is_over_the_drafts_that_were_tried(answer):
    found = charts.mean_confidence(answer.stats.rounds)
    tried = [r for r in answer.stats.rounds if r.accepted > 0 or (r.verified > 0 and r.next_token is not None)]
    assert found[0] == pytest.approx(sum(r.confidence[0] for r in tried) / len(tried))


def test_a_calibration_report():
    report = {
        "temperatures": [1.0, 2.0], "ece_before": 0.2, "ece_after": 0.1, "ece_by_position": [0.05, 0.15],
        "ece_by_position_before": [0.1, 0.3], "num_rounds": 7, "notes": [NASTY],
    }  # fmt: skip
    markup = charts.calibration(report)
    assert [e.text for e in parse(markup).findall(".//rect/title")] == ["0.100", "0.050", "0.300", "0.150"]
    assert "0.2000 before, 0.1000 after" in markup and "<b onclick" not in markup and "circle" not in markup
    bins = [{"predicted": 0.25, "accepted": 0.5, "count": 3}, {"predicted": 0.75, "accepted": 0.8, "count": 2}]
    markup = charts.calibration(report | {"reliability": bins, "reliability_before": bins[:1]})
    assert [e.text for e in parse(markup).findall(".//circle/title")] == ["0.500", "0.500", "0.800"]


def test_speeds_side_by_side(answer):
    plain = replace(answer, seconds=4.0, stats=None)
    found = {e.get("data-stat"): e.text for e in parse(html.comparison(plain, answer)).iter() if e.get("data-stat")}
    assert found == {"speedup": "2.00", "same": "the same text"}
    other = replace(plain, tokens=plain.tokens[:-1])
    assert "differ" in html.comparison(other, answer)
    sampled = replace(answer, settings={"temperature": 1.0})
    assert "two draws" in html.comparison(other, sampled)


@pytest.mark.parametrize("columns", [1, 5, 20, 200])
def test_lines_of_the_picture_hold_the_whole_text(columns):
    words = ["The", " answer", " is", ":\n\n", "  96", "extraordinarilylongword", "\n"]
    tokens = [Token(1, word, False, "accepted", i) for i, word in enumerate(words)]
    lines = list(poster.wrapped(tokens, columns))
    assert all(sum(len(piece) for piece, _ in line) <= columns for line in lines)
    text = "".join(piece for line in lines for piece, _ in line)
    assert text.replace(" ", "") == "".join(words).replace(" ", "").replace("\n", "")


def test_without_confidence_or_drafts_there_is_still_a_view():
    silent = Answer("q", tokens=[Token(1, "a", False, "target", 3)], state="finished", seconds=1.0)
    for markup in (html.rounds(silent), html.numbers(silent), charts.charts(None), poster.poster(silent)):
        parse(markup)
    assert html.number(None) == "–"
