"""Times of the fast path at the shapes of Qwen3 4B, 8B and 14B (random weights, bfloat16), and of the embedded pair.

    python benchmarks/h200.py --shape 8b --json benchmarks/h200_8b.json

Every table compares, in one run: HF generate eager, HF generate with static cache and its own compilation, our plain
path, our ragged path, and the floor that reading each byte once sets.
"""

import argparse
import hashlib
import json
import platform
import statistics
import time
from functools import partial
from pathlib import Path

import torch
import transformers
from h200_pairs import SHAPES, draft_of, scripted, target_of

import hf_dspark
from hf_dspark.evaluation.floor import byte_floor, copy_bandwidth
from hf_dspark.generation.engines import engine_of
from hf_dspark.generation.graphs import Graphs
from hf_dspark.generation.layout import bucket, plan_verify
from hf_dspark.generation.rounds import RoundOptions
from hf_dspark.generation.warpers import Warpers

ROUNDS = 25


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median(function, repeats: int) -> float:
    """Milliseconds of `function` from call to return, median."""
    times = []
    for _ in range(repeats):
        synchronize()
        started = time.perf_counter()
        function()
        synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def floor(target, draft, batch: int, context: int, speed: float) -> dict[str, float]:
    """Milliseconds that the bytes of a round take at `speed` (bytes/s), by item and in all."""
    parts = {
        name: 1e3 * size / speed for name, size in byte_floor(target, draft, num_rows=batch, context=context).items()
    }
    return parts | {"round": sum(parts.values())}


class Ragged:
    """The ragged path of a pair, round by round."""

    def __init__(
        self, target, draft, batch: int, context: int, warpers: Warpers | None = None, count: int | None = None
    ):
        self.engine = engine_of(target, draft)
        self.rounds = self.engine.rounds(bucket(batch))
        self.width = self.rounds.num_rows
        self.options = RoundOptions(self.rounds.gamma, False, warpers is not None, False)
        if warpers is not None:
            self.rounds.warpers.set(warpers)
        self.engine.reserve(self.width, context + 8 * (ROUNDS + 40), keep=False)
        prompts = torch.randint(1, 500, (batch, context)).tolist()
        self.engine.prefill(prompts, self.width)
        self.graphs = self.engine.graphs(self.rounds)
        self.restart(batch, context)

    def restart(self, batch: int, context: int) -> None:
        self.rounds.ends.zero_()
        self.rounds.anchors.fill_(1)
        self.rounds.lengths[:batch] = context
        self.rounds.ends[:batch] = 2**40

    def run(self) -> None:
        self.rounds.run(self.graphs, self.width, self.options)

    def stages(self, static: bool = True) -> dict[str, float]:
        """Milliseconds of each stage of a round, recorded in a graph of its own."""
        rounds, engine = self.rounds, self.engine
        graphs = Graphs(engine._idle, engine._recording)
        graphs.enabled = self.graphs.enabled
        run = partial(graphs.run, static=static)
        recorded, size = graphs.enabled, self.width * (self.options.count + 1)
        lanes, backbone = run("backbone", lambda: rounds.draft(self.width, recorded, raw=True))
        drafts, q = run("walk", lambda: rounds.walk(lanes, backbone, self.options))

        def decide():
            logits = rounds._proposer.confidence_logits(backbone, lanes.anchors, drafts)
            decision = logits, rounds.temperatures, rounds.threshold, self.options.count, False
            return rounds._do(plan_verify, recorded)(lanes, rounds.lengths, drafts, size, False, *decision)

        _, lengths, at = run("confidence", decide)
        verified = run("verify", lambda: rounds.verify(at))
        accepted, own = run("accept", lambda: rounds.accept(verified, drafts, q, lengths, self.options))
        run("context", lambda: rounds.commit(lanes, verified, accepted + 1, own, recorded))
        times = {}
        for name in ("backbone", "walk", "confidence", "verify", "accept", "context"):
            replay = (lambda name=name: graphs._recorded[name][0].replay()) if recorded else (lambda: None)
            times[name] = median(lambda replay=replay: [replay() for _ in range(10)], 5) / 10
        return times


def launches(function) -> int:
    """CUDA kernels and copies of one call."""
    if not torch.cuda.is_available():
        return 0
    from torch.profiler import ProfilerActivity, profile

    function()
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function()
        synchronize()
    return sum(event.device_type.name == "CUDA" for event in profiler.events())


def measure_rounds(target, draft, batch: int, context: int, speed: float, detailed: bool) -> list[dict]:
    rows = []
    for name, warpers in (("greedy", None), ("T=1 top-p 0.95", Warpers(top_p=0.95))):
        ragged = Ragged(target, draft, batch, context, warpers)
        started = time.perf_counter()
        ragged.run()
        first = time.perf_counter() - started
        row = {
            "batch": batch, "context": context, "decoding": name, "first_round_s": first,
            "round_ms": median(ragged.run, ROUNDS), "floor_ms": floor(target, draft, batch, context, speed)["round"],
            "captured": ragged.graphs.enabled,
        }  # fmt: skip
        if detailed:
            row["stages_ms"] = ragged.stages()
        rows.append(row)
        print(row, flush=True)
    return rows


