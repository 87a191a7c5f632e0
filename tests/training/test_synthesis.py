"""Texts that the target writes: on-policy, supervised where it wrote, the same after an interruption."""

import itertools
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import tiny
from hf_dspark import training
from hf_dspark.generation.continuous import ContinuousDecoder
from hf_dspark.training import synthesis
from hf_dspark.training.conversation import ChatText, Conversation
from hf_dspark.training.data import Texts

# One letter a token: the user says "U...V", the target answers until "W", its end-of-text token.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}U{{ m.content }}V{% elif m.role == 'system' %}S{{ m.content }}"
    "{% else %}A{{ m.content }}W{% endif %}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)
U, V, W, A = (tiny.tokenizer().convert_tokens_to_ids(letter) for letter in "UVWA")
PROMPTS = ["ab", "cde", "fg", "hij", "kl"]


def chat_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tiny.tokenizer()._tokenizer, eos_token="W", chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def chat_target(tmp_path_factory):
    """T-perm as a chat model: its cycle leads to W sooner or later."""
    folder = tmp_path_factory.mktemp("chat")
    target = tiny.table_target(tiny.one_hot_table(tiny.NEXT, 6.0))
    target.generation_config.eos_token_id = W
    target.generation_config.repetition_penalty = 5.0  # must not reach the text
    target.save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def config(chat_target, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))

    def make(**changes):
        values = {"output": str(tmp_path / "out.jsonl"), "target": str(chat_target), "prompts": [str(prompts)]}
        values |= {"batch_size": 2, "max_length": 96, "max_user_tokens": 6, "dtype": "float32", "device": "cpu"}
        return training.SynthesisConfig(**(values | changes))

    return make


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def segments(record) -> list[tuple[bool, str]]:
    """The text in stretches that are supervised or not."""
    parts = itertools.groupby(zip(record["loss_mask"], record["input_ids"], strict=True), key=lambda pair: pair[0])
    return [(bool(flag), chat_tokenizer().decode([i for _, i in pairs])) for flag, pairs in parts]


def test_answers_are_the_targets_greedy_text(config, tmp_path):
    result = training.synthesize(config(temperatures=[0.0]))
    found = lines(tmp_path / "out.jsonl")
    assert len(found) == result.num_conversations == len(PROMPTS)
    for record, prompt in zip(found, PROMPTS, strict=True):
        opening = [U, *tiny.tokenizer()(prompt)["input_ids"], V, A]
        answer = tiny.chain(A, 62)
        answer = answer[: answer.index(W) + 1]
        assert record["input_ids"] == opening + answer
        assert record["loss_mask"] == [0] * len(opening) + [1] * len(answer)
        assert record["messages"] == [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": tiny.tokenizer().decode(answer[:-1])},
        ]
        assert record["temperature"] == 0 and record["source"] == "prompt"
    assert result.num_tokens == sum(len(record["input_ids"]) for record in found)
    assert result.num_supervised_tokens == sum(sum(record["loss_mask"]) for record in found)
    assert len(Texts.read([tmp_path / "out.jsonl"], 96, tiny.V)) == len(PROMPTS)


def test_a_cut_answer_ends_its_conversation(config, tmp_path):
    training.synthesize(config(temperatures=[0.0], max_answer_tokens=4))
    for record in lines(tmp_path / "out.jsonl"):
        assert sum(record["loss_mask"]) == 4 and record["input_ids"][-1] != W
        assert record["input_ids"][-4:] == tiny.chain(A, 4)


def test_sampling_is_on_policy(chat_target):
    """First tokens at temperature 2 follow the target's own distribution; no penalty, no top-k."""
    target = AutoModelForCausalLM.from_pretrained(chat_target).eval()
    writer = training.writer.Writer(target, chat_tokenizer(), 512, 96)
    found = writer.write([[U, A]] * 512, [2.0] * 512, at_most=1)
    with torch.no_grad():
        p = (target(torch.tensor([[U, A]])).logits[0, -1] / 2).softmax(-1)
    counts = torch.tensor([row[0] for row in found]).bincount(minlength=tiny.V).float()
    chi_squared = ((counts - 512 * p) ** 2 / (512 * p)).sum()
    assert chi_squared < 120  # 63 degrees of freedom: p = 1e-5
    assert counts.argmax() == tiny.NEXT[A]


