"""Fit the temperatures of a draft's confidence head on texts of the target, and keep them with the draft.

    python examples/calibrate.py [FOLDER]

The same as `hf-dspark calibrate --output FOLDER`; a real run takes more prompts.
"""

import sys
import tempfile
from pathlib import Path

import hf_dspark

PROMPTS = (
    "Explain how a bicycle stays upright.", "Write a Python function that counts vowels.", "What is 45 minus 18?",
    "Describe a market in the morning.", "List five uses of a spoon.", "Why do leaves fall in autumn?",
)  # fmt: skip


def main(folder: Path) -> None:
    target, draft, tokenizer = hf_dspark.load_default_pair()
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    report = hf_dspark.calibrate(target, draft, chats, tokenizer=tokenizer, max_new_tokens=64)
    print(f"temperatures: {' '.join(f'{t:.2f}' for t in report.temperatures)}")
    print(f"calibration error of a_j on held-out texts: {report.ece_before:.4f} before, {report.ece_after:.4f} after")
    for note in report.notes:
        print(f"note: {note}")
    draft.save_pretrained(folder)
    loaded = hf_dspark.DSparkForCausalLM.from_pretrained(folder)
    assert loaded.config.confidence_temperatures == report.temperatures
    print(f"saved with its temperatures: {folder}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