def count_launches(target, draft, rows: list[dict]) -> None:
    """Add the launches of a round to the rows in detail. Last of all: every replay is slower once a profiler ran."""
    for row in rows:
        if "stages_ms" in row:
            warpers = None if row["decoding"] == "greedy" else Warpers(top_p=0.95)
            row["launches"] = launches(Ragged(target, draft, row["batch"], row["context"], warpers).run)


def measure_generate(target, draft, prompt: torch.Tensor, new: int, compiled: bool, taus: list[float]) -> dict:
    """Whole calls on one prompt: tokens per second with the prefill, after one call that warms up."""

    def tokens_per_second(**options) -> tuple[float, float, str]:
        options = {"max_new_tokens": new, "do_sample": False} | options
        started = time.perf_counter()
        output = target.generate(prompt, **options)
        synchronize()
        first = time.perf_counter() - started
        seconds = 1e-3 * median(lambda: target.generate(prompt, **options), 3)
        digest = hashlib.sha256(str(output.tolist()).encode()).hexdigest()[:12]
        return round(output.shape[1] - prompt.shape[1]) / seconds, first, digest

    rows = {"HF eager": tokens_per_second(max_new_tokens=min(new, 64))}
    with hf_dspark.record() as stats:
        target.generate(prompt, assistant_model=draft, do_sample=False, max_new_tokens=24)
    plain_round = statistics.median(r.milliseconds for r in stats.rounds)
    hf_dspark.release(target)  # rounds must be recorded anew, with the script
    with scripted(str(prompt.device)) as set_tau:
        for tau in taus:
            set_tau(tau)
            with hf_dspark.record() as stats:
                given = {"assistant_model": draft, "cache_implementation": "static"}
                row = (*tokens_per_second(**given), stats.mean_acceptance_length)
            rows[f"ragged path, scripted τ {tau}"] = row
            print(tau, row, flush=True)
    hf_dspark.release(target)
    if compiled:
        rows["HF static compiled"] = tokens_per_second(cache_implementation="static")
    calls = {
        name: {"tokens_per_second": speed, "first_call_s": first, "output": digest, "tau": tau[0] if tau else 1.0}
        for name, (speed, first, digest, *tau) in rows.items()
    }
    return {"prompt": prompt.shape[1], "new_tokens": new, "calls": calls, "plain_path_round_ms": plain_round}


def measure_gammas(target, shape, context: int, device: str, dtype):
    """Share of the Markov walk for blocks of 4, 8 and 16; layers in their dynamic form, which compiles once."""
    for gamma in (4, 8, 16):
        draft = draft_of(shape, device, dtype, gamma).attach_target(target)
        ragged = Ragged(target, draft, 1, context)
        stages = ragged.stages(static=False)
        row = {"gamma": gamma, "stages_ms": stages, "walk_share": stages["walk"] / sum(stages.values())}
        print(row, flush=True)
        yield row
        hf_dspark.release(target)


def environment() -> dict:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_dspark": hf_dspark.__version__,
    }
    return {"device": gpu, "cuda": torch.version.cuda, "seed": 0, **versions}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--settings", default="1x1024", help="batch x context, comma separated; the first in detail")
    parser.add_argument("--taus", default="", help="scripted acceptance lengths, comma separated")
    parser.add_argument("--no-compile", action="store_true", help="leave HF's static compiled row out")
    parser.add_argument("--gammas", action="store_true")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype, shape = torch.bfloat16 if device == "cuda" else torch.float32, SHAPES[arguments.shape]
    torch.manual_seed(0)
    speed = copy_bandwidth(torch.device(device))
    target = target_of(shape, device, dtype)
    draft = draft_of(shape, device, dtype).attach_target(target)
    settings = [tuple(map(int, setting.split("x"))) for setting in arguments.settings.split(",")]
    result = {"environment": environment(), "shape": arguments.shape, "bandwidth": speed, "rounds": []}
    result["floor_ms"] = floor(target, draft, *settings[0], speed)

    def save() -> None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")

    with torch.no_grad():
        for batch, context in settings:
            detailed = batch in (1, 8, 32) and context == settings[0][1]
            result["rounds"] += measure_rounds(target, draft, batch, context, speed, detailed)
            save()
        result["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
        hf_dspark.release(target)
        if arguments.taus:
            taus = [float(tau) for tau in arguments.taus.split(",")]
            prompt = torch.randint(1, 500, (1, settings[0][1]), device=device)
            compiled = device == "cuda" and not arguments.no_compile
            result["generate"] = measure_generate(target, draft, prompt, arguments.new_tokens, compiled, taus)
            save()
        if arguments.gammas:
            result["gammas"] = []
            for row in measure_gammas(target, shape, settings[0][1], device, dtype):
                result["gammas"].append(row)
                save()
        count_launches(target, draft, result["rounds"])
    save()


if __name__ == "__main__":
    main()
