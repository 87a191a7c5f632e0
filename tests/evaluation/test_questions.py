"""Prompts that the target writes itself."""

import pytest

import tiny
from hf_dspark.evaluation.questions import write_questions

TEMPLATE = "{% for m in messages %}ab{{ m['content'] }}cd{% endfor %}"


@pytest.fixture
def tokenizer(monkeypatch):
    tokenizer = tiny.tokenizer()
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE, raising=False)
    return tokenizer


def test_questions_follow_the_opening_of_a_users_turn(tokenizer):
    target = tiny.perm_target()
    (question,) = write_questions(target, tokenizer, 1, max_new_tokens=5)
    assert question == tokenizer.decode(tiny.chain(tokenizer("ab")["input_ids"][-1], 5))


def test_questions_differ_and_repeat_with_the_seed(tokenizer):
    target = tiny.random_target()
    questions = write_questions(target, tokenizer, 6, max_new_tokens=8, seed=1)
    assert len(set(questions)) == 6 and all(questions)
    assert write_questions(target, tokenizer, 6, max_new_tokens=8, seed=1) == questions
    assert write_questions(target, tokenizer, 6, max_new_tokens=8, seed=2) != questions


def test_what_cannot_write_questions(tokenizer, monkeypatch):
    with pytest.raises(ValueError, match="wrote 1 different questions, not 2"):
        write_questions(tiny.perm_target(), tokenizer, 2, max_new_tokens=4)
    monkeypatch.setattr(tokenizer, "chat_template", "fixed")
    with pytest.raises(ValueError, match="does not show"):
        write_questions(tiny.perm_target(), tokenizer, 1)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="no chat template"):
        write_questions(tiny.perm_target(), tokenizer, 1)
