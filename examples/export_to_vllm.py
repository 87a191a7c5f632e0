"""Take a draft to production: a folder that vLLM and SGLang serve, and the commands that serve it.

    python examples/export_to_vllm.py FOLDER

The same as `hf-dspark export --output FOLDER`.
"""

import sys

import torch

import hf_dspark
from hf_dspark import hub

TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"


def main(folder: str) -> None:
    _, draft, _ = hf_dspark.load_default_pair(dtype=torch.bfloat16)
    exported = hub.export(draft, folder, format="deepspec", target=TARGET)
    for engine, command in exported.commands.items():
        print(f"{engine}:\n  {command}")

    # Embeddings and head are in the folder, so the draft now works without its target at hand.
    again = hf_dspark.DSparkForCausalLM.from_pretrained(folder)
    features = torch.randn(1, 3, draft.config.context_size, dtype=draft.dtype)
    anchor = torch.tensor([1])
    assert torch.equal(again.propose(anchor, features).tokens, draft.propose(anchor, features).tokens)
    print("the exported draft proposes the same tokens")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
