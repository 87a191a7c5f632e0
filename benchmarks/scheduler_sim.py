"""How much each way of choosing verify lengths would bring, by the number of concurrent rows.

    python benchmarks/scheduler_sim.py --costs costs.json --traces stats.json --output sim.json --plot sim.png

`--costs` is a file of `CostModel.to_json`. `--traces` is `SpeculationStats.to_dict()` of calls with a confidence head
that verified whole blocks. Without them made-up tables are used, and the output says so: they show how the policies
differ, not how fast anything is.

Every row walks through the rounds of a recorded text. A policy picks ℓ from the round's a_j; the row then commits
1 + min(ℓ, accepted) tokens, and the round costs what the table says. What stays out: with other lengths a text would
have been cut into other rounds.
"""

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from hf_dspark.scheduling.cost_model import CostModel
from hf_dspark.scheduling.scheduler import PrefixScheduler

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)

Survival = list[list[float]]
Policy = Callable[[Survival], list[int] | None]  # [R, γ] -> R lengths; None for a step without drafts


@dataclass(frozen=True)
class Outcome:
    """Of one policy at one number of rows; `drafts_per_row` are verified ones, over all steps."""

    policy: str
    rows: int
    tokens_per_second: float
    tokens_per_step_and_row: float
    drafts_per_row: float
    steps_without_draft: float


# ---- policies


def fixed(length: int) -> Policy:
    return lambda survival: [length] * len(survival)


def threshold(limit: float) -> Policy:
    """Static truncation: stop at the first c_k below `limit`."""

    def lengths(survival: Survival) -> list[int]:
        result = []
        for a in survival:
            before, kept = 1.0, 0
            for value in a:
                if value < limit * before:
                    break
                before, kept = value, kept + 1
            result.append(kept)
        return result

    return lengths


def scheduled(scheduler: PrefixScheduler) -> Policy:
    def lengths(survival: Survival) -> list[int] | None:
        if not scheduler.should_draft():
            return None
        result = scheduler.schedule(survival)
        if scheduler.lagged:
            scheduler.update(survival)
        return result

    return lengths


def policies(costs: CostModel, gamma: int, limit: float, min_gain: float) -> dict[str, Policy]:
    return {
        "plain": lambda survival: None,
        **{f"fixed {length}": fixed(length) for length in range(1, gamma + 1)},
        f"threshold {limit}": threshold(limit),
        "algorithm 1": scheduled(PrefixScheduler(costs, min_gain=min_gain)),
        "lagged": scheduled(PrefixScheduler(costs, lagged=True, min_gain=min_gain)),
    }


# ---- simulation


class Walker:
    """One row: from round to round of a text, then to another text."""

    def __init__(self, texts: list, generator: random.Random):
        self._texts, self._generator = texts, generator
        self._text = generator.choice(texts)
        self._at = generator.randrange(len(self._text))

    def next(self) -> tuple[list[float], int]:
        """a_j [γ], and how many drafts the target would accept."""
        if self._at == len(self._text):
            self._text, self._at = self._generator.choice(self._texts), 0
        self._at += 1
        return self._text[self._at - 1]


def simulate(name: str, policy: Policy, costs: CostModel, texts: list, rows: int, steps: int, seed: int) -> Outcome:
    generator = random.Random(seed)
    walkers = [Walker(texts, generator) for _ in range(rows)]
    tokens, seconds, drafts, without = 0, 0.0, 0, 0
    for _ in range(steps):
        here = [walker.next() for walker in walkers]
        lengths = policy([a for a, _ in here])
        if lengths is None:
            without += 1
            tokens += rows
            seconds += 1 / costs.plain_steps_per_second(rows)
            continue
        tokens += sum(1 + min(length, accepted) for length, (_, accepted) in zip(lengths, here, strict=True))
        seconds += 1 / costs.steps_per_second(rows + sum(lengths), num_rows=rows)
        drafts += sum(lengths)
    per_step = tokens / steps / rows
    return Outcome(name, rows, tokens / seconds, per_step, drafts / steps / rows, without / steps)


# ---- what to simulate with


def read_traces(path: Path) -> list:
    """Texts as lists of (survival, accepted)."""
    texts: dict[tuple[int, int], list] = {}
    for r in json.loads(path.read_text())["rounds"]:
        if r["survival"] is None:
            raise SystemExit(f"{path} has no survivals: its draft has no confidence head.")
        if r["verified"] == len(r["survival"]):  # the length limit shortens the last round of a text
            texts.setdefault((r["call"], r["row"]), []).append((r["survival"], r["accepted"]))
    if not texts:
        raise SystemExit(f"{path} has no rounds that verified a whole block.")
    return list(texts.values())


