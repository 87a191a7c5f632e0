"""A target split over two GPUs: by `device_map`, and by tensor parallelism with the draft on every rank.

    torchrun --nproc-per-node 2 benchmarks/two_gpus.py --json benchmarks/two_gpus.json

Every form must give the tokens of one GPU (float32, greedy), and all ranks the same ones; a failure is an error. The
pair has random weights; its Markov head leads along the target's text, so that drafts are accepted. `--shape tiny
--device cpu` runs the same over two processes without a GPU, with a disk in the place of the second GPU.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from h200_pairs import RANK, SHAPES, Shape, draft_of, target_of
from transformers import AutoModelForCausalLM

import hf_dspark

SIZES = SHAPES | {"1b": Shape(2048, 6144, 16, 16, (1, 4, 7, 10, 13), 8, 128, 32768)}
REPEATS = 3


def lead(draft, text: list[int]) -> None:
    """Give the draft a Markov head that follows `text`, except after every fifth token, and no opinion of its own."""
    following = dict(zip(text, text[1:], strict=False))
    w1, w2 = draft.markov_head.markov_w1.weight, draft.markov_head.markov_w2.weight
    with torch.no_grad():
        for weight in (w1, w2, draft.norm.weight):
            weight.zero_()
        for slot, (here, there) in enumerate(list(following.items())[:RANK]):
            w1[here, slot] = 1
            w2[there if slot % 5 != 4 else 0, slot] = 10


class Report:
    """What rank 0 prints and saves, row by row: a run that is stopped leaves those it has made."""

    def __init__(self, path: Path | None, setting: dict):
        self.path, self.content = path, setting | {"rows": []}

    def add(self, row: dict) -> None:
        if dist.get_rank() > 0:
            return
        self.content["rows"].append(row)
        print(json.dumps(row, ensure_ascii=False), flush=True)
        if self.path:
            self.path.write_text(json.dumps(self.content, indent=1, ensure_ascii=False) + "\n")


class Check:
    """Calls on one prompt, compared with the first call of all."""

    def __init__(self, device: str, tokens: int, vocabulary: int, report: Report):
        self.device, self.tokens, self.report = device, tokens, report
        self.ids = torch.arange(3, 35)[None] * 7 % vocabulary
        self.expected: list[int] | None = None

    def generate(self, target, **options) -> tuple[list[int], float]:
        ids = self.ids.to(self.device)
        more = {"max_new_tokens": self.tokens, "do_sample": False, "pad_token_id": 0} | options
        started = time.perf_counter()
        output = target.generate(ids, attention_mask=torch.ones_like(ids), **more)
        found = output[0, ids.shape[1] :].tolist()
        return found, time.perf_counter() - started

    def row(self, name: str, target, draft=None, **options) -> None:
        """Report one form of the call: tokens, path, seconds (median, after one call that warms up)."""
        if draft is not None:
            options["assistant_model"] = draft
        self.generate(target, **options)
        with hf_dspark.record() as stats:
            runs = [self.generate(target, **options) for _ in range(REPEATS)]
        found, self.expected = runs[0][0], self.expected or runs[0][0]
        if any(tokens != self.expected for tokens, _ in runs):
            raise AssertionError(f"{name}: not the tokens of one device: {found} instead of {self.expected}")
        seconds = statistics.median(seconds for _, seconds in runs)
        drafted = {} if draft is None else {"path": stats.path, "reason": stats.reason, "captured": stats.captured,
                                            "tau": round(stats.mean_acceptance_length, 3)}  # fmt: skip
        speed = round(self.tokens / seconds, 2)
        self.report.add({"form": name, "same_tokens": True, "tokens_per_s": speed, **drafted})


def same_on_all_ranks(tokens: list[int]) -> None:
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tokens)
    if any(other != tokens for other in everyone):
        raise AssertionError(f"ranks differ: {everyone}")


def one_device(check: Check, folder: Path, shape: Shape) -> None:
    """The yardstick, on the first device; writes the target and its draft to `folder`."""
    target = target_of(shape, check.device, torch.float32)
    target.save_pretrained(folder / "target")
    check.row("one device, plain generate", target)
    draft = draft_of(shape, check.device, torch.float32)
    lead(draft, [int(check.ids[0, -1]), *check.expected])
    draft.save_pretrained(folder / "draft", format="deepspec")
    check.row("one device, drafts", target, draft)
    check.row("one device, drafts, static cache", target, draft, cache_implementation="static")
    hf_dspark.release(target)


def split(check: Check, folder: Path, shape: Shape, devices: tuple) -> None:
    """Half of the layers on each device; the draft beside the first half, then beside the second."""
    half = shape.layers // 2
    parts = {"model.embed_tokens": devices[0], "model.rotary_emb": devices[0], "model.norm": devices[1]}
    parts |= {f"model.layers.{i}": devices[i >= half] for i in range(shape.layers)} | {"lm_head": devices[1]}
    target = AutoModelForCausalLM.from_pretrained(
        folder / "target", device_map=parts, dtype=torch.float32, offload_folder=folder / "offload"
    )
    check.row("device_map over two devices, plain generate", target)
    for which, device in zip(("first", "second"), devices, strict=True):
        if device != "disk":
            draft = hf_dspark.DSparkForCausalLM.from_pretrained(folder / "draft", device_map=device)
            check.row(f"device_map over two devices, draft on the {which}", target, draft)


def parallel(check: Check, folder: Path) -> None:
    """Tensor parallelism on all ranks, the draft whole on each."""
    target = AutoModelForCausalLM.from_pretrained(folder / "target", tp_plan="auto", dtype=torch.float32)
    draft = hf_dspark.DSparkForCausalLM.from_pretrained(folder / "draft", device_map=check.device)
    check.row("tensor parallel, plain generate", target)
    check.row("tensor parallel, drafts", target, draft)
    same_on_all_ranks(check.generate(target, assistant_model=draft)[0])
    torch.manual_seed(0)
    sampled, _ = check.generate(target, assistant_model=draft, do_sample=True)
    same_on_all_ranks(sampled)
    torch.manual_seed(dist.get_rank())
    try:
        check.generate(target, assistant_model=draft, do_sample=True)
    except ValueError as error:
        check.report.add({"form": "tensor parallel, sampled, ranks seeded differently", "refused": str(error)})
        return
    raise AssertionError("ranks with different random streams were not refused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SIZES, default="1b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rank, shape = int(os.environ["LOCAL_RANK"]), SIZES[arguments.shape]
    gpu = arguments.device == "cuda"
    if gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if gpu else "gloo")
    versions = {
        "hf_dspark": hf_dspark.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    name = torch.cuda.get_device_name() if gpu else "CPU"
    report = Report(
        arguments.json,
        {"device": f"{dist.get_world_size()} × {name}", "shape": arguments.shape, "dtype": "float32"}
        | {"new_tokens": arguments.tokens, "versions": versions},
    )
    check = Check(f"cuda:{rank}" if gpu else "cpu", arguments.tokens, shape.vocabulary, report)
    report.content["prompt_tokens"] = check.ids.shape[1]
    shared: list = [tempfile.mkdtemp() if rank == 0 else None, None]
    if rank == 0:
        one_device(check, Path(shared[0]), shape)
        split(check, Path(shared[0]), shape, ("cuda:0", "cuda:1") if gpu else ("cpu", "disk"))
        shared[1] = check.expected
    dist.broadcast_object_list(shared)
    folder, check.expected = Path(shared[0]), shared[1]
    parallel(check, folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
