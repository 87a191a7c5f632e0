"""The page: Gradio components and what happens when they are used. Everything it shows comes from the other modules."""

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import gradio as gr

from . import charts, html, poster
from .generation import Generation, Models
from .settings import Settings
from .trace import Answer

TICK = 0.15  # seconds between two pictures of a growing answer
LIVE_ROUNDS = 3  # rounds shown while the answer grows
WARM_UP = 8  # tokens of each, before the side by side
VISITORS = 16  # answers that may wait or run at the same time; more wait in Gradio's queue
# Of every event that answers. Gradio's own progress would cover the growing answer.
LONG: dict[str, Any] = {"show_progress": "hidden", "concurrency_limit": VISITORS, "concurrency_id": "models"}
EXAMPLES = (
    "Tom has 12 marbles and buys 3 bags with 5 marbles each. How many marbles does he have now?",
    "Write a Python function that adds two numbers.",
    "Why is the sky blue?",
)
HEADER = """<h1>DSpark, token by token</h1>
<p>{title}. A small draft proposes a block of tokens, the target checks them in one forward and keeps those it would
have written itself. Colours show where each token came from; point at one, or move with the arrow keys, for its
numbers.</p>"""
EMPTY = '<p class="ds-empty">Ask something, or take an example. Every token shows where it came from.</p>'
DETAILS = (
    '<div class="ds-card" aria-live="polite"><button type="button" class="ds-close" aria-label="Close">×</button>'
    "<h2>Token</h2><p>Point at a token, or click it to keep it here.</p><dl></dl></div>"
)
COMPARE = """<p class="ds-help">The same message twice, one after the other so that they do not slow each other down:
first by the target alone, then with the draft. Both are timed from the start of <code>generate()</code> to the last
token.</p>"""

Updates = dict[Any, Any]


class Running:
    """The answer that each visitor is waiting for, so that the stop button finds it."""

    def __init__(self) -> None:
        self._generations: dict[str | None, Generation] = {}

    def follow(self, visitor: str | None, generation: Generation) -> Iterator[Answer]:
        """The answer again and again until it is over, and once more then; stopped when the reader goes away."""
        self._generations[visitor] = generation
        try:
            while not generation.done.wait(TICK):
                yield generation.answer()
            yield generation.answer()
        finally:
            generation.stop()
            self._generations.pop(visitor, None)

    def stop(self, visitor: str | None) -> None:
        if generation := self._generations.get(visitor):
            generation.stop()


def build(models: Models, *, title: str, calibration: Mapping[str, Any] | None = None) -> gr.Blocks:
    """The page for a pair.

    Args:
        models: the pair.
        title: what the pair is called on the page.
        calibration: a `CalibrationReport` as JSON.
    """
    chats, pairs = Running(), Running()
    with gr.Blocks(title="DSpark demo", analytics_enabled=False, fill_width=True) as page:
        gr.HTML(HEADER.format(title=html.text(title)), elem_id="ds-header")
        with gr.Row(elem_id="ds-page"):
            with gr.Column(scale=2, min_width=240, elem_id="ds-settings"):
                gr.HTML("<h2>Settings</h2>", elem_classes="ds-pane")
                controls = _controls(models)
            with gr.Column(scale=9, min_width=320), gr.Tabs():
                with gr.Tab("Chat", id="chat"):
                    _wire_chat(_chat_parts(calibration), models, chats, controls)
                with gr.Tab("Side by side", id="compare"):
                    _side_by_side(models, pairs, controls)
        page.unload(_stopper(chats, pairs))
    return page


def _stopper(*all_running: Running) -> Callable[[gr.Request], None]:
    def stop(request: gr.Request) -> None:
        for running in all_running:
            running.stop(request.session_hash)

    return stop


def _controls(models: Models) -> list[gr.components.Component]:
    """One control for each field of `Settings`, in their order."""
    gamma, longest = models.gamma, models.limits.max_new_tokens
    schedulers = [("off", "off"), ("auto (ragged path)", "auto")]
    if models.cost_model is not None:
        schedulers.append(("measured costs", "measured"))
    has_head = models.draft.confidence_head is not None
    controls = {
        "temperature": gr.Slider(0, 2, 0, step=0.05, label="Temperature", info="0 takes the likeliest token."),
        "top_p": gr.Slider(0.05, 1, 1, step=0.05, label="Top-p", info="When sampling."),
        "num_assistant_tokens": gr.Slider(
            1, gamma, gamma, step=1, label="Drafts per round", info="Most drafts sent to the target."
        ),
        "assistant_confidence_threshold": gr.Slider(
            0, 1, 0, step=0.05, label="Confidence threshold", interactive=has_head,
            info="Cut a block at the first c_k below this." if has_head else "This draft has no confidence head.",
        ),
        "scheduler": gr.Dropdown(schedulers, value="off", label="Scheduler", info="Chooses how many drafts pay."),
        "path": gr.Radio(["plain", "ragged"], value="plain", label="Path", info="Ragged is the fast path on a GPU."),
        "max_new_tokens": gr.Slider(1, longest, min(128, longest), step=1, label="Longest answer, tokens"),
        "seed": gr.Number(0, precision=0, label="Seed", info="When sampling."),
        "thinking": gr.Checkbox(False, label="Thinking", visible=models.can_think),
        "probabilities": gr.Checkbox(True, label="Note p and q", info="Slower on the fast path."),
    }  # fmt: skip
    return [controls[field.name] for field in fields(Settings)]


