"""An answer and its rounds as one self-contained SVG picture, which the browser turns into a PNG. Pure functions."""

from collections.abc import Iterator, Sequence

from .html import NAMES, number, slot_state, text, visible
from .trace import Answer, Token

WIDTH, MARGIN = 1200, 48
CHARACTER, LINE = 10.8, 30  # of the monospaced text at 18 px
COLUMNS, CELL, BAR = 3, 128, 60  # rounds beside each other; height of one, and of its bars
MAX_ROUNDS = 60
FONT = "DejaVu Sans Mono, Menlo, Consolas, monospace"

LIGHT = {
    "page": "#ffffff", "ink": "#1f2430", "faint": "#5b6472", "first": "#e6dcff", "accepted": "#cdf0d6",
    "correction": "#ffdcc6", "bonus": "#d2e6ff", "target": "#e9ecf1", "kept": "#23924d", "rejected": "#d9571c",
    "behind": "#9aa4b4", "unverified": "#cdd3dd", "own": "#2470cf",
}  # fmt: skip
DARK = {
    "page": "#14171f", "ink": "#e8eaf0", "faint": "#a5aebd", "first": "#43337a", "accepted": "#1c4f32",
    "correction": "#6b371b", "bonus": "#1d4472", "target": "#2d3441", "kept": "#4cc47e", "rejected": "#ff8b52",
    "behind": "#6b7689", "unverified": "#3d4555", "own": "#64a8ff",
}  # fmt: skip


class Poster:
    """SVG parts from top to bottom; `y` is where the next one goes."""

    def __init__(self, colours: dict[str, str]):
        self.colours = colours
        self.parts: list[str] = []
        self.y = float(MARGIN)

    def write(self, words: str, x: float = MARGIN, size: int = 18, colour: str = "ink", more: str = "") -> None:
        fill = self.colours[colour]
        self.parts.append(
            f'<text x="{x:.1f}" y="{self.y:.1f}" font-size="{size}" fill="{fill}" xml:space="preserve" {more}>'
            f"{text(words)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" '
            f'fill="{self.colours[colour]}"/>'
        )

    def tokens(self, tokens: Sequence[Token]) -> None:
        for line in wrapped(tokens, int((WIDTH - 2 * MARGIN) / CHARACTER)):
            x = float(MARGIN)
            for piece, origin in line:
                self.box(x, self.y - 20, len(piece) * CHARACTER, LINE - 3, origin)
                self.write(piece, x, more=f'textLength="{len(piece) * CHARACTER:.1f}"')
                x += len(piece) * CHARACTER
            self.y += LINE

    def legend(self, tokens: Sequence[Token]) -> None:
        x = float(MARGIN)
        for origin in dict.fromkeys(token.origin for token in tokens):
            label = f"{NAMES[origin]} {sum(t.origin == origin for t in tokens)}"
            self.box(x, self.y - 13, 16, 16, origin)
            self.write(label, x + 22, 14, "faint")
            x += 40 + len(label) * 8.6
        self.y += LINE + 8

    def round(self, answer: Answer, index: int, x: float) -> None:
        """Bars of a_j in a cell whose upper edge is `y`."""
        r, top = answer.rounds[index], self.y
        width = (WIDTH - 2 * MARGIN) / COLUMNS - 24
        self.write(f"{index + 1}: {r.accepted} of {r.verified} kept", x, 13, "faint")
        step = width / (len(r.draft_tokens) + 1)
        for k, draft in enumerate(answer.drafts[index]):
            state = slot_state(r, k)
            height = BAR * (r.survival[k] if r.survival else 1)
            colour = "kept" if state == "accepted" else state
            self.box(x + k * step, top + 12 + BAR - height, step - 4, max(height, 1), colour)
            self._under(draft, x + k * step, step, top)
        if r.verified < len(r.draft_tokens):
            at = x + r.verified * step - 2
            self.parts.append(
                f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top + 8}" y2="{top + BAR + 30}" stroke-width="1.5" '
                f'stroke="{self.colours["ink"]}" stroke-dasharray="4 3"/>'
            )
        own = [t for t in answer.tokens if t.round == index and t.origin in ("correction", "bonus")]
        if own:
            left = x + len(r.draft_tokens) * step
            self.box(left, top + 12, step - 4, BAR, own[0].origin)
            self._under(own[0].text, left, step, top)

    def _under(self, piece: str, x: float, step: float, top: float) -> None:
        self.y = top + BAR + 27
        self.write(visible(piece)[: int(step / 7)], x, 11)
        self.y = top

    def svg(self) -> str:
        height = self.y + MARGIN
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
            f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="{FONT}">'
            f'<rect width="100%" height="100%" fill="{self.colours["page"]}"/>{"".join(self.parts)}</svg>'
        )


def wrapped(tokens: Sequence[Token], columns: int) -> Iterator[list[tuple[str, str]]]:
    """Lines of (text, origin) of at most `columns` characters; a token may go over an edge."""
    line: list[tuple[str, str]] = []
    room = columns
    for token in tokens:
        pieces = [visible(token.text)] if token.special else token.text.split("\n")
        for i, piece in enumerate(pieces):
            if i:
                yield line
                line, room = [], columns
            while piece:
                if len(piece) > room and len(piece) <= columns and room < columns:
                    yield line
                    line, room = [], columns
                    piece = piece.lstrip(" ") or piece
                line.append((piece[:room], token.origin))
                piece, room = piece[room:], room - len(piece[:room])
                if room <= 0:
                    yield line
                    line, room = [], columns
    if line:
        yield line


def poster(answer: Answer, *, dark: bool = False) -> str:
    """The picture: question, coloured tokens, numbers and, up to `MAX_ROUNDS`, the rounds."""
    page = Poster(DARK if dark else LIGHT)
    page.y += 6
    for line in wrapped([Token(0, answer.prompt, False, "target", 0)], int((WIDTH - 2 * MARGIN) / 12.2)):
        page.write("".join(piece for piece, _ in line), size=20, more='font-weight="bold"')
        page.y += LINE
    page.y += 10
    page.tokens(answer.tokens)
    page.y += 8
    page.legend(answer.tokens)
    page.write(summary(answer), size=15, colour="faint")
    page.y += LINE + 12
    for index in range(min(len(answer.rounds), MAX_ROUNDS)):
        column = index % COLUMNS
        page.round(answer, index, MARGIN + column * (WIDTH - 2 * MARGIN) / COLUMNS)
        if column == COLUMNS - 1 or index == min(len(answer.rounds), MAX_ROUNDS) - 1:
            page.y += CELL
    if len(answer.rounds) > MAX_ROUNDS:
        page.write(f"… and {len(answer.rounds) - MAX_ROUNDS} more rounds", size=14, colour="faint")
    return page.svg()


def summary(answer: Answer) -> str:
    words = f"{len(answer.tokens)} tokens, {number(answer.tokens_per_second, 1)} tokens/s"
    if answer.stats is not None and answer.stats.rounds:
        words += f", τ {number(answer.stats.mean_acceptance_length, 2)} over {answer.stats.num_rounds} rounds"
    return words
