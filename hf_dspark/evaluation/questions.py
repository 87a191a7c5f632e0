"""Prompts that the target writes itself, from nothing but its chat template."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

MARK = "QUESTION"


def write_questions(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    *,
    max_new_tokens: int = 96,
    seed: int = 0,
) -> list[str]:
    """Let the target write what a user might ask: sampled (T = 1, top-p 0.95) where the template expects a question.

    Returns:
        `count` different texts.

    Raises:
        ValueError: there is no chat template, or the target does not write enough different questions.
    """
    if tokenizer.chat_template is None:
        raise ValueError("The target has no chat template to write questions from: give a file of prompts.")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    opening, mark, _ = str(chat).partition(MARK)
    if not mark:
        raise ValueError("The chat template does not show the user's message: give a file of prompts.")
    inputs = tokenizer(opening, add_special_tokens=False, return_tensors="pt").to(target.device)
    set_seed(seed)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 0.95, "max_new_tokens": max_new_tokens}
    questions: list[str] = []
    with logging.tqdm(total=count, desc="questions") as bar:
        for _ in range(2 * count):
            output = target.generate(**inputs, **options)
            text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
            if text and text not in questions:
                questions.append(text)
                bar.update()
            if len(questions) == count:
                return questions
    raise ValueError(f"The target wrote {len(questions)} different questions, not {count}: give a file of prompts.")