def _settings(models: Models, values: tuple[Any, ...]) -> Settings:
    settings = Settings(**dict(zip((field.name for field in fields(Settings)), values, strict=True)))
    return settings if models.can_think else replace(settings, thinking=None)


# ---- chat


@dataclass(frozen=True)
class Chat:
    """The parts of the chat that change. Finished turns are apart from the growing one, which is sent many times."""

    past: gr.HTML
    now: gr.HTML
    legend: gr.HTML
    problem: gr.HTML
    message: gr.Textbox
    send: gr.Button
    stop: gr.Button
    clear: gr.Button
    status: gr.HTML
    numbers: gr.HTML
    rounds: gr.HTML
    figures: gr.HTML
    turns: gr.State

    def all(self) -> list[Any]:
        return [getattr(self, field.name) for field in fields(self)]

    def busy(self, busy: bool) -> Updates:
        start = gr.update(interactive=not busy)
        return {self.send: start, self.clear: start, self.stop: gr.update(interactive=busy)}

    def blank(self) -> Updates:
        nothing = dict.fromkeys((self.now, self.problem, self.status, self.numbers), "")
        empty = {self.past: EMPTY, self.legend: html.legend(), self.figures: charts.charts(None), self.turns: []}
        return nothing | empty | {self.rounds: html.rounds(Answer(""))}


def _chat_parts(calibration: Mapping[str, Any] | None) -> Chat:
    parts: dict[str, Any] = {"turns": gr.State([])}
    with gr.Row(elem_id="ds-main"):
        with gr.Column(scale=6, min_width=320):
            with gr.Column(elem_id="ds-chat"):
                parts |= {"past": gr.HTML(EMPTY, elem_id="ds-past"), "now": gr.HTML(elem_id="ds-now")}
            parts["legend"] = gr.HTML(html.legend(), elem_id="ds-legend")
            parts["problem"] = gr.HTML(elem_id="ds-problem")
            parts["message"] = gr.Textbox(
                label="Message", placeholder="Ask something", max_lines=6, autofocus=True, elem_id="ds-message"
            )
            with gr.Row():
                parts["send"] = _button("Send", "ds-send", variant="primary")
                parts["stop"] = _button("Stop", "ds-stop", variant="stop", interactive=False)
                parts["clear"] = _button("Clear", "ds-clear")
            parts["status"] = gr.HTML(elem_id="ds-status")
            gr.HTML('<div role="status" aria-live="polite" class="ds-sr"></div>', elem_id="ds-live")
            gr.Examples([[example] for example in EXAMPLES], inputs=parts["message"], label="Examples")
        with gr.Column(scale=6, min_width=320):
            gr.HTML(DETAILS, elem_id="ds-details")
            parts["numbers"] = gr.HTML(elem_id="ds-numbers")
            with gr.Tabs():
                with gr.Tab("Rounds"):
                    gr.HTML(html.round_legend())
                    parts["rounds"] = gr.HTML(html.rounds(Answer("")), elem_id="ds-rounds")
                with gr.Tab("Charts"):
                    parts["figures"] = gr.HTML(charts.charts(None), elem_id="ds-charts")
                if calibration is not None:
                    with gr.Tab("Calibration"):
                        gr.HTML(charts.calibration(calibration), elem_id="ds-calibration")
            _exports(parts["turns"])
    return Chat(**parts)


def _button(label: str, elem_id: str, **options: Any) -> gr.Button:
    return gr.Button(label, elem_id=elem_id, min_width=90, size="md", **options)


