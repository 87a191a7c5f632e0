"""`CostModel`: what a round costs on this machine, measured (paper, SPS profile).

A round is one draft for R rows, one target forward over B tokens, and what the host does until it starts the next one:
a good part of it where the target is small. The costs are tables of medians, made monotone. Captured graphs run at
fixed sizes, so between two measured sizes the cost is that of the larger one: a staircase.
"""

import bisect
import json
import math
import platform
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import transformers
from transformers.utils import logging

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPEATS = 5


class StepTimer(Protocol):
    """Runs the pieces of a round on the real engine, with dummy tokens and warmed up; milliseconds of one run."""

    def verify(self, num_tokens: int) -> float:
        """One target forward over `num_tokens` tokens on the flat axis."""
        ...

    def draft(self, num_rows: int) -> float:
        """Everything a round does for its drafts: context, backbone and walk for `num_rows` rows."""
        ...


class CostModel:
    """Costs of a round by its sizes.

    Inside the measured range a cost is that of the next larger measured size; above it the last slope goes on (from
    the origin, where only one size was measured).

    Args:
        verify_ms: tokens of a target forward -> milliseconds.
        draft_ms: rows -> milliseconds of a draft; empty for drafts that cost nothing.
        environment: where it was measured; kept in the file, never read.
        host_ms: rows -> milliseconds between two rounds, with or without drafts; empty for none.

    Attributes:
        verify_ms, draft_ms, host_ms: the tables in rising order, after a running minimum from the largest size down:
            a size that takes longer than a larger one is not worth choosing.

    Raises:
        ValueError: an empty verify table, sizes below 1 or times that are not above 0.
    """

    def __init__(
        self,
        verify_ms: Mapping[int, float],
        draft_ms: Mapping[int, float] | None = None,
        environment: dict[str, Any] | None = None,
        host_ms: Mapping[int, float] | None = None,
    ):
        if not verify_ms:
            raise ValueError("`verify_ms` is empty. Measure at least one number of tokens.")
        self.verify_ms = _monotone("verify_ms", verify_ms)
        self.draft_ms = _monotone("draft_ms", draft_ms or {})
        self.host_ms = _monotone("host_ms", host_ms or {})
        self.environment = dict(environment or {})
        # Looked up for every number of tokens of a batch.
        self._verify = list(self.verify_ms), list(self.verify_ms.values())
        self._draft = list(self.draft_ms), list(self.draft_ms.values())
        self._host = list(self.host_ms), list(self.host_ms.values())

    # ---- asking

    def steps_per_second(self, batch_tokens: int, num_rows: int | None = None) -> float:
        """SPS(B): rounds a second that verify B = Σ (1 + ℓ_r) tokens, with the draft and the host for `num_rows` rows.

        Without `num_rows` these two count as at the smallest measured number of rows.

        Raises:
            ValueError: a size below 1.
        """
        return 1000 / (_cost("batch_tokens", self._verify, batch_tokens) + self._of_rows(num_rows))

    def speeds(self, batch_tokens: range, num_rows: int) -> np.ndarray:
        """`steps_per_second` of many B, float64; a scheduler wants them all whenever the number of rows changes."""
        sizes, times = self._verify
        wanted = np.asarray(batch_tokens)
        at = np.searchsorted(sizes, wanted)
        milliseconds = np.asarray(times)[np.minimum(at, len(sizes) - 1)]
        for i in np.nonzero(at == len(sizes))[0]:  # above the table
            milliseconds[i] = _cost("batch_tokens", self._verify, int(wanted[i]))
        return 1000 / (milliseconds + self._of_rows(num_rows))

    def _of_rows(self, num_rows: int | None) -> float:
        """Milliseconds of a round that depend on its rows alone."""
        curves = [curve for curve in (self._draft, self._host) if curve[0]]
        return sum(
            times[0] if num_rows is None else _cost("num_rows", (sizes, times), num_rows) for sizes, times in curves
        )

    def plain_steps_per_second(self, num_rows: int) -> float:
        """Steps a second without any draft: one token for each row.

        Raises:
            ValueError: a size below 1.
        """
        host = _cost("num_rows", self._host, num_rows) if self.host_ms else 0.0
        return 1000 / (_cost("num_rows", self._verify, num_rows) + host)

    # ---- measuring

    @classmethod
    def profile(cls, target: Any, draft: Any, *, batch_sizes: Iterable[int], context_length: int) -> "CostModel":
        """Measure the engine that generate() uses for this pair.

        Args:
            target, draft: the pair, on the device and in the dtype it will run in.
            batch_sizes: numbers of rows R; for each, verify costs of R, 2R, … (1+γ)R tokens, the draft's cost, and the
                host's time between the rounds of a short generate().
            context_length: tokens in the caches of each row while it is measured.

        Raises:
            ValueError: sizes below 1, or a pair without a fast path.
        """
        rows = sorted(set(batch_sizes))
        if not rows or rows[0] < 1 or context_length < 1:
            raise ValueError(
                f"`batch_sizes` {rows} and `context_length` {context_length} must be at least 1. "
                "Give the numbers of rows that generate() will be called with."
            )
        tokens = [count * size for count in rows for size in range(1, draft.config.num_draft_tokens + 2)]
        from ..generation.timing import EngineTimer, time_host  # generation knows this room
        from ..generation.warmup import idle_engine

        environment = describe(target, draft, context_length=context_length)
        with idle_engine(target, draft) as engine:
            timer = EngineTimer(engine, rows[-1], context_length)
            costs = cls.measure(timer, token_counts=tokens, row_counts=rows, environment=environment)
        host = {count: time_host(engine, target, draft, count) for count in rows}
        return costs.with_host({count: milliseconds for count, milliseconds in host.items() if milliseconds})

    @classmethod
    def measure(
        cls,
        timer: StepTimer,
        *,
        token_counts: Iterable[int],
        row_counts: Iterable[int],
        repeats: int = REPEATS,
        environment: dict[str, Any] | None = None,
    ) -> "CostModel":
        """Fill the tables with medians of `repeats` runs of each size.

        Sizes take turns, so that a change of the machine's load meets all of them.

        Raises:
            ValueError: no sizes, or fewer than one repeat.
        """
        tokens, rows = sorted(set(token_counts)), sorted(set(row_counts))
        if not tokens or not rows or repeats < 1:
            raise ValueError(
                f"Nothing to measure: token counts {tokens}, row counts {rows}, {repeats} repeats. Give one of each."
            )
        verify: dict[int, list[float]] = {count: [] for count in tokens}
        draft: dict[int, list[float]] = {count: [] for count in rows}
        for _ in logging.tqdm(range(repeats), desc="profile"):
            for count, times in verify.items():
                times.append(timer.verify(count))
            for count, times in draft.items():
                times.append(timer.draft(count))
        return cls(
            {count: statistics.median(times) for count, times in verify.items()},
            {count: statistics.median(times) for count, times in draft.items()},
            environment,
        )

    def with_host(self, host_ms: Mapping[int, float]) -> "CostModel":
        """The same costs with another `host_ms`."""
        return CostModel(self.verify_ms, self.draft_ms, self.environment, host_ms)

    # ---- files and plot

    @classmethod
    def from_json(cls, path: str | Path) -> "CostModel":
        """Read what `to_json` wrote.

        Raises:
            ValueError: the file holds something else.
            OSError: it cannot be read.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            verify, draft = ({int(n): float(ms) for n, ms in data[k].items()} for k in ("verify_ms", "draft_ms"))
            host = {int(n): float(ms) for n, ms in data.get("host_ms", {}).items()}
            environment = data.get("environment")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is not a cost table (`verify_ms`, `draft_ms`): {error!r}.") from error
        return cls(verify, draft, environment, host)

    def to_json(self, path: str | Path) -> None:
        """Write `{"verify_ms": {tokens: ms}, "draft_ms": {rows: ms}, "host_ms": {rows: ms}, "environment": {...}}`."""
        names = ("verify_ms", "draft_ms", "host_ms", "environment")
        data = {name: getattr(self, name) for name in names}
        Path(path).write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def plot(self, path: str | Path | None = None) -> "Figure":
        """Draw the costs over their sizes; `path` also writes the figure (png, svg, pdf). Needs the extra `eval`.

        Raises:
            ImportError: matplotlib is missing.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError('Plots need matplotlib: pip install "hf-dspark[eval]".') from error
        figure = Figure(figsize=(12, 4), layout="constrained")
        panels = (
            (self._verify, "tokens verified, B", "target forward"),
            (self._draft, "rows, R", "draft"),
            (self._host, "rows, R", "host between rounds"),
        )
        for axes, ((sizes, times), label, title) in zip(figure.subplots(1, len(panels)), panels, strict=True):
            # A step before each size: what lies between two sizes costs what the larger does.
            axes.step(sizes, times, where="pre", marker="o", markersize=3)
            axes.set(xlabel=label, ylabel="milliseconds", title=title, ylim=(0, None))
        figure.suptitle(", ".join(str(self.environment[k]) for k in ("device", "target") if k in self.environment))
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


