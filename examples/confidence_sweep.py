"""What a confidence threshold does: blocks are cut at the first draft that the draft model itself doubts.

    python examples/confidence_sweep.py

A higher threshold verifies fewer drafts, of which more are accepted, and loses some that would have been. It pays where
verifying a draft is dear: in large batches, on a CPU. The text is always the same.
"""

import hf_dspark

PROMPT = "Tom has 12 marbles and buys 3 bags with 5 marbles each. How many marbles does he have now?"
THRESHOLDS = (0.0, 0.2, 0.4, 0.6, 0.8)


def main() -> None:
    target, draft, tokenizer = hf_dspark.load_default_pair()
    messages = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    texts = set()
    print("threshold  τ     verified a round  accepted of verified")
    for threshold in THRESHOLDS:
        options = {"assistant_confidence_threshold": threshold, "do_sample": False, "max_new_tokens": 64}
        with hf_dspark.record() as stats:
            output = target.generate(**inputs, assistant_model=draft, **options)
        texts.add(tuple(output[0].tolist()))
        verified = stats.num_verified / stats.num_rounds
        print(f"{threshold:<9}  {stats.mean_acceptance_length:.2f}  {verified:<16.2f}  {stats.acceptance_rate:.0%}")
    print(f"different texts: {len(texts)}")
    assert len(texts) == 1, "a threshold changed the text, which must not happen in float32"


if __name__ == "__main__":
    main()
