"""τ of drafts of the embedded target on real prompts: greedy and at T = 1, bfloat16, 128 new tokens, whole blocks.

    python measure.py NAME=FOLDER [NAME=FOLDER ...] --prompts FOLDER --json ../embedded_draft.json

The folder of prompts holds gsm8k.jsonl, humaneval.jsonl and mt-bench.jsonl; the first turn of the first 20 of each goes
through the target's chat template. τ is committed tokens over rounds of all 20.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from cpu_smollm2 import SETS, read_prompts
from h200 import environment

import hf_dspark

NEW = 128


@torch.no_grad()
def measure(target, draft, tokenizer, prompts: list[str], seed: int | None) -> dict:
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    tokenizer.padding_side = "left"
    options = {"add_generation_prompt": True, "padding": True}
    inputs = tokenizer.apply_chat_template(chats, **options, return_tensors="pt", return_dict=True).to(target.device)
    sampling = (
        {"do_sample": False} if seed is None else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    )
    torch.manual_seed(seed or 0)
    with hf_dspark.record() as stats:
        target.generate(**inputs, **sampling, assistant_model=draft, cache_implementation="static", max_new_tokens=NEW)
    by_position = [x if x is None else round(x, 4) for x in stats.acceptance_by_position]
    result = {"tau": round(stats.mean_acceptance_length, 4), "acceptance_by_position": by_position}
    return result | {"rounds": stats.num_rounds, "expected_tau": stats.expected_acceptance_length}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafts", nargs="+", help="NAME=FOLDER")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, _, tokenizer = hf_dspark.load_default_pair(dtype=torch.bfloat16, device=device)
    result = {"environment": environment(), "new_tokens": NEW, "prompts_per_set": 20, "drafts": {}}
    for name, folder in (text.split("=", 1) for text in arguments.drafts):
        draft = (
            hf_dspark.DSparkForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).attach_target(target)
        )
        draft.fast_path = hf_dspark.FastPath(compile=False)
        rows = {}
        for mode, seed in (("greedy", None), ("T=1", 0)):
            sets = {s: measure(target, draft, tokenizer, read_prompts(arguments.prompts, s, 20), seed) for s in SETS}
            rows[mode] = sets | {"mean_tau": round(sum(row["tau"] for row in sets.values()) / len(sets), 4)}
            print(name, mode, {s: row["tau"] for s, row in sets.items()}, rows[mode]["mean_tau"], flush=True)
        size = sum(
            p.numel() * p.element_size() for n, p in draft.named_parameters() if not n.startswith(("embed", "lm_"))
        )
        result["drafts"][name] = rows | {"bytes": size, "layers": draft.config.num_hidden_layers}
        result["drafts"][name]["markov_rank"] = draft.config.markov_rank
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
        hf_dspark.release(target)


if __name__ == "__main__":
    main()
