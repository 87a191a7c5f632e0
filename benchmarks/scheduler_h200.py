"""Fixed numbers of drafts against `draft.scheduler = "auto"` on the fast path, by batch size; greedy, bfloat16.

    python benchmarks/scheduler_h200.py --pair smollm2 --prompts FOLDER --json benchmarks/scheduler_h200_smollm2.json
    python benchmarks/scheduler_h200.py --pair 8b --json benchmarks/scheduler_h200_8b.json

smollm2: the embedded pair on real prompts (FOLDER as for cpu_smollm2.py). 8b: Qwen3-8B's shape with random weights,
whose confidence and acceptance a script draws: c_k of a round from one of four levels, then each draft is accepted with
probability c_k, so the confidence is calibrated and rows differ as texts do. All answers have the same number of
tokens; methods take turns, each in every place of the order equally often.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from cpu_smollm2 import SETS, read_prompts
from h200 import environment, synchronize
from h200_pairs import SHAPES, draft_of, target_of

import hf_dspark
from hf_dspark.generation.engines import engine_of
from hf_dspark.generation.layout import bucket
from hf_dspark.generation.rounds import Rounds
from hf_dspark.proposal import Proposer

LEVELS = (0.95, 0.8, 0.6, 0.35)
TURNS = 256


@contextmanager
def scripted_confidence(gamma: int, device: str) -> Iterator[Callable[[], object]]:
    """Rounds inside have drawn confidence, and accept each draft with that probability; yields what starts anew."""
    generator = torch.Generator().manual_seed(0)
    levels = torch.tensor(LEVELS)[torch.randint(len(LEVELS), (TURNS, 64, 1), generator=generator)]
    c = (levels + 0.1 * (torch.rand(TURNS, 64, gamma, generator=generator) - 0.5)).clamp(0.02, 0.98)
    accepted = torch.rand(c.shape, generator=generator) < c
    counts = accepted.long().cumprod(-1).sum(-1).to(device)
    logits, turn = torch.logit(c).to(device), torch.zeros(1, dtype=torch.long, device=device)
    accept, confidence_logits = Rounds.accept, Proposer.confidence_logits

    def draw_confidence(self, backbone, anchors, drafts):
        return logits[turn % TURNS, : len(drafts)][0] + 0 * confidence_logits(self, backbone, anchors, drafts)

    def draw_accepted(self, verified, drafts, q, lengths, options):
        own = accept(self, verified, drafts, q, lengths, options)[1]
        count = torch.minimum(counts[turn % TURNS, : len(drafts)][0], lengths.clamp(min=0).long())
        turn.add_(1)
        return count, own

    Rounds.accept, Proposer.confidence_logits = draw_accepted, draw_confidence
    try:
        yield turn.zero_
    finally:
        Rounds.accept, Proposer.confidence_logits = accept, confidence_logits


def measure(target, draft, inputs: dict, lengths: list[int], new: int, repeats: int, restart=lambda: None) -> dict:
    """Of every call of each method: seconds, those in rounds, τ and drafts verified a row and round."""
    methods = [(f"fixed {n}", n, None) for n in lengths] + [("auto", None, "auto")]
    rows: dict[str, dict[str, list[float]]] = {name: {} for name, *_ in methods}
    order = random.Random(len(inputs["input_ids"]))
    for repeat in range(repeats + 1):
        place = (repeat - 1) % len(methods)
        if place == 0:
            order.shuffle(methods)
        for name, count, scheduler in methods[place:] + methods[:place]:
            draft.scheduler = scheduler
            options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            restart()
            gc.collect()
            gc.disable()  # as timeit does: a collection takes as long as dozens of rounds and meets any method
            with hf_dspark.record() as stats:
                synchronize()
                started = time.perf_counter()
                target.generate(
                    **inputs,
                    **options,
                    assistant_model=draft,
                    cache_implementation="static",
                    num_assistant_tokens=count,
                )
                synchronize()
                seconds = time.perf_counter() - started
            gc.enable()
            if repeat == 0:
                continue  # compiles, records and, for "auto", measures costs
            found = {"seconds": seconds, "tau": stats.mean_acceptance_length}
            # Rows of a round share its duration; the rest is the prompt and the host.
            found["in_rounds"] = sum({r.milliseconds for r in stats.rounds}) / 1000
            found["verified_per_row"] = stats.num_verified / stats.num_rounds
            for key, value in found.items():
                rows[name].setdefault(key, []).append(value)
        if repeat == 0:
            gc.collect()
            gc.freeze()  # so that later collections are short
    draft.scheduler = None
    return rows


def compare(batch: int, new: int, rows: dict) -> dict:
    """Medians of each method, and auto's speed over that of each fixed length: the median over repeats of their ratio,
    since the load of the machine changes more slowly than methods do."""
    methods = {}
    for name, row in rows.items():
        medians = {key: statistics.median(row[key]) for key in ("tau", "verified_per_row")}
        methods[name] = {"tokens_per_second": batch * new / statistics.median(row["seconds"])} | medians
        methods[name] |= {key: [round(seconds, 5) for seconds in row[key]] for key in ("seconds", "in_rounds")}
    auto = rows["auto"]["seconds"]
    ratios = {
        name: statistics.median(own / mine for own, mine in zip(row["seconds"], auto, strict=True))
        for name, row in rows.items()
        if name != "auto"
    }
    best = min(ratios, key=lambda name: ratios[name])
    result = {"batch": batch, "methods": methods, "best_fixed": best, "auto_over_best_fixed": ratios[best]}
    print(json.dumps(result | {"auto_over_fixed": ratios}), flush=True)
    return result


def chat_batch(tokenizer, prompts: list[str], device: str) -> dict:
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    tokenizer.padding_side = "left"
    options = {"add_generation_prompt": True, "padding": True}
    return tokenizer.apply_chat_template(chats, **options, return_tensors="pt", return_dict=True).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=("smollm2", *SHAPES), required=True)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--batches", default="1,8,32,64")
    parser.add_argument("--lengths", default="1,3,5,7")
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    batches, lengths = ([int(n) for n in text.split(",")] for text in (arguments.batches, arguments.lengths))
    if arguments.pair == "smollm2":
        target, draft, tokenizer = hf_dspark.load_default_pair(dtype=dtype, device=device)
        prompts = [p for name in SETS for p in read_prompts(arguments.prompts, name, 20)]
        texts = [[prompts[i % len(prompts)] for i in range(batch)] for batch in batches]
        inputs = [chat_batch(tokenizer, some, device) for some in texts]
    else:
        target = target_of(SHAPES[arguments.pair], device, dtype)
        draft = draft_of(SHAPES[arguments.pair], device, dtype).attach_target(target)
        inputs = [{"input_ids": torch.randint(1, 500, (batch, 512), device=device)} for batch in batches]
    result = {"environment": environment(), "pair": arguments.pair, "new_tokens": arguments.new_tokens}
    result |= {"repeats": arguments.repeats, "confidence_levels": LEVELS if arguments.pair != "smollm2" else None}
    result |= {"batches": [], "costs": {}}

    def run(restart=lambda: None) -> None:
        for batch, given in zip(batches, inputs, strict=True):
            options = arguments.new_tokens, arguments.repeats
            rows = measure(target, draft, given, lengths, *options, restart)
            result["batches"].append(compare(batch, arguments.new_tokens, rows))
            costs = engine_of(target, draft).cost_model(bucket(batch), 1)
            result["costs"][batch] = {name: getattr(costs, name) for name in ("verify_ms", "draft_ms", "host_ms")}
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")

    if arguments.pair == "smollm2":
        run()
    else:
        with scripted_confidence(draft.config.num_draft_tokens, device) as restart:
            run(restart)


if __name__ == "__main__":
    main()
