"""The page: Gradio components and what happens when they are used. Everything it shows comes from the other modules."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import gradio as gr

from . import charts, html, poster
from .generation import Generation, Models
from .settings import Settings
from .trace import Answer

TICK = 0.15  # seconds between two pictures of a growing answer
LIVE_ROUNDS = 3  # rounds shown while the answer grows
VISITORS = 16  # answers that may wait or run at the same time; more wait in Gradio's queue
EXAMPLES = (
    "Tom has 12 marbles and buys 3 bags with 5 marbles each. How many marbles does he have now?",
    "Write a Python function that adds two numbers.",
    "Why is the sky blue?",
)


class Running:
    """The answer that each visitor is waiting for, so that the stop button finds it."""

    def __init__(self) -> None:
        self._generations: dict[str, Generation] = {}

    def follow(self, visitor: str | None, generation: Generation) -> Iterator[Answer]:
        """The answer again and again until it is over, and once more then; stopped when the reader goes away."""
        key = visitor or ""
        self.stop(key)
        self._generations[key] = generation
        try:
            while not generation.done.wait(TICK):
                yield generation.answer()
            yield generation.answer()
        finally:
            generation.stop()
            if self._generations.get(key) is generation:
                del self._generations[key]

    def stop(self, visitor: str | None) -> None:
        if generation := self._generations.get(visitor or ""):
            generation.stop()


def build(models: Models, *, title: str, calibration: Mapping[str, Any] | None = None) -> gr.Blocks:
    """The page for a pair.

    Args:
        models: the pair.
        title: what the pair is called on the page.
        calibration: a `CalibrationReport` as JSON.
    """
    running = Running()
    with gr.Blocks(title="DSpark demo", analytics_enabled=False, fill_width=True) as page:
        gr.HTML(HEADER.format(title=html.text(title)), elem_id="ds-header")
        with gr.Row(elem_id="ds-page"):
            with gr.Column(scale=2, min_width=240, elem_id="ds-settings"):
                controls = _controls(models)
            with gr.Column(scale=9, min_width=320), gr.Tabs():
                with gr.Tab("Chat", id="chat"):
                    _chat(models, running, controls, calibration)
                with gr.Tab("Side by side", id="compare"):
                    _side_by_side(models, running, controls)
        page.unload(_leave(running))
    return page


HEADER = """<h1>DSpark, token by token</h1>
<p>{title}. A small draft proposes a block of tokens, the target checks them in one forward and keeps those it would
have written itself. Colours show where each token came from; point at one, or move with the arrow keys, for its
numbers.</p>"""


def _leave(running: Running):
    def leave(request: gr.Request) -> None:
        running.stop(request.session_hash)

    return leave


def _controls(models: Models) -> dict[str, gr.components.Component]:
    """One control for each field of `Settings`, by its name."""
    gamma, longest = models.gamma, models.limits.max_new_tokens
    schedulers = [("off", "off"), ("auto (ragged path)", "auto")]
    if models.cost_model is not None:
        schedulers.append(("measured costs", "measured"))
    has_head = models.draft.confidence_head is not None
    return {
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


def _settings(models: Models, values: tuple[Any, ...]) -> Settings:
    settings = Settings(**dict(zip((f.name for f in fields(Settings)), values, strict=True)))
    return settings if models.can_think else replace(settings, thinking=None)


# ---- chat


def _chat(models: Models, running: Running, controls: dict[str, Any], calibration: Mapping[str, Any] | None) -> None:
    turns = gr.State([])
    with gr.Row(elem_id="ds-main"):
        with gr.Column(scale=6, min_width=320):
            with gr.Column(elem_id="ds-chat"):
                past, now = gr.HTML(EMPTY, elem_id="ds-past"), gr.HTML(elem_id="ds-now")
            legend = gr.HTML(html.legend(), elem_id="ds-legend")
            problem = gr.HTML(elem_id="ds-problem")
            message = gr.Textbox(
                label="Message", placeholder="Ask something", lines=1, max_lines=6, autofocus=True, elem_id="ds-message"
            )
            with gr.Row(elem_classes="ds-buttons"):
                send = gr.Button("Send", variant="primary", elem_id="ds-send", min_width=90, size="md")
                stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="ds-stop", min_width=90, size="md")
                clear = gr.Button("Clear", elem_id="ds-clear", min_width=90, size="md")
            status = gr.HTML(elem_id="ds-status")
            gr.HTML('<div role="status" aria-live="polite" class="ds-sr"></div>', elem_id="ds-live")
            gr.Examples([[e] for e in EXAMPLES], inputs=message, label="Examples")
        with gr.Column(scale=6, min_width=320):
            gr.HTML(DETAILS, elem_id="ds-details")
            numbers = gr.HTML(elem_id="ds-numbers")
            with gr.Tabs():
                with gr.Tab("Rounds"):
                    gr.HTML(html.round_legend())
                    rounds = gr.HTML(html.rounds(Answer("")), elem_id="ds-rounds")
                with gr.Tab("Charts"):
                    figures = gr.HTML(charts.charts(None), elem_id="ds-charts")
                if calibration is not None:
                    with gr.Tab("Calibration"):
                        gr.HTML(charts.calibration(calibration), elem_id="ds-calibration")
            _exports(turns)

    shown = [past, now, legend, problem, message, send, stop, status, numbers, rounds, figures, turns]

    def ask(request: gr.Request, text: Any, history: list[Answer], *values: Any) -> Iterator[dict[Any, Any]]:
        try:
            generation = models.ask(text, _messages(history), _settings(models, values))
        except ValueError as error:
            yield {problem: html.problem(str(error))}
            return
        yield {problem: "", message: "", send: gr.update(interactive=False), stop: gr.update(interactive=True)}
        for answer in running.follow(request.session_hash, generation):
            yield {
                now: html.question(answer.prompt) + html.answer(answer, len(history)),
                past: "".join(_turn(turn, i) for i, turn in enumerate(history)),
                legend: html.legend(answer.tokens),
                status: html.progress(answer),
                numbers: html.numbers(answer),
                rounds: html.rounds(answer, LIVE_ROUNDS),
            }
        history = [*history, answer]
        yield {
            turns: history,
            past: "".join(_turn(turn, i) for i, turn in enumerate(history)),
            now: "",
            problem: html.problem(answer.error),
            rounds: html.rounds(answer),
            figures: charts.charts(answer.stats),
            send: gr.update(interactive=True),
            stop: gr.update(interactive=False),
        }

    def forget(request: gr.Request) -> tuple[Any, ...]:
        running.stop(request.session_hash)
        blank = Answer("")
        return EMPTY, "", html.legend(), "", "", html.rounds(blank), charts.charts(None), "", []

    inputs = [message, turns, *controls.values()]
    for event in (message.submit, send.click):
        event(ask, inputs, shown, show_progress="hidden", concurrency_limit=VISITORS, concurrency_id="models",
              api_name="chat" if event is send.click else None)  # fmt: skip
    stop.click(_leave(running), None, None, queue=False, show_progress="hidden")
    clear.click(forget, None, [past, now, legend, problem, status, rounds, figures, numbers, turns], queue=False)


EMPTY = '<p class="ds-empty">Ask something, or take an example. Every token shows where it came from.</p>'
DETAILS = (
    '<div class="ds-card" aria-live="polite"><button type="button" class="ds-close" aria-label="Close">×</button>'
    "<h2>Token</h2><dl><div><dd>Point at a token, or click it to keep it here.</dd></div></dl></div>"
)


def _turn(answer: Answer, number: int) -> str:
    return html.question(answer.prompt) + html.answer(answer, number)


def _messages(history: list[Answer]) -> list[dict[str, str]]:
    told = [turn for turn in history if turn.text]
    sides = (("user", "prompt"), ("assistant", "text"))
    return [{"role": role, "content": getattr(turn, name)} for turn in told for role, name in sides]


def _exports(turns: gr.State) -> None:
    """The last answer as JSON and as a picture. The browser writes the files, so nothing is left on the server."""
    with gr.Row(elem_classes="ds-buttons"):
        as_json = gr.Button("Save trace (JSON)", elem_id="ds-json", size="sm")
        as_png = gr.Button("Save picture (PNG)", elem_id="ds-png", size="sm")
    carrier = gr.Textbox(visible="hidden", elem_id="ds-carrier", label="export")

    def trace(history: list[Answer]) -> str:
        return json.dumps(history[-1].to_dict(), ensure_ascii=False, indent=1) if history else ""

    def picture(history: list[Answer], dark: str) -> str:
        return poster.poster(history[-1], dark=dark == "dark") if history else ""

    save_json = "(content) => { dspark.save('dspark-trace.json', content); }"
    save_png = "(content) => { dspark.savePicture('dspark.png', content); }"
    as_json.click(trace, turns, carrier, show_progress="hidden").then(None, carrier, None, js=save_json)
    as_png.click(picture, [turns, carrier], carrier, show_progress="hidden", js=IS_DARK).then(
        None, carrier, None, js=save_png
    )


IS_DARK = "(turns) => [turns, document.body.classList.contains('dark') ? 'dark' : 'light']"


# ---- side by side


def _side_by_side(models: Models, running: Running, controls: dict[str, Any]) -> None:
    gr.HTML(COMPARE)
    prompt = gr.Textbox(EXAMPLES[0], label="Message", lines=1, max_lines=6, elem_id="ds-compare-message")
    with gr.Row(elem_classes="ds-buttons"):
        run = gr.Button("Run both", variant="primary", elem_id="ds-compare", min_width=90, size="md")
        stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="ds-compare-stop", min_width=90, size="md")
    result = gr.HTML(elem_id="ds-speedup")
    with gr.Row():
        panes = []
        for name, title in (("plain", "Plain generate()"), ("dspark", "With the DSpark draft")):
            with gr.Column(min_width=320):
                gr.HTML(f"<h2>{title}</h2>", elem_classes="ds-pane")
                pane = gr.HTML(elem_id=f"ds-{name}-numbers"), gr.HTML(elem_id=f"ds-{name}-text")
            panes.append(pane)
    shown = [result, run, stop, *panes[0], *panes[1]]

    def compare(request: gr.Request, text: Any, *values: Any) -> Iterator[dict[Any, Any]]:
        answers: list[Answer] = []
        try:
            settings = replace(_settings(models, values), probabilities=False)
            empty = {part: "" for pane in panes for part in pane}
            yield empty | {result: "Warming up …", run: gr.update(interactive=False), stop: gr.update(interactive=True)}
            for drafted in (False, True):
                short = replace(settings, max_new_tokens=min(WARM_UP, settings.max_new_tokens))
                *_, warm = running.follow(request.session_hash, models.ask(text, [], short, drafted=drafted))
                if warm.state == "failed":
                    raise ValueError(warm.error)
            for drafted, (figures, body) in zip((False, True), panes, strict=True):
                generation = models.ask(text, [], settings, drafted=drafted)
                for answer in running.follow(request.session_hash, generation):
                    yield {result: "", figures: html.numbers(answer), body: html.answer(answer)}
                answers.append(answer)
                if answer.state != "finished":
                    break
            summary = html.comparison(*answers) if len(answers) == 2 else html.problem(answers[-1].error or "Stopped.")
        except ValueError as error:
            summary = html.problem(str(error))
        yield {result: summary, run: gr.update(interactive=True), stop: gr.update(interactive=False)}

    for event in (prompt.submit, run.click):
        event(compare, [prompt, *controls.values()], shown, show_progress="hidden", concurrency_limit=VISITORS,
              concurrency_id="models", api_name="compare" if event is run.click else None)  # fmt: skip
    stop.click(_leave(running), None, None, queue=False, show_progress="hidden")


WARM_UP = 8  # tokens
COMPARE = """<p class="ds-help">The same message twice, one after the other so that they do not slow each other down:
first by the target alone, then with the draft. Both are timed from the start of <code>generate()</code> to the last
token.</p>"""
