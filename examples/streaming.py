"""Text as it is written: a streamer gets every token that a round commits, never one that is taken back.

python examples/streaming.py
"""

from transformers import TextStreamer

import hf_dspark

PROMPT = "Write three short sentences about the sea."


def main() -> None:
    target, draft, tokenizer = hf_dspark.load_default_pair()
    messages = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    with hf_dspark.record() as stats:
        target.generate(**inputs, assistant_model=draft, streamer=streamer, max_new_tokens=64)
    print(f"{stats.num_tokens} tokens in {stats.num_rounds} rounds, τ {stats.mean_acceptance_length:.2f}")


if __name__ == "__main__":
    main()
