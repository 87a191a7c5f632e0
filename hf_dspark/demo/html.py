"""Answers, rounds and numbers as HTML. Pure functions; whatever a model or a visitor wrote is escaped."""

import html
from collections.abc import Sequence

from hf_dspark import Round

from .trace import ORIGINS, Answer, Token

NAMES = {
    "first": "first token",
    "accepted": "accepted draft",
    "correction": "correction",
    "bonus": "bonus",
    "target": "target alone",
}
# Gradio reads values of its HTML component as templates, so their brackets must not come from a text.
TEMPLATE = str.maketrans({"{": "&#123;", "}": "&#125;", "$": "&#36;", "`": "&#96;"})


def text(value: object) -> str:
    """Safe inside an element or a quoted attribute."""
    return html.escape(str(value)).translate(TEMPLATE)


def visible(piece: str) -> str:
    """A token's text with its blanks shown."""
    return piece.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣") or "…"


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


# ---- the conversation


def question(prompt: str) -> str:
    return f'<div class="ds-question"><span class="ds-sr">You: </span>{text(prompt)}</div>'


def answer(given: Answer, number_of_turn: int = 0) -> str:
    """A bubble of tokens in the colours of their origins; `data-details` of each has lines of name, tab, value."""
    spans = "".join(_token(token, i, number_of_turn) for i, token in enumerate(given.tokens))
    waits = '<span class="ds-caret" aria-hidden="true"></span>' if given.state in ("waiting", "running") else ""
    note = f'<div class="ds-note">{text(_end(given))}</div>' if _end(given) else ""
    return (
        f'<div class="ds-answer ds-{given.state}"><span class="ds-sr">Answer: {text(given.text)}</span>'
        f'<div class="ds-tokens" role="listbox" aria-label="Tokens of the answer; arrow keys move between them">'
        f"{spans}{waits}</div>{note}</div>"
    )


def turn(given: Answer, number_of_turn: int) -> str:
    return question(given.prompt) + answer(given, number_of_turn)


def _end(given: Answer) -> str:
    if given.state == "stopped":
        return "stopped"
    if given.state == "finished" and given.tokens and len(given.tokens) == given.settings.get("max_new_tokens"):
        return "ended by the longest answer allowed"
    return ""


def _token(token: Token, index: int, turn: int) -> str:
    shown = text(visible(token.text) if token.special or not token.text else token.text)
    special = " ds-special" if token.special else ""
    data = text("\n".join("\t".join(pair) for pair in details(token)))
    place = "" if token.round is None else f' data-round="{token.round}"'
    return (
        f'<span class="ds-token ds-{token.origin}{special}" role="option" aria-selected="false" '
        f'aria-label="{text(visible(token.text))} · {NAMES[token.origin]}" tabindex="{-1 if index else 0}" '
        f'data-token="{turn}-{index}" data-origin="{token.origin}"{place} '
        f'data-details="{data}">{shown}</span>'
    )


def details(token: Token) -> list[tuple[str, str]]:
    """(name, value) pairs of the details card. Short, as a growing answer is sent again and again."""
    pairs = []
    if token.replaced is not None:
        pairs += [
            ("rejected draft", f"“{visible(token.replaced)}”"),
            ("q of that draft", number(token.replaced_q)),
            ("p of that draft", number(token.replaced_p)),
        ]
    elif token.slot is not None:
        pairs.append(("q (draft)", number(token.q)))
    pairs.append(("p (target)", number(token.p)))
    if token.slot is not None:
        pairs += [(f"c_{token.slot}", number(token.c)), (f"a_{token.slot}", number(token.a))]
        pairs.append(("slot k", str(token.slot)))
    if token.round is not None:
        pairs.append(("round", str(token.round + 1)))
    return [*pairs, ("position", str(token.position)), ("token id", str(token.id))]


def legend(tokens: Sequence[Token] = ()) -> str:
    """The colours, and how many tokens have each."""
    items = []
    for origin in ORIGINS:
        if origin == "target" and not any(t.origin == origin for t in tokens):
            continue
        count = f' <b data-count="{origin}">{sum(t.origin == origin for t in tokens)}</b>' if tokens else ""
        example = f'<i class="ds-token ds-{origin}">{NAMES[origin]}</i>'
        items.append(f'<li title="{text(ORIGINS[origin])}" data-origin="{origin}">{example}{count}</li>')
    return f'<ul class="ds-legend" aria-label="What the colours mean">{"".join(items)}</ul>'


# ---- rounds


def rounds(given: Answer, latest: int | None = None) -> str:
    """The rounds of an answer, or its `latest` ones: bars of a_j, the verified cut, what was kept and dropped."""
    if not given.rounds:
        return '<p class="ds-empty">Rounds show here: what the draft proposed, how sure it was, and what was kept.</p>'
    first = 0 if latest is None else max(0, len(given.rounds) - latest)
    articles = [_round(i, given.rounds[i], given) for i in range(first, len(given.rounds))]
    return f'<div class="ds-rounds" tabindex="0" role="region" aria-label="Rounds">{"".join(articles)}</div>'


def slot_state(r: Round, k: int) -> str:
    """What became of draft k (from 0): accepted, rejected, behind (the rejection or the end) or unverified."""
    if k < r.accepted:
        return "accepted"
    if k >= r.verified:
        return "unverified"
    return "rejected" if k == r.accepted and r.next_token is not None else "behind"


