"""Hours of calls of every kind on one pair: texts stay right, memory stays flat. Writes a JSON file.

    python benchmarks/soak.py --minutes 60 --json benchmarks/soak.json

Batches and single sequences of random lengths, greedy and sampled, on both paths; sessions that go on for many turns;
calls from two threads; a part of the calls is interrupted. Every fourth greedy text is compared with plain generate().
The pair is a small random target of three layers, two of them with a sliding window, and a draft that knows what often
follows each token. Exit code 1 if a text is wrong or memory grows.
"""

import argparse
import gc
import json
import platform
import random
import sys
import threading
import time
from pathlib import Path

import psutil
import torch
import transformers
from transformers import StoppingCriteriaList
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import checks
import hf_dspark
import tiny

LONGEST = 400
SAMPLES = 60  # of memory, over the whole run
MOST_GROWTH = 0.02  # of memory, from the second quarter of the run to the last


class Soak:
    """One pair under load.

    Attributes:
        counts: calls, tokens, interrupts, comparisons, wrong texts, and calls by path.
        samples: memory now and then.
    """

    def __init__(self, seed: int, device: str):
        self.rng, self.device = random.Random(seed), device
        torch.manual_seed(seed)
        self.target = tiny.random_target("qwen3_sliding", layers=3, max_position_embeddings=1024)
        with torch.no_grad():
            for layer in self.target.model.layers:  # so that the token at hand counts for more than those before it
                layer.self_attn.o_proj.weight.mul_(0.05)
                layer.mlp.down_proj.weight.mul_(0.03)
            table = self.target(torch.arange(tiny.V)[:, None]).logits[:, -1]
        self.target.to(device)
        self.draft = tiny.load_draft(*tiny.guided_files(4 * table, taps=(0, 1))).to(device)
        self.sessions = [hf_dspark.Session(self.target, self.draft) for _ in range(4)]
        self.texts: list[torch.Tensor | None] = [None] * len(self.sessions)
        self.counts = dict.fromkeys(("calls", "tokens", "interrupts", "compared", "wrong", "reused"), 0)
        self.paths: dict[str, int] = {}
        self.accepted = self.rounds = 0
        self.samples: list[dict] = []

    def ids(self, rows: int, longest: int) -> dict[str, torch.Tensor]:
        """Left-padded random rows and their mask."""
        lengths = [self.rng.randint(1, longest) for _ in range(rows)]
        width = max(lengths)
        ids = torch.tensor([[self.rng.randrange(1, 62) for _ in range(width)] for _ in lengths], device=self.device)
        mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths], device=self.device)
        return {"input_ids": ids * mask, "attention_mask": mask}

    def call(self) -> None:
        kind = self.rng.choice(["single", "batch", "batch", "session", "threads"])
        if kind == "threads":
            threads = [threading.Thread(target=self.one, args=(self.rng.choice([1, 3]),)) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        elif kind == "session":
            self.turn()
        else:
            self.one(1 if kind == "single" else self.rng.randint(2, 6))

    def options(self) -> dict:
        options = {"max_new_tokens": self.rng.randint(1, 60), "do_sample": self.rng.random() < 0.3, "pad_token_id": 0}
        if self.rng.random() < 0.3:
            options["eos_token_id"] = [self.rng.randrange(1, 62) for _ in range(2)]
        if self.rng.random() < 0.2:
            options["repetition_penalty"] = 1.2
        return options

    def one(self, rows: int) -> None:
        inputs, options = self.ids(rows, 120), self.options()
        static = {"cache_implementation": "static"} if rows == 1 and self.rng.random() < 0.5 else {}
        self.run(lambda **more: self.target.generate(**inputs, assistant_model=self.draft, **options, **static, **more),
                 lambda: self.target.generate(**inputs, **options), inputs, options)  # fmt: skip

    def turn(self) -> None:
        i = self.rng.randrange(len(self.sessions))
        session, text, options = self.sessions[i], self.texts[i], self.options()
        if text is None or text.shape[1] > LONGEST:
            text = self.ids(1, 30)["input_ids"]
        elif self.rng.random() < 0.3:
            text = text[:, : self.rng.randint(1, text.shape[1])]
        inputs = {"input_ids": torch.cat((text, self.ids(1, 9)["input_ids"]), dim=1)}
        # All real tokens: a zero would be taken for padding.
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        static = {"cache_implementation": "static"} if i % 2 else {}
        found = self.run(lambda **more: session.generate(**inputs, **options, **static, **more),
                         lambda: self.target.generate(**inputs, **options), inputs, options)  # fmt: skip
        self.texts[i] = found

    def run(self, generate, plain, inputs: dict, options: dict) -> torch.Tensor | None:
        """A call, interrupted or not; the text if there is one."""
        interrupts = self.rng.random() < 0.2
        criteria = (
            StoppingCriteriaList([checks.Interrupt(self.rng.randint(0, 30))]) if interrupts else StoppingCriteriaList()
        )
        found = None
        with hf_dspark.record() as stats:
            try:
                found = generate(stopping_criteria=criteria)
            except KeyboardInterrupt:
                self.counts["interrupts"] += 1
        self.counts["calls"] += 1
        self.counts["tokens"] += stats.num_tokens
        self.counts["reused"] += stats.num_reused
        self.accepted, self.rounds = self.accepted + stats.num_accepted, self.rounds + stats.num_rounds
        self.paths[stats.path] = self.paths.get(stats.path, 0) + 1
        if found is not None and not options["do_sample"] and self.rng.random() < 0.25:
            self.counts["compared"] += 1
            if not torch.equal(found, plain()):
                self.counts["wrong"] += 1
                print(f"wrong text after {self.counts['calls']} calls: {options}, {inputs['input_ids'].tolist()}")
        return found

    def sample(self, seconds: float) -> None:
        gc.collect()
        tensors = sum(1 for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter))
        memory = {"rss_mb": psutil.Process().memory_info().rss / 2**20, "tensors": tensors}
        if self.device == "cuda":
            memory["device_mb"] = torch.cuda.memory_allocated() / 2**20
        now = {"seconds": round(seconds), "calls": self.counts["calls"]}
        self.samples.append(now | {name: round(value, 1) for name, value in memory.items()})