def describe(target: Any, draft: Any, *, context_length: int) -> dict[str, Any]:
    """The environment of a profile: device, versions, and the shapes the times depend on."""
    device = target.device
    text = target.config.get_text_config(decoder=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {platform.machine()}"
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "versions": {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "target": type(target).__name__,
        "dtype": str(target.dtype).removeprefix("torch."),
        "target_layers": text.num_hidden_layers,
        "target_width": text.hidden_size,
        "vocabulary": text.vocab_size,
        "draft_layers": draft.config.num_hidden_layers,
        "draft_width": draft.config.hidden_size,
        "gamma": draft.config.num_draft_tokens,
        "context_length": context_length,
    }


def _monotone(name: str, table: Mapping[int, float]) -> dict[int, float]:
    """In rising order of size, each cost at most that of every larger size."""
    result: dict[int, float] = {}
    lowest = math.inf
    for size in sorted(table, reverse=True):
        milliseconds = float(table[size])
        if size < 1 or not 0 < milliseconds < math.inf:
            raise ValueError(f"`{name}` must map sizes from 1 to times above 0, got {size}: {milliseconds}.")
        lowest = min(lowest, milliseconds)
        result[int(size)] = lowest
    return dict(reversed(result.items()))


def _cost(name: str, curve: tuple[list[int], list[float]], size: int) -> float:
    if size < 1:
        raise ValueError(f"`{name}` must be at least 1, got {size}.")
    sizes, times = curve
    at = bisect.bisect_left(sizes, size)
    if at < len(sizes):
        return times[at]
    if len(sizes) == 1:
        return times[0] * size / sizes[0]
    slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
    return times[-1] + slope * (size - sizes[-1])