def test_ways_to_write_give_the_same_text(chat_target):
    """What CUDA uses: rows that are refilled, or a static cache of one shape for every batch."""
    target = AutoModelForCausalLM.from_pretrained(chat_target).eval()
    # The room of a text does not depend on the longest of its batch.
    texts = [[U, 0, V, A], [U, *[3] * 88, V, A], [A]]
    dynamic = training.writer.Writer(target, chat_tokenizer(), 4, 96)
    static = training.writer.Writer(target, chat_tokenizer(), 4, 96)
    static.static = True
    refilled = training.writer.Writer(target, chat_tokenizer(), 2, 96)
    refilled._decoder = ContinuousDecoder(target, 2, 96)
    assert refilled.wave > len(texts) and dynamic.wave == 4
    for options in ({}, {"at_most": 5}, {"at_most": 9, "ends": [tiny.NEXT[A]]}):
        expected = dynamic.write(texts, [0.0] * 3, **options)
        assert static.write(texts, [0.0] * 3, **options) == expected
        assert refilled.write(texts, [0.0] * 3, **options) == expected
        assert max(map(len, expected)) <= options.get("at_most", 99)
        assert len(expected[0]) == len(expected[2]) > (len(expected[1]) if not options else 0)
    assert expected == [[tiny.NEXT[A]]] * 3


def test_temperatures_take_turns_where_rows_are_refilled(config, tmp_path, monkeypatch):
    """A wave of several batches has the temperatures that its batches would have had one by one."""

    def refills(self, target, tokenizer, batch_size, max_length):
        plain_init(self, target, tokenizer, batch_size, max_length)
        self._decoder = ContinuousDecoder(target, batch_size, max_length)

    options = {"samples_per_prompt": 2, "temperatures": [0.0, 9.0], "num_own": 3}
    training.synthesize(config(output=str(tmp_path / "batches.jsonl"), **options))
    plain_init = training.writer.Writer.__init__
    monkeypatch.setattr(training.writer.Writer, "__init__", refills)
    training.synthesize(config(**options))
    for name in ("batches.jsonl", "out.jsonl"):
        found = lines(tmp_path / name)
        greedy = [record for record in found if record["temperature"] == 0 and record["source"] == "prompt"]
        assert {record["temperature"] for record in found} == {0.0, 9.0}
        for record in greedy:
            answer = [token for token, flag in zip(record["input_ids"], record["loss_mask"], strict=True) if flag]
            assert answer == tiny.chain(A, len(answer))