def synthetic_costs() -> CostModel:
    """Flat while reading the weights dominates, then linear; in steps of graph sizes."""
    verify = {size: 3.6 + 0.0008 * size + 0.022 * max(0, size - 160) for size in GRAPH_SIZES}
    return CostModel(verify, {rows: 0.9 + 0.006 * rows for rows in CONCURRENCY}, {"device": "synthetic"})


def synthetic_traces(gamma: int, texts: int = 40, rounds: int = 120, seed: int = 0) -> list:
    """Texts whose difficulty drifts from round to round; survivals are calibrated."""
    generator = random.Random(seed)
    result = []
    for _ in range(texts):
        level, text = generator.gauss(0.0, 0.7), []
        for _ in range(rounds):
            level += 0.3 * generator.gauss(0, 1) - 0.1 * level
            a, survival = 1.0, []
            for _ in range(gamma):
                a *= min(0.99, max(0.02, 0.72 + 0.18 * level + 0.12 * generator.gauss(0, 1)))
                survival.append(a)
            draw = generator.random()
            text.append((survival, sum(draw < value for value in survival)))
        result.append(text)
    return result


# ---- output


def shown(outcomes: list[Outcome], gamma: int) -> Table:
    """One line for each number of rows; of the fixed lengths the best one and γ."""
    lengths = [f"fixed {length}" for length in range(1, gamma + 1)]
    others = [name for name in dict.fromkeys(o.policy for o in outcomes) if name not in lengths[:-1]]
    view = Table("rows", "best fixed", *others, title="tokens per second (verified drafts per row)")
    for rows in sorted({o.rows for o in outcomes}):
        of = {o.policy: o for o in outcomes if o.rows == rows}
        best = max((of[name] for name in lengths), key=lambda o: o.tokens_per_second)
        cells = (f"{o.tokens_per_second:.0f} ({o.drafts_per_row:.1f})" for o in (best, *(of[n] for n in others)))
        view.add_row(str(rows), *cells)
    return view


def plot(outcomes: list[Outcome], title: str, gamma: int, path: Path) -> None:
    """Throughput and verify budget over concurrency, as in the paper's Figure 8."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    speed, budget = figure.subplots(1, 2)
    for name in dict.fromkeys(o.policy for o in outcomes):
        if name.startswith("fixed") and name != f"fixed {gamma}":
            continue
        of = [o for o in outcomes if o.policy == name]
        rows = [o.rows for o in of]
        speed.plot(rows, [o.tokens_per_second for o in of], marker="o", markersize=3, label=name)
        budget.plot(rows, [1 + o.drafts_per_row for o in of], marker="o", markersize=3, label=name)
    speed.set(yscale="log", xlabel="concurrent rows", ylabel="tokens per second")
    budget.set(xlabel="concurrent rows", ylabel="tokens verified per row", ylim=(0, gamma + 1.5))
    for axes in (speed, budget):
        axes.set_xscale("log", base=2)
        axes.set_xticks(rows, [str(n) for n in rows], minor=False)
    speed.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--costs", type=Path)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--output", type=Path, help="JSON to write")
    parser.add_argument("--plot", type=Path, help="figure to write")
    parser.add_argument("--rows", type=int, nargs="+", default=CONCURRENCY)
    parser.add_argument("--steps", type=int, default=400, help="rounds of each simulation")
    parser.add_argument("--threshold", type=float, default=0.5)
    parser.add_argument("--min-gain", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    costs = CostModel.from_json(arguments.costs) if arguments.costs else synthetic_costs()
    texts = read_traces(arguments.traces) if arguments.traces else synthetic_traces(gamma=7)
    gamma = len(texts[0][0][0])
    sources = {
        "costs": arguments.costs.name if arguments.costs else "synthetic",
        "traces": arguments.traces.name if arguments.traces else "synthetic",
    }
    title = ", ".join(f"{name}: {source}" for name, source in sources.items())
    outcomes = [
        simulate(name, policy, costs, texts, rows, arguments.steps, arguments.seed)
        for rows in track(arguments.rows, description="simulate")
        for name, policy in policies(costs, gamma, arguments.threshold, arguments.min_gain).items()
    ]
    console = Console()
    console.print(title)
    console.print(shown(outcomes, gamma))
    if arguments.output:
        setting = {"steps": arguments.steps, "min_gain": arguments.min_gain, "seed": arguments.seed, "gamma": gamma}
        report = sources | setting | {"environment": costs.environment, "results": [asdict(o) for o in outcomes]}
        arguments.output.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    if arguments.plot:
        plot(outcomes, title, gamma, arguments.plot)


if __name__ == "__main__":
    main()
