"""The page in Chromium: what a visitor sees and does.

`HF_DSPARK_SCREENSHOTS=docs/images pytest tests/demo/test_browser.py` also writes the pictures of the docs.
"""

import json
import os
from pathlib import Path

import pytest

import hf_dspark
import tiny
from demo_page import served
from hf_dspark import default_pair

PATIENCE = 60_000  # milliseconds; other work may run on the machine
WIDE, PHONE = {"width": 1400, "height": 1000}, {"width": 390, "height": 844}
CALIBRATION = Path(__file__).parents[2] / "benchmarks" / "calibrate_smollm2.json"
QUESTION = "Tom has 12 marbles and buys 3 bags with 5 marbles each. How many marbles does he have now?"


class Visitor:
    """A browser window on the page."""

    def __init__(self, chromium, address, viewport=WIDE, dark=False):
        self.context = chromium.new_context(viewport=viewport, accept_downloads=True)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.errors = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(address + ("?__theme=dark" if dark else "?__theme=light"))
        self.page.wait_for_selector("#ds-send")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()
        assert not self.errors

    def send(self, text):
        self.page.fill("#ds-message textarea", text)
        self.page.click("#ds-send")

    def ask(self, text):
        """Send, and wait for the end of the answer."""
        before = self.page.locator("#ds-past .ds-answer").count()
        self.send(text)
        self.page.locator("#ds-past .ds-answer").nth(before).wait_for()
        self.page.wait_for_selector("#ds-send:not([disabled])")

    def set(self, label, value):
        self.page.get_by_label(f"number input for {label}").fill(str(value))
        self.page.keyboard.press("Tab")

    def stat(self, name, within="#ds-numbers"):
        return self.page.locator(f"{within} [data-stat={name}]").inner_text()

    def tokens(self, within="#ds-past .ds-answer >> nth=-1"):
        """(text, origin) of each token of the last answer."""
        found = self.page.locator(within).locator(".ds-token")
        return [tuple(pair) for pair in found.evaluate_all(
            "all => all.map(t => [t.textContent, t.dataset.origin])")]  # fmt: skip

    def details(self):
        rows = self.page.locator("#ds-details dl div")
        return dict(rows.evaluate_all("all => all.map(r => [r.dataset.name, r.querySelector('dd').textContent])"))

    def picture(self, name):
        """Keep what is seen, where the environment asks for it."""
        if folder := os.environ.get("HF_DSPARK_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=Path(folder) / f"{name}.png")


@pytest.fixture
def calm(tiny_page):
    """The address of the tiny page; its target is fast and sound again."""
    address, slow = tiny_page
    slow.seconds, slow.error, slow.forwards = 0.0, None, 0
    return address


def test_tokens_stream_in_the_colours_of_their_origins(chromium, calm, tiny_page):
    tiny_page[1].seconds = 0.15
    with Visitor(chromium, calm) as visitor:
        visitor.send("abc")
        visitor.page.locator("#ds-now .ds-running .ds-token").nth(6).wait_for()
        early = visitor.tokens("#ds-now .ds-answer")
        visitor.page.locator("#ds-now .ds-running .ds-token").nth(len(early) + 8).wait_for()
        assert visitor.page.locator("#ds-send").is_disabled() and visitor.page.locator("#ds-stop").is_enabled()
        tiny_page[1].seconds = 0
        visitor.page.wait_for_selector("#ds-send:not([disabled])")
        tokens = visitor.tokens()
        assert tokens[: len(early)] == early and len(tokens) == 128
        kinds = [kind for _, kind in tokens]
        assert kinds[:11] == [
            "first",
            *["accepted"] * 4,
            "bonus",
            "correction",
            *["accepted"] * 2,
            "correction",
            "accepted",
        ]
        start = tiny.tokenizer()("abc").input_ids[-1]
        assert "".join(text for text, _ in tokens) == tiny.tokenizer().decode(tiny.chain(start, 128))
        colours = {
            kind: visitor.page.locator(f"#ds-past .ds-{kind}").first.evaluate(
                "t => getComputedStyle(t).backgroundColor"
            )
            for kind in ("first", "accepted", "correction", "bonus")
        }
        assert len(set(colours.values())) == 4 and "rgba(0, 0, 0, 0)" not in colours.values()
        counts = {k: int(visitor.page.locator(f"#ds-legend [data-count={k}]").inner_text()) for k in colours}
        assert counts == {kind: kinds.count(kind) for kind in colours}


def test_the_numbers_on_the_page_are_those_of_the_statistics(chromium, calm, tiny_page):
    """Every number of the page against `SpeculationStats` of the same call, and against the exported trace."""
    target, seen = tiny_page[1].target, []
    original = target.generate

    def generate(*args, **kwargs):
        with hf_dspark.record() as stats:
            output = original(*args, **kwargs)
        seen.append(stats)
        return output

    target.generate = generate
    try:
        with Visitor(chromium, calm) as visitor:
            visitor.set("Confidence threshold", 0.5)
            visitor.ask("abc")
            (stats,) = seen
            for name in ("num_tokens", "num_rounds", "num_drafted", "num_verified", "num_accepted"):
                assert int(visitor.stat(name)) == getattr(stats, name)
            assert visitor.stat("mean_acceptance_length") == f"{stats.mean_acceptance_length:.2f}"
            assert visitor.stat("expected_acceptance_length") == f"{stats.expected_acceptance_length:.2f}"
            assert visitor.stat("acceptance_rate") == f"{stats.acceptance_rate:.3f}"
            assert visitor.stat("path") == stats.path
            rounds = visitor.page.locator("#ds-rounds .ds-round").evaluate_all(
                "all => all.map(r => [+r.dataset.verified, +r.dataset.accepted, r.querySelectorAll('.ds-own').length])"
            )
            own = [int(r.next_token is not None) for r in stats.rounds]
            assert rounds == [[r.verified, r.accepted, o] for r, o in zip(stats.rounds, own, strict=True)]
            visitor.page.get_by_role("tab", name="Charts").click()
            said = visitor.page.locator("#ds-charts svg").first.get_attribute("aria-label")
            rates = [
                f"{k}: " + ("–" if r is None else f"{r:.2f}") for k, r in enumerate(stats.acceptance_by_position, 1)
            ]
            assert said == "Acceptance by position: " + ", ".join(rates)
            with visitor.page.expect_download() as download:
                visitor.page.click("#ds-json")
            trace = json.loads(Path(download.value.path()).read_text())
            assert trace["statistics"] == json.loads(json.dumps(stats.to_dict()))
            assert [t["text"] for t in trace["tokens"]] == [text for text, _ in visitor.tokens()]
    finally:
        del target.generate


def test_details_of_a_token(chromium, calm):
    with Visitor(chromium, calm) as visitor:
        visitor.ask("abc")
        with visitor.page.expect_download() as download:
            visitor.page.click("#ds-json")
        trace = json.loads(Path(download.value.path()).read_text())
        tokens = visitor.page.locator("#ds-past .ds-token")
        tokens.nth(2).hover()
        assert "accepted draft" in visitor.page.locator("#ds-details h2").inner_text()
        fixed = trace["tokens"].index(next(t for t in trace["tokens"] if t["origin"] == "correction"))
        for index in (2, fixed):
            tokens.nth(index).click()
            data, shown = trace["tokens"][index], visitor.details()
            k = data["slot"]
            assert shown["p (target)"] == f"{data['p']:.3f}" and shown[f"c_{k}"] == f"{data['c']:.3f}"
            assert shown[f"a_{k}"] == f"{data['a']:.3f}" and shown["round"] == str(data["round"] + 1)
            assert shown["position"] == str(data["position"])
            if index == fixed:
                assert shown["q of that draft"] == f"{data['replaced_q']:.3f}"
            else:
                assert shown["q (draft)"] == f"{data['q']:.3f}"
            here = visitor.page.locator("#ds-rounds .ds-round.ds-here")
            assert here.get_attribute("data-round") == str(data["round"])
        tokens.nth(0).hover()
        assert visitor.details()["position"] == str(data["position"]), "a clicked token stays in the card"


def test_keyboard_and_labels(chromium, calm):
    with Visitor(chromium, calm) as visitor:
        page = visitor.page
        page.focus("#ds-message textarea")
        page.keyboard.type("abc")
        page.keyboard.press("Enter")
        page.locator("#ds-past .ds-answer").wait_for()
        page.locator("#ds-past .ds-token").first.focus()
        for key, position in (("ArrowRight", "4"), ("ArrowRight", "5"), ("ArrowLeft", "4"), ("Home", "3")):
            page.keyboard.press(key)
            assert visitor.details()["position"] == position
        page.keyboard.press("Escape")
        assert page.locator(".ds-token[aria-selected=true]").count() == 0
        assert page.get_by_role("listbox", name="Tokens of the answer").count() == 1
        assert page.get_by_role("option", name="accepted draft").count() > 10
        assert page.get_by_role("region", name="Rounds").count() == 1
        for name in ("Temperature", "Top-p", "Drafts per round", "Confidence threshold", "Longest answer, tokens"):
            assert page.get_by_label(f"number input for {name}").count() == 1
        for role, name in (("textbox", "Message"), ("button", "Send"), ("button", "Stop"), ("button", "Clear")):
            assert page.get_by_role(role, name=name, exact=True).count() >= 1
        assert "Finished" in page.locator("#ds-live [role=status]").text_content()


def expect_none(locator) -> None:
    """Wait until the page holds nothing of the kind."""
    from playwright.sync_api import expect

    expect(locator).to_have_count(0, timeout=PATIENCE)


def test_a_higher_threshold_verifies_less(chromium, calm):
    with Visitor(chromium, calm) as visitor:
        visitor.ask("abc")
        whole = int(visitor.stat("num_verified"))
        text = "".join(t for t, _ in visitor.tokens())
        assert visitor.page.locator("#ds-rounds .ds-cut").count() <= 1, "the length limit may cut the last round"
        visitor.page.click("#ds-clear")
        expect_none(visitor.page.locator("#ds-past .ds-token, #ds-now .ds-token"))
        visitor.set("Confidence threshold", 0.7)
        visitor.ask("abc")
        assert 0 < int(visitor.stat("num_verified")) < whole
        assert visitor.page.locator("#ds-rounds .ds-cut").count() > 1
        assert "".join(t for t, _ in visitor.tokens()) == text, "the text is the target's own either way"


def test_stop_in_the_middle(chromium, calm, tiny_page):
    slow = tiny_page[1]
    slow.seconds = 0.2
    with Visitor(chromium, calm) as visitor:
        visitor.send("abc")
        visitor.page.locator("#ds-now .ds-running .ds-token").nth(5).wait_for()
        visitor.page.click("#ds-stop")
        visitor.page.locator("#ds-past .ds-stopped").wait_for()
        forwards = slow.forwards
        assert 5 < len(visitor.tokens()) < 128 and "Stopped" in visitor.page.locator("#ds-status").inner_text()
        visitor.page.wait_for_timeout(1000)
        assert slow.forwards == forwards, "nothing is computed after the stop"
        slow.seconds = 0
        visitor.ask("d")
        assert len(visitor.tokens()) == 128


def test_no_second_answer_begins_while_one_is_written(chromium, calm, tiny_page):
    tiny_page[1].seconds = 0.15
    with Visitor(chromium, calm) as visitor:
        visitor.send("abc")
        visitor.page.locator("#ds-now .ds-running .ds-token").nth(3).wait_for()
        visitor.page.fill("#ds-message textarea", "xyz")
        visitor.page.press("#ds-message textarea", "Enter")
        visitor.page.wait_for_timeout(500)
        tiny_page[1].seconds = 0
        visitor.page.locator("#ds-past .ds-finished").wait_for()
        visitor.page.wait_for_timeout(500)
        assert visitor.page.locator(".ds-question").count() == 1 and len(visitor.tokens()) == 128


def test_a_visitor_who_leaves_is_not_computed_for(chromium, calm, tiny_page):
    slow = tiny_page[1]
    slow.seconds = 0.3
    with Visitor(chromium, calm) as visitor:
        visitor.send("abc")
        visitor.page.locator("#ds-now .ds-running .ds-token").nth(5).wait_for()
    with Visitor(chromium, calm) as other:
        other.page.wait_for_timeout(1500)
        forwards = slow.forwards
        other.page.wait_for_timeout(1500)
        assert slow.forwards == forwards


def test_errors_reach_the_page(chromium, calm, tiny_page):
    slow = tiny_page[1]
    with Visitor(chromium, calm) as visitor:
        problem = visitor.page.get_by_role("alert")
        visitor.send("")
        problem.filter(has_text="Write a message").wait_for()
        visitor.send("a" * 61)
        problem.filter(has_text="61 tokens long and this page takes 60").wait_for()
        slow.error = RuntimeError("out of memory, say")
        visitor.ask("abc")
        assert "out of memory, say" in problem.inner_text() and visitor.page.locator("#ds-past .ds-failed").count() == 1
        slow.error = None
        visitor.ask("abc")
        assert problem.count() == 0 and len(visitor.tokens()) == 128


def test_what_models_and_visitors_write_is_not_run(chromium, calm):
    nasty = "<img src=x onerror='hacked=1'>{{1+1}}${hacked=1}`"
    with Visitor(chromium, calm) as visitor:
        visitor.ask(nasty)
        assert visitor.page.locator("#ds-past .ds-question").inner_text().endswith(nasty)
        assert visitor.page.evaluate("window.hacked === undefined")


def test_two_visitors_at_once(chromium, calm, tiny_page):
    tiny_page[1].seconds = 0.1
    with Visitor(chromium, calm) as one, Visitor(chromium, calm) as two:
        one.send("abc")
        one.page.locator("#ds-now .ds-running .ds-token").nth(3).wait_for()
        two.set("Longest answer, tokens", 30)
        two.send("xyz")
        two.page.locator("#ds-status", has_text="another visitor").wait_for()
        tiny_page[1].seconds = 0
        for visitor, text, length in ((one, "abc", 128), (two, "xyz", 30)):
            visitor.page.locator("#ds-past .ds-finished").wait_for()
            start = tiny.tokenizer()(text).input_ids[-1]
            assert "".join(t for t, _ in visitor.tokens()) == tiny.tokenizer().decode(tiny.chain(start, length))
            assert visitor.page.locator("#ds-past .ds-question").count() == 1
        one.page.click("#ds-clear")
        one.page.wait_for_selector("#ds-past .ds-empty")
        assert two.page.locator("#ds-past .ds-answer").count() == 1, "clearing is one's own"


def test_a_conversation_goes_on(chromium, calm):
    with Visitor(chromium, calm) as visitor:
        visitor.set("Longest answer, tokens", 10)
        visitor.ask("abc")
        visitor.ask("de")
        positions = visitor.page.locator("#ds-past .ds-token").evaluate_all(
            r"all => all.map(t => +t.dataset.details.match(/position\t(\d+)/)[1])"
        )
        first = "".join(text for text, _ in visitor.tokens("#ds-past .ds-answer >> nth=0"))
        second = len(tiny.tokenizer()("abc" + first + "de").input_ids)
        assert positions == [*range(3, 13), *range(second, second + 10)]


def test_side_by_side(chromium, calm, tiny_page):
    tiny_page[1].seconds = 0.05
    with Visitor(chromium, calm) as visitor:
        visitor.set("Longest answer, tokens", 40)
        visitor.page.get_by_role("tab", name="Side by side").click()
        visitor.page.fill("#ds-compare-message textarea", "abc")
        visitor.page.click("#ds-compare")
        visitor.page.locator("#ds-plain-text .ds-running .ds-token").nth(3).wait_for()
        visitor.page.locator("#ds-dspark-text .ds-running .ds-token").nth(3).wait_for()
        speedup = float(visitor.stat("speedup", "#ds-speedup"))
        speeds = [float(visitor.stat("tokens_per_second", f"#ds-{name}-numbers")) for name in ("plain", "dspark")]
        assert speedup > 1.3 and abs(speedup - speeds[1] / speeds[0]) < 0.1
        assert visitor.stat("same", "#ds-speedup") == "the same text"
        plain, drafted = (visitor.tokens(f"#ds-{name}-text") for name in ("plain", "dspark"))
        assert [t for t, _ in plain] == [t for t, _ in drafted] and {kind for _, kind in plain} == {"target"}


def test_side_by_side_stops_and_says_what_is_wrong(chromium, calm, tiny_page):
    with Visitor(chromium, calm) as visitor:
        page = visitor.page
        page.get_by_role("tab", name="Side by side").click()
        page.fill("#ds-compare-message textarea", "")
        page.click("#ds-compare")
        page.get_by_role("alert").filter(has_text="Write a message").wait_for()
        tiny_page[1].seconds = 0.1
        page.fill("#ds-compare-message textarea", "abc")
        page.click("#ds-compare")
        page.locator("#ds-plain-text .ds-running .ds-token").nth(2).wait_for()
        page.keyboard.press("Escape")
        page.get_by_role("alert").filter(has_text="Stopped").wait_for()
        assert page.locator("#ds-dspark-text .ds-token").count() == 0


def test_the_view_as_a_png(chromium, calm):
    with Visitor(chromium, calm, dark=True) as visitor:
        visitor.ask("abc")
        with visitor.page.expect_download() as download:
            visitor.page.click("#ds-png")
        data = Path(download.value.path()).read_bytes()
        assert data.startswith(b"\x89PNG") and int.from_bytes(data[16:20]) == 1200 and len(data) > 10_000


@pytest.mark.parametrize(("viewport", "dark"), [(WIDE, False), (WIDE, True), (PHONE, False), (PHONE, True)])
def test_it_can_be_read(chromium, calm, viewport, dark):
    """Nothing is wider than the window, and words stand out from what is behind them."""
    with Visitor(chromium, calm, viewport, dark) as visitor:
        visitor.ask("abc")
        page = visitor.page
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        for selector in ("#ds-past .ds-accepted", "#ds-past .ds-correction", "#ds-past .ds-bonus", "#ds-past .ds-first",
                         "#ds-past .ds-question", "#ds-numbers dd", "#ds-numbers dt"):  # fmt: skip
            assert page.locator(selector).first.evaluate(CONTRAST) >= 4.5, selector
        if viewport is PHONE:
            page.locator("#ds-past .ds-token").nth(3).click()
            box = page.locator("#ds-details .ds-card").bounding_box()
            assert box["y"] + box["height"] <= viewport["height"] and box["width"] <= viewport["width"]


# WCAG 2: of an element's colour with the first opaque background behind it.
CONTRAST = """element => {
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = (rgb) => [.2126, .7152, .0722].reduce((sum, w, i) => sum + w * linear(rgb[i] / 255), 0);
  let behind = element, ground = [255, 255, 255];
  for (; behind; behind = behind.parentElement) {
    const colour = parse(getComputedStyle(behind).backgroundColor);
    if (colour.length < 4 || colour[3] > .99) { ground = colour; break; }
  }
  const [a, b] = [light(parse(getComputedStyle(element).color)), light(ground)].sort((x, y) => y - x);
  return (a + .05) / (b + .05);
}"""


# ---- the embedded pair, and the pictures of the docs


@pytest.fixture(scope="module")
def embedded():
    if not default_pair.is_prepared():
        pytest.skip("the embedded target is not prepared: run `hf-dspark setup-demo`")
    with served(*hf_dspark.load_default_pair(), calibration=CALIBRATION) as address:
        yield address


@pytest.mark.slow
def test_the_embedded_pair(chromium, embedded):
    with Visitor(chromium, embedded) as visitor:
        visitor.set("Longest answer, tokens", 90)
        visitor.ask(QUESTION)
        assert float(visitor.stat("mean_acceptance_length")) > 1.5
        assert {kind for _, kind in visitor.tokens()} >= {"first", "accepted", "correction"}
        visitor.page.locator("#ds-past .ds-correction").nth(3).click()
        visitor.picture("demo")
        visitor.page.get_by_role("tab", name="Charts").click()
        visitor.page.get_by_role("tab", name="Calibration").click()
        rounds = json.loads(CALIBRATION.read_text())["num_rounds"]
        assert f"{rounds} rounds" in visitor.page.locator("#ds-calibration").inner_text()


@pytest.mark.slow
def test_the_embedded_pair_on_a_dark_phone(chromium, embedded):
    with Visitor(chromium, embedded, PHONE, dark=True) as visitor:
        visitor.set("Longest answer, tokens", 40)
        visitor.ask(QUESTION)
        visitor.page.locator("#ds-past .ds-accepted").nth(3).click()
        visitor.picture("demo-phone")


@pytest.mark.slow
def test_the_embedded_pair_side_by_side(chromium, embedded):
    with Visitor(chromium, embedded) as visitor:
        visitor.set("Longest answer, tokens", 60)
        visitor.page.get_by_role("tab", name="Side by side").click()
        visitor.page.click("#ds-compare")
        assert float(visitor.stat("speedup", "#ds-speedup")) > 0
        assert visitor.stat("same", "#ds-speedup") == "the same text"
