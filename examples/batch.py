"""Several prompts at once, on the fast path: every row accepts its own number of drafts in each round.

python examples/batch.py
"""

import hf_dspark

PROMPTS = ("What is 12 times 7?", "Name three colours.", "Write a Python function that adds two numbers.")


def main() -> None:
    target, draft, tokenizer = hf_dspark.load_default_pair()
    tokenizer.padding_side = "left"  # on the right, a batch is decoded without drafts
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    with hf_dspark.record() as stats:
        output = target.generate(**inputs, assistant_model=draft, max_new_tokens=48, do_sample=False)
    for row, prompt in enumerate(PROMPTS):
        rounds = [r for r in stats.rounds if r.row == row]
        accepted = sum(r.accepted for r in rounds) / len(rounds)
        print(f"> {prompt}  [{len(rounds)} rounds, {accepted:.2f} drafts accepted in each]")
        print(tokenizer.decode(output[row, inputs["input_ids"].shape[1] :], skip_special_tokens=True), "\n")
    print(f"path: {stats.path}; {stats.reason}")


if __name__ == "__main__":
    main()
