"""A draft for a target of your own, from nothing: the target writes texts, a draft learns from them, and is used.

    python examples/train_your_own.py FOLDER [--target FOLDER_OR_ID]

Small enough to finish on a laptop in some minutes, and far too small to be of use: `hf-dspark synthesize --help` and
`hf-dspark train --help` say what a real run sets.
"""

import argparse
from pathlib import Path

from transformers import AutoModel, AutoModelForCausalLM

import hf_dspark
from hf_dspark.default_pair import setup_demo
from hf_dspark.training import SynthesisConfig, TrainingConfig, synthesize, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="new folder for texts and draft")
    parser.add_argument("--target", help="by default the embedded one")
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    target = arguments.target or str(setup_demo())

    # 1. The target writes conversations, questions included, from its chat template.
    texts = arguments.folder / "texts.jsonl"
    texts.parent.mkdir(parents=True)
    synthesize(
        SynthesisConfig(
            str(texts), target=target, num_own=arguments.texts, max_length=96, batch_size=12, dtype="float32"
        )
    )

    # 2. A draft learns to say what the target says next, for whole blocks.
    config = TrainingConfig(
        data=[str(texts)],
        output_dir=str(arguments.folder / "run"),
        target=target,
        max_steps=arguments.steps,
        batch_size=4,
        num_anchors=16,
        num_hidden_layers=1,
        block_size=4,
        markov_rank=32,
        num_validation_texts=4,
        dtype="float32",
    )
    result = train(config)
    assert result.validation is not None
    print(f"expected τ on held-out texts: {result.validation.tau_greedy:.2f} (1 would be a draft that is never right)")

    # 3. It is a draft like any other.
    draft = AutoModel.from_pretrained(result.draft)
    model = AutoModelForCausalLM.from_pretrained(target, dtype="float32")
    prompt = model.dummy_inputs["input_ids"][:1]
    with hf_dspark.record() as stats:
        model.generate(prompt, assistant_model=draft, max_new_tokens=32, do_sample=False)
    print(f"used: {stats.num_rounds} rounds for {stats.num_tokens} tokens; the draft is in {result.draft}")


if __name__ == "__main__":
    main()
