"""Prompt files: every turn and field is kept, and what cannot be used is named."""

import json

import pytest

import tiny
from hf_dspark.evaluation import ChatFormat, load_prompt_sets, load_prompts
from hf_dspark.evaluation.prompts import PLACEHOLDER

SPEED_BENCH = {
    "question_id": "q7", "category": "coding", "sub_category": "python", "turns": ["first", "second"], "source": "s",
    "src_id": "12", "difficulty": "hard", "multiturn": True,
}  # fmt: skip


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_jsonl(tmp_path):
    path = write(tmp_path / "some.jsonl", [{"turns": ["ä"]}, {"turns": ["x", "y"], "category": "math"}])
    path.write_text(path.read_text() + "\n\n")
    first, second = load_prompts(path)
    assert (first.name, first.turns, first.category, first.details) == ("some/0", ("ä",), None, {})
    assert (second.name, second.turns, second.category) == ("some/1", ("x", "y"), "math")
    assert [prompt.name for prompt in load_prompts(path, limit=1)] == ["some/0"]


def test_speed_bench_in_both_formats(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [SPEED_BENCH | {"question_id": f"q{i}", "difficulty": None if i % 2 else "easy"} for i in range(70)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "qualitative.parquet")
    found = load_prompts(tmp_path / "qualitative.parquet")
    assert found == load_prompts(write(tmp_path / "qualitative.jsonl", rows))
    assert len(found) == 70 and found[69].name == "qualitative/69" and found[69].details["question_id"] == "q69"
    assert found[0].turns == ("first", "second") and found[0].category == "coding"
    assert found[0].details["sub_category"] == "python" and found[0].details["multiturn"] is True


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "holds no prompts"),
        ("\n\n", "holds no prompts"),
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1: expected an object"),
        ('{"prompt": "x"}', "expected an object with `turns`"),
        ('{"turns": ["x"]}\n{"turns": []}', "line 2: `turns` must be"),
        ('{"turns": "x"}', "`turns` must be a list"),
        ('{"turns": ["x", " "]}', "not empty"),
        (json.dumps({"turns": [PLACEHOLDER + " USING X"]}), "placeholder"),
    ],
)
def test_unusable_files_are_named(tmp_path, text, words):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="bad.jsonl") as error:
        load_prompts(path)
    assert words in str(error.value)


def test_wrong_arguments(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"turns": ["x"]}])
    (tmp_path / "a.parquet").write_text("no")
    (tmp_path / "a.txt").write_text("no")
    for wrong, words in (("none.jsonl", "no such file"), ("a.txt", ".jsonl and .parquet"), ("a.parquet", "parquet")):
        with pytest.raises(ValueError, match=words):
            load_prompts(tmp_path / wrong)
    with pytest.raises(ValueError, match="at least 1"):
        load_prompts(path, limit=0)
    with pytest.raises(ValueError, match="at least one file"):
        load_prompt_sets([])
    (tmp_path / "b").mkdir()
    with pytest.raises(ValueError, match="Two prompt files are named a"):
        load_prompt_sets([path, write(tmp_path / "b" / "a.jsonl", [{"turns": ["x"]}])])


# ---- chat format


@pytest.fixture
def tokenizer(monkeypatch):
    tokenizer = tiny.tokenizer()
    template = (
        "{% for m in messages %}{{ m['role'][0] + m['content'] }}{% endfor %}{{ 'T' if enable_thinking else '' }}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template, raising=False)
    return tokenizer


def test_chat_format(tokenizer):
    def text(**options):
        return "".join(tokenizer.convert_ids_to_tokens(ChatFormat(tokenizer, **options).encode(["ab", "c", "d"])))

    assert text() == "uabacud" and text(thinking=True) == "uabacudT" and text(thinking=False) == "uabacud"
    assert text(chat_template=False) == "abcd"
    assert str(ChatFormat(tokenizer, thinking=False)) == "chat, thinking off"
    assert str(ChatFormat(tokenizer, chat_template=False)) == "none"


def test_chat_options_without_effect(tokenizer, monkeypatch):
    with pytest.raises(ValueError, match="no effect"):
        ChatFormat(tokenizer, chat_template=False, thinking=True)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0]['content'] }}")
    with pytest.raises(ValueError, match="no effect"):
        ChatFormat(tokenizer, thinking=False)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="no chat template"):
        ChatFormat(tokenizer, chat_template=True)
    assert str(ChatFormat(tokenizer)) == "none"
