"""Answer one prompt twice, plainly and with a DSpark draft: the same text, in fewer forwards of the target.

    python examples/quickstart.py

Prints the text, τ (tokens per round, the target's own included), both speeds and where each token came from.
"""

import statistics
import time

import torch
from rich.console import Console
from rich.text import Text

import hf_dspark

PROMPT = "Tom has 12 marbles and buys 3 bags with 5 marbles each. How many marbles does he have now?"
MAX_NEW_TOKENS = 128
RUNS = 3
COLOURS = {
    "first": "magenta",  # from the target's forward over the prompt
    "accepted": "green",  # a draft that the target would have written too
    "corrected": "red",  # the target's token in the place of a rejected draft
    "bonus": "cyan",  # the target's token after a block without rejection
}


def timed(target, inputs, **kwargs) -> tuple[list[int], float]:
    """New token ids of a greedy generate() call, and its seconds."""
    start = time.perf_counter()
    output = target.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS, **kwargs)
    return output[0, inputs["input_ids"].shape[1] :].tolist(), time.perf_counter() - start


def origins(rounds: list[hf_dspark.Round], num_tokens: int) -> list[str]:
    """Where each of the new tokens came from: a key of `COLOURS`."""
    kinds = ["first"] * min(num_tokens, 1)
    for r in rounds:
        kinds += ["accepted"] * r.accepted
        if r.next_token is not None:
            kinds.append("corrected" if r.accepted < r.verified else "bonus")
    assert len(kinds) == num_tokens
    return kinds


def coloured(tokenizer, ids: list[int], kinds: list[str]) -> Text:
    """The text, each token in the colour of its origin."""
    text = Text()
    for token, kind in zip(ids, kinds, strict=True):
        text.append(tokenizer.decode([token]), style=COLOURS[kind])
    return text


def main() -> None:
    console = Console(highlight=False)
    target, draft, tokenizer = hf_dspark.load_default_pair()
    messages = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    for options in ({}, {"assistant_model": draft}):  # warm-up
        target.generate(**inputs, do_sample=False, max_new_tokens=16, **options)
    plain_seconds, draft_seconds = [], []
    for _ in range(RUNS):  # in turn, so that a slow moment of the machine hits both
        plain_ids, seconds = timed(target, inputs)
        plain_seconds.append(seconds)
        with hf_dspark.record() as stats:
            draft_ids, seconds = timed(target, inputs, assistant_model=draft)
        draft_seconds.append(seconds)

    console.print("[bold]Plain[/bold]")
    console.print(tokenizer.decode(plain_ids), markup=False)
    console.print("\n[bold]With the draft[/bold]")
    console.print(coloured(tokenizer, draft_ids, origins(stats.rounds, len(draft_ids))))
    console.print("(", *(Text(kind, style=colour) for kind, colour in COLOURS.items()), ")")

    identical = plain_ids == draft_ids
    plain_speed, draft_speed = (len(plain_ids) / statistics.median(s) for s in (plain_seconds, draft_seconds))
    console.print(
        f"\nidentical: {'yes' if identical else 'no'} ({len(draft_ids)} tokens, {torch.get_num_threads()} threads)"
    )
    console.print(f"τ: {stats.mean_acceptance_length:.2f} tokens per round over {stats.num_rounds} rounds")
    console.print(f"tokens/s: plain {plain_speed:.1f}, with the draft {draft_speed:.1f} (medians of {RUNS} runs)")
    console.print(f"speed-up: {draft_speed / plain_speed:.2f}")
    assert identical, "the two texts differ, which must not happen in float32"


if __name__ == "__main__":
    main()