def _wire_chat(chat: Chat, models: Models, running: Running, controls: list[Any]) -> None:
    def ask(request: gr.Request, message: Any, turns: list[Answer], *values: Any) -> Iterator[Updates]:
        try:
            generation = models.ask(message, _history(turns), _settings(models, values))
        except ValueError as error:
            yield {chat.problem: html.problem(str(error))}
            return
        told = "".join(html.turn(turn, i) for i, turn in enumerate(turns))
        yield {chat.problem: "", chat.message: "", chat.past: told} | chat.busy(True)
        for answer in running.follow(request.session_hash, generation):
            yield {
                chat.now: html.turn(answer, len(turns)),
                chat.legend: html.legend(answer.tokens),
                chat.status: html.progress(answer),
                chat.numbers: html.numbers(answer),
                chat.rounds: html.rounds(answer, LIVE_ROUNDS),
            }
        yield {
            chat.turns: [*turns, answer],
            chat.past: told + html.turn(answer, len(turns)),
            chat.now: "",
            chat.problem: html.problem(answer.error),
            chat.rounds: html.rounds(answer),
            chat.figures: charts.charts(answer.stats),
        } | chat.busy(False)

    # One event for both, so that no second answer begins while one is being written.
    triggers = [chat.message.submit, chat.send.click]
    gr.on(triggers, ask, [chat.message, chat.turns, *controls], chat.all(), api_name="chat", **LONG)
    chat.stop.click(_stopper(running), queue=False, show_progress="hidden")
    chat.clear.click(chat.blank, None, chat.all(), queue=False, show_progress="hidden")


def _history(turns: list[Answer]) -> list[tuple[str, str]]:
    return [(turn.prompt, turn.text) for turn in turns if turn.text]


def _exports(turns: gr.State) -> None:
    """The last answer as JSON and as a picture. The browser writes the files, so nothing is left on the server."""
    with gr.Row():
        as_json = gr.Button("Save trace (JSON)", elem_id="ds-json", size="sm")
        as_png = gr.Button("Save picture (PNG)", elem_id="ds-png", size="sm")
    carrier = gr.Textbox(visible="hidden", elem_id="ds-carrier", label="export")

    def trace(turns: list[Answer]) -> str:
        return json.dumps(turns[-1].to_dict(), ensure_ascii=False, indent=1) if turns else ""

    def picture(turns: list[Answer], theme: str) -> str:
        return poster.poster(turns[-1], dark=theme == "dark") if turns else ""

    theme = "(turns) => [turns, document.body.classList.contains('dark') ? 'dark' : 'light']"
    as_json.click(trace, turns, carrier, show_progress="hidden").then(
        None, carrier, None, js="(content) => { dspark.save('dspark-trace.json', content); }"
    )
    as_png.click(picture, [turns, carrier], carrier, show_progress="hidden", js=theme).then(
        None, carrier, None, js="(content) => { dspark.savePicture('dspark.png', content); }"
    )


# ---- side by side


def _side_by_side(models: Models, running: Running, controls: list[Any]) -> None:
    gr.HTML(COMPARE)
    prompt = gr.Textbox(EXAMPLES[0], label="Message", max_lines=6, elem_id="ds-compare-message")
    with gr.Row():
        run = _button("Run both", "ds-compare", variant="primary")
        stop = _button("Stop", "ds-compare-stop", variant="stop", interactive=False)
    result = gr.HTML(elem_id="ds-speedup")
    panes = []
    with gr.Row():
        for name, title in (("plain", "Plain generate()"), ("dspark", "With the DSpark draft")):
            with gr.Column(min_width=320):
                gr.HTML(f"<h2>{title}</h2>", elem_classes="ds-pane")
                panes.append((gr.HTML(elem_id=f"ds-{name}-numbers"), gr.HTML(elem_id=f"ds-{name}-text")))

    def buttons(busy: bool) -> Updates:
        return {run: gr.update(interactive=not busy), stop: gr.update(interactive=busy)}

    def compare(request: gr.Request, message: Any, *values: Any) -> Iterator[Updates]:
        yield {part: "" for pane in panes for part in pane} | {result: "Warming up …"} | buttons(True)
        try:
            # What a comparison is about is speed, so nothing is noted that costs time.
            settings = replace(_settings(models, values), probabilities=False)
            answers = yield from _both(request.session_hash, message, settings)
            summary = html.comparison(*answers)
        except ValueError as error:
            summary = html.problem(str(error))
        yield {result: summary} | buttons(False)

    def _both(visitor: str | None, message: Any, settings: Settings) -> Generator[Updates, None, list[Answer]]:
        answers: list[Answer] = []
        short = replace(settings, max_new_tokens=min(WARM_UP, settings.max_new_tokens))
        for drafted in (False, True):
            *_, warm = running.follow(visitor, models.ask(message, [], short, drafted=drafted))
            _finished(warm)
        for drafted, (numbers, body) in zip((False, True), panes, strict=True):
            for answer in running.follow(visitor, models.ask(message, [], settings, drafted=drafted)):
                yield {result: "", numbers: html.numbers(answer), body: html.answer(answer)}
            answers.append(_finished(answer))
        return answers

    shown = [result, run, stop, *panes[0], *panes[1]]
    gr.on([prompt.submit, run.click], compare, [prompt, *controls], shown, api_name="compare", **LONG)
    stop.click(_stopper(running), queue=False, show_progress="hidden")


def _finished(answer: Answer) -> Answer:
    """The answer.

    Raises:
        ValueError: it failed or was stopped.
    """
    if answer.state != "finished":
        raise ValueError(answer.error or "Stopped.")
    return answer