def test_own_conversations(config, tmp_path):
    """The target writes user turns between the template's marks; answers alone are supervised."""
    result = training.synthesize(config(prompts=[], num_own=12, turns=3, temperatures=[1.0]))
    found = lines(tmp_path / "out.jsonl")
    assert result.num_conversations + result.num_dropped == 12 and len(found) > 3
    assert {record["source"] for record in found} == {"self"}
    assert any(sum(m["role"] == "user" for m in record["messages"]) > 1 for record in found)
    for record in found:
        roles = [m["role"] for m in record["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) and len(record["input_ids"]) <= 96
        parts = segments(record)
        assert [supervised for supervised, _ in parts] == [False, True] * (len(roles) // 2)
        for i, (message, (_, text)) in enumerate(zip(record["messages"], parts, strict=True)):
            if i % 2 == 0:
                assert text.startswith("U") and text.endswith("VA") and len(text) == len(message["content"]) + 3
            elif i < len(parts) - 1:
                assert text == message["content"] + "W"
            else:  # the length may have cut it
                assert text.removesuffix("W") == message["content"]


def test_topics(config, tmp_path):
    topics = tmp_path / "topics.txt"
    topics.write_text("bees\ncheese\n\nbees\n")
    training.synthesize(config(prompts=[], num_own=4, topics=[str(topics)], max_length=400))
    assert {record["source"] for record in lines(tmp_path / "out.jsonl")} == {"topic"}


def test_given_turns_come_first_and_answers_are_new(config, tmp_path):
    """Chats are read for their user turns; the answers in them are not used."""
    path = tmp_path / "chats.jsonl"
    chat = [("system", "xy"), ("user", "ab"), ("assistant", "old"), ("user", "cd")]
    path.write_text(json.dumps({"messages": [{"role": r, "content": c} for r, c in chat]}) + "\n")
    training.synthesize(config(prompts=[str(path)], temperatures=[0.0], max_length=200))
    (record,) = lines(tmp_path / "out.jsonl")
    assert [m["role"] for m in record["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in record["messages"]][::3] == ["xy", "cd"]
    assert record["messages"][2]["content"] != "old"
    answers = [record["messages"][i]["content"] + "W" for i in (2, 4)]
    assert segments(record) == [(False, "SxyUabVA"), (True, answers[0]), (False, "UcdVA"), (True, answers[1])]


def test_duplicates_are_dropped(config, tmp_path):
    """Greedy answers to one prompt are the same; at a temperature they are not."""
    result = training.synthesize(config(samples_per_prompt=3, temperatures=[0.0]))
    assert (result.num_conversations, result.num_dropped) == (5, 10)
    hot = training.synthesize(config(output=str(tmp_path / "hot.jsonl"), samples_per_prompt=3, temperatures=[3.0]))
    assert hot.num_conversations > 12


class Killed(BaseException):
    pass


@pytest.mark.parametrize("killed", [0, 1, 3])
def test_resumed_equals_uninterrupted(config, tmp_path, monkeypatch, killed):
    options = {"num_own": 5, "samples_per_prompt": 2, "turns": 2}
    training.synthesize(config(output=str(tmp_path / "whole.jsonl"), **options))
    original = synthesis._Synthesis._append

    def append(self, new_lines, done):
        if new_lines and done == killed + 1:  # dies while it writes a batch
            with self.output.open("a") as file:
                file.write(new_lines[0][:20])
            raise Killed
        original(self, new_lines, done)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(synthesis._Synthesis, "_append", append)
        training.synthesize(config(**options))
    with pytest.raises(ValueError, match="resume=True"):
        training.synthesize(config(**options))
    with pytest.raises(ValueError, match="other seed"):
        training.synthesize(config(seed=1, resume=True, **options))
    training.synthesize(config(resume=True, **options))
    assert (tmp_path / "out.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()


def test_a_template_that_rewrites_earlier_turns_ends_the_conversation():
    """What was supervised stays what the target saw."""
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("{{ m.content }}W", "{{ m.content.lower() }}W")
    chat, conversation = ChatText(tokenizer), Conversation(own_turns=2)
    assert chat.add_user(conversation, "ab")
    conversation.add_answer([1, W], "C", "CW", complete=True)
    ids = list(conversation.ids)
    assert not chat.add_user(conversation, "de")
    assert conversation.ended and conversation.ids == ids


def test_target_without_template(config, chat_target, tmp_path):
    folder = shutil.copytree(chat_target, tmp_path / "bare")
    tiny.tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    training.synthesize(config(target=str(folder), temperatures=[0.0]))
    record = lines(tmp_path / "out.jsonl")[0]
    assert record["input_ids"][:3] == [*tiny.tokenizer()("ab")["input_ids"], tiny.NEXT[1]]
    with pytest.raises(ValueError, match="no chat template"):
        training.synthesize(config(target=str(folder), output=str(tmp_path / "other.jsonl"), num_own=3))


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "prompts.jsonl:1 is not JSON"), ('{"messages": []}', "no user turns"), ('{"prompt": " "}', "no user turns")],
)
def test_bad_prompts_are_named(config, tmp_path, line, message):
    make = config()
    (tmp_path / "prompts.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        training.synthesize(make)


def test_text_files_hold_a_prompt_a_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo\none\n")
    assert [prompt.turns for prompt in training.prompts.read_prompts([path])] == [("one",), ("two",)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "nothing to write"),
        ({"topics": ["a.txt"]}, "`num_own`"),
        ({"temperatures": [-1.0]}, "`temperatures`"),
        ({"batch_size": 0}, "`batch_size`"),
        ({"dtype": "int8"}, "`dtype`"),
    ],
)
def test_wrong_arguments(config, changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_line_separators_of_unicode_stay_inside_their_text(tmp_path):
    """JSON leaves U+2028, U+0085 and others as they are; `str.splitlines` would cut the line there."""
    odd = "one\u2028two\u0085three\u000cfour"
    text = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "messages": [{"role": "user", "content": odd}]}
    path = tmp_path / "texts.jsonl"
    path.write_text(2 * (json.dumps(text, ensure_ascii=False) + "\n"), encoding="utf-8")
    assert len(Texts.read([path], 10, 10)) == 2
    path.write_text(json.dumps({"prompt": odd}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [prompt.turns for prompt in training.prompts.read_prompts([path])] == [(odd,)]