def _round(index: int, r: Round, given: Answer) -> str:
    own = next((t for t in reversed(given.tokens) if t.round == index and t.origin in ("correction", "bonus")), None)
    slots = "".join(_slot(r, k, draft) for k, draft in enumerate(given.drafts[index]))
    if own is not None:
        slots += (
            f'<li class="ds-slot ds-own"><div class="ds-bar"><i class="ds-{own.origin}" style="height:100%"></i></div>'
            f'<code title="{NAMES[own.origin]}">{text(visible(own.text))}</code><small>{NAMES[own.origin]}</small></li>'
        )
    summary = f"{r.verified} of {len(r.draft_tokens)} drafts verified, {r.accepted} accepted, +{r.num_committed} in all"
    return (
        f'<article class="ds-round" data-round="{index}" data-verified="{r.verified}" data-accepted="{r.accepted}" '
        f'aria-label="Round {index + 1}: {summary}"><header><b>Round {index + 1}</b> '
        f"<span>{summary}</span> <span>{r.milliseconds:.0f} ms</span></header>"
        f'<ol class="ds-slots" style="--slots:{len(r.draft_tokens) + 1}">{slots}</ol></article>'
    )


def _slot(r: Round, k: int, draft: str) -> str:
    state = slot_state(r, k)
    a, c = r.survival[k] if r.survival else None, r.confidence[k] if r.confidence else None
    height = 100 if a is None else round(100 * a, 1)
    says = f"x_{k + 1} {visible(draft)}: {STATES[state]}, c {number(c)}, a {number(a)}"
    says += f", q {number(r.q[k])}" if r.q else ""
    says += f", p {number(r.p[k])}" if r.p and state in ("accepted", "rejected") else ""
    cut = " ds-cut" if k == r.verified else ""
    unknown = "" if a is not None else " ds-unknown"
    return (
        f'<li class="ds-slot ds-{state}{cut}" title="{text(says)}"><div class="ds-bar{unknown}">'
        f'<i style="height:{height}%"></i></div><code>{text(visible(draft))}</code>'
        f"<small>{number(a, 2)}</small></li>"
    )


STATES = {
    "accepted": "accepted",
    "rejected": "rejected by the target",
    "behind": "verified, but behind the end of the accepted prefix",
    "unverified": "dropped before verification",
}


def round_legend() -> str:
    items = "".join(
        f'<li><i class="ds-swatch ds-{state}"></i>{label}</li>'
        for state, label in (
            ("accepted", "accepted"),
            ("rejected", "rejected"),
            ("behind", "behind a rejection"),
            ("unverified", "not verified"),
            ("cut", "end of what was verified"),
        )
    )
    return (
        '<p class="ds-help">A bar is a<sub>j</sub> = c<sub>1</sub>·…·c<sub>j</sub>, the draft\'s own estimate that '
        "x<sub>1</sub>…x<sub>j</sub> all pass. Drafts behind the dashed line were not sent to the target.</p>"
        f'<ul class="ds-legend">{items}</ul>'
    )


# ---- numbers


def numbers(given: Answer) -> str:
    """The statistics of an answer; `data-stat` names are those of `SpeculationStats`."""
    tiles = [("tokens_per_second", "tokens/s", number(given.tokens_per_second, 1))]
    stats = given.stats
    if stats is None:
        tiles.append(("num_tokens", "tokens", str(len(given.tokens))))
        return _tiles(tiles)
    tiles = [
        *tiles,
        ("mean_acceptance_length", "τ, tokens a round", number(stats.mean_acceptance_length, 2)),
        ("expected_acceptance_length", "expected τ", number(stats.expected_acceptance_length, 2)),
        ("num_tokens", "tokens", str(stats.num_tokens)),
        ("num_rounds", "rounds", str(stats.num_rounds)),
        ("num_drafted", "drafted", str(stats.num_drafted)),
        ("num_verified", "verified", str(stats.num_verified)),
        ("num_accepted", "accepted", str(stats.num_accepted)),
        ("acceptance_rate", "accepted / verified", number(stats.acceptance_rate)),
    ]
    why = f"Path: <b data-stat='path'>{text(stats.path)}</b>{', CUDA graphs' if stats.captured else ''}"
    reason = f" – {text(stats.reason)}" if stats.reason else ""
    return _tiles(tiles) + f'<p class="ds-help">{why}{reason}</p>'


def _tiles(tiles: Sequence[tuple[str, str, str]]) -> str:
    cells = "".join(f'<div><dd data-stat="{name}">{value}</dd><dt>{label}</dt></div>' for name, label, value in tiles)
    return f'<dl class="ds-tiles">{cells}</dl>'


def problem(message: str) -> str:
    return f'<div class="ds-problem" role="alert">{text(message)}</div>' if message else ""


def progress(given: Answer) -> str:
    """One line about an answer that is being written."""
    if given.state == "waiting":
        return "Waiting for the models: another visitor's answer is being written."
    rate = f"{len(given.tokens)} tokens, {number(given.tokens_per_second, 1)} tokens/s"
    if given.rounds:
        rate += f", {len(given.rounds)} rounds"
    return {"running": "Writing: ", "stopped": "Stopped: ", "failed": "Failed: "}.get(given.state, "Finished: ") + rate


def comparison(plain: Answer, drafted: Answer) -> str:
    """The speed of two answers to the same message, and whether they say the same."""
    ratio = drafted.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0
    same = [t.id for t in plain.tokens] == [t.id for t in drafted.tokens]
    if drafted.settings.get("temperature"):
        said = "sampled: two draws from the same distribution"
    else:
        said = "the same text" if same else "the texts differ: near ties of half precision"
    tau = "" if drafted.stats is None else f", τ {number(drafted.stats.mean_acceptance_length, 2)}"
    return (
        f'<div class="ds-result" role="status"><b><span data-stat="speedup">{ratio:.2f}</span>×</b> '
        f"{number(drafted.tokens_per_second, 1)} tokens/s with the draft, "
        f'{number(plain.tokens_per_second, 1)} without{tau}; <span data-stat="same">{said}</span>.</div>'
    )