def growth(samples: list[dict], name: str) -> float:
    """Relative growth of the mean from the second quarter of the run to the last."""
    quarter = max(1, len(samples) // 4)
    mean = lambda part: sum(sample[name] for sample in part) / len(part)  # noqa: E731
    return mean(samples[-quarter:]) / mean(samples[quarter : 2 * quarter] or samples) - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("soak.json"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logging.set_verbosity_error()
    soak, started, seconds = Soak(arguments.seed, device), time.monotonic(), 60 * arguments.minutes
    progress = logging.tqdm(total=round(seconds), unit="s", desc="soak")
    while (now := time.monotonic() - started) < seconds:
        soak.call()
        progress.update(min(round(seconds), round(now)) - progress.n)
        if now >= len(soak.samples) * seconds / SAMPLES:
            soak.sample(now)
    progress.close()
    soak.sample(seconds)
    measured = [name for name in soak.samples[0] if name not in ("seconds", "calls")]
    result = {
        "environment": {
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "hf_dspark": hf_dspark.__version__, "transformers": transformers.__version__, "torch": torch.__version__,
            "python": platform.python_version(), "seed": arguments.seed,
        },
        "minutes": arguments.minutes, **soak.counts, "paths": soak.paths,
        "mean_accepted": soak.accepted / max(soak.rounds, 1),
        "growth": {name: round(growth(soak.samples, name), 4) for name in measured}, "samples": soak.samples,
    }  # fmt: skip
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    summary = {name: value for name, value in result.items() if name not in ("samples", "environment")}
    print(json.dumps(summary))
    memory = [value for name, value in result["growth"].items() if name.endswith("_mb")]
    return int(soak.counts["wrong"] > 0 or max(memory) > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
