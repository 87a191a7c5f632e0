"""The command line in-process, on a tiny pair in temporary folders."""

import copy
import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from command import refused, run

import hf_dspark
import tiny
from hf_dspark import default_pair
from hf_dspark.cli import generate as generate_module

MAIN = [sys.executable, "-c", "from hf_dspark.cli import main; main()"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(target, draft): T-perm with a tokenizer and a chat template, and a draft that is always right."""
    root = tmp_path_factory.mktemp("models")
    tiny.perm_target().save_pretrained(root / "target")
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(root / "target")
    table = tiny.one_hot_table(tiny.NEXT)
    config = tiny.draft_config(vocab=tiny.V, rank=tiny.V, confidence=None)
    tiny.write_draft(root / "draft", config, tiny.markov_tensors(config, table))
    return str(root / "target"), str(root / "draft")


@pytest.fixture
def pair(folders):
    return ["--target", folders[0], "--draft", folders[1]]


def text_after(prompt: str, length: int) -> str:
    tokenizer = tiny.tokenizer()
    return tokenizer.decode(tiny.chain(tokenizer(prompt).input_ids[-1], length))


def test_generate_writes_the_targets_text(pair, tmp_path, capsys):
    path = tmp_path / "result.json"
    code, out, err = run(["generate", "abc", *pair, "--max-new-tokens", "20", "--json", str(path)], capsys)
    assert code == 0 and out == text_after("abc", 20) + "\n" and "20 tokens" in err and "τ" in err
    result = json.loads(path.read_text())
    assert result["text"] == text_after("abc", 20) and result["prompt"] == "abc"
    assert result["ids"] == tiny.chain(tiny.tokenizer()("abc").input_ids[-1], 20)
    assert result["statistics"]["num_tokens"] == 20 and result["statistics"]["acceptance_rate"] == 1.0
    assert result["versions"]["hf_dspark"] == hf_dspark.__version__ and result["options"]["max_new_tokens"] == 20
    assert result["target"] == pair[1] and result["draft"] == pair[3] and result["dtype"] == "torch.float32"


def test_options_reach_generate(pair, tmp_path, capsys):
    path = tmp_path / "result.json"
    options = ["--num-assistant-tokens", "2", "--max-new-tokens", "13", "--do-sample", "--top-k", "5", "--seed", "3"]
    assert run(["generate", "abc", *pair, *options, "--json", str(path)], capsys)[0] == 0
    first = json.loads(path.read_text())
    assert {r["verified"] for r in first["statistics"]["rounds"][:-1]} == {2} and len(first["ids"]) == 13
    assert first["options"]["top_k"] == 5 and first["seed"] == 3
    run(["generate", "abc", *pair, *options, "--json", str(path)], capsys)
    assert json.loads(path.read_text())["ids"] == first["ids"]


def test_plain_gives_the_same_text_without_statistics(folders, tmp_path, capsys):
    path = tmp_path / "result.json"
    arguments = ["generate", "abc", "--target", folders[0], "--plain", "--max-new-tokens", "9", "--json", str(path)]
    code, out, err = run(arguments, capsys)
    assert code == 0 and out.strip() == text_after("abc", 9) and "without draft" in err
    result = json.loads(path.read_text())
    assert result["statistics"] is None and result["draft"] is None


def test_streamed_text_is_the_same(pair, capsys):
    code, out, _ = run(["generate", "abc", *pair, "--stream", "--max-new-tokens", "20"], capsys)
    assert code == 0 and out == text_after("abc", 20) + "\n"


def test_chat_keeps_the_history(pair, tmp_path, capsys, monkeypatch):
    path = tmp_path / "result.json"
    monkeypatch.setattr(sys, "stdin", io.StringIO("de\n\nnever asked\n"))
    arguments = ["generate", "abc", "--chat", "--system", "z", *pair, "--max-new-tokens", "5", "--json", str(path)]
    prompts = []
    original = generate_module.encode
    monkeypatch.setattr(
        generate_module, "encode", lambda models, messages: prompts.append(list(messages)) or original(models, messages)
    )
    assert run(arguments, capsys)[0] == 0
    turns = json.loads(path.read_text())["turns"]
    assert [turn["prompt"] for turn in turns] == ["abc", "de"]
    assert turns[1]["text"] == text_after("de", 5)
    # z, abc and the answer without its last token are in the cache.
    assert [turn["statistics"]["num_reused"] for turn in turns] == [0, 8]
    contents = [message["content"] for message in prompts[1]]
    assert contents == ["z", "abc", turns[0]["text"], "de"]


def test_an_error_inside_a_streamed_answer_ends_the_command(pair, capsys, monkeypatch):
    puts = []

    def put(self, value):
        puts.append(value)
        if len(puts) == 5:
            raise ValueError("the display broke")

    arguments = ["generate", "abc", *pair, "--stream", "--max-new-tokens", "20"]
    with monkeypatch.context() as patch:
        patch.setattr(generate_module.TextStreamer, "put", put)
        code, _, err = run(arguments, capsys)
    assert code == 2 and "Error: the display broke" in err and len(puts) == 5
    code, out, _ = run(arguments, capsys)
    assert code == 0 and out == text_after("abc", 20) + "\n"


def test_interrupting_an_answer_of_a_chat_asks_on(pair, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\nde\n"))
    original, calls = generate_module.answer, []

    def answer(models, session, messages, *rest):
        calls.append([message["content"] for message in messages])
        if len(calls) == 1:
            raise KeyboardInterrupt
        return original(models, session, messages, *rest)

    monkeypatch.setattr(generate_module, "answer", answer)
    code, out, err = run(["generate", "--chat", *pair, "--max-new-tokens", "5"], capsys)
    assert code == 0 and calls == [["abc"], ["de"]] and out.strip() == text_after("de", 5) and "stopped" in err


@pytest.mark.slow
def test_ctrl_c_ends_a_long_answer(pair):
    command = [*MAIN, "generate", "abc", *pair, "--stream", "--max-new-tokens", "100000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Shells start background jobs with this signal ignored, and whoever runs the tests may be one.
    process = subprocess.Popen(command, **pipes, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    try:
        assert process.stdout.read(1), process.stderr.read()  # the answer has begun
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and time.monotonic() - start < 10 and b"Traceback" not in err


# ---- wrong usage: one sentence on stderr, exit code 2, nothing loaded


@pytest.fixture
def no_loading(monkeypatch):
    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    for owner in (hf_dspark.cli.models.AutoModelForCausalLM, hf_dspark.cli.models.DSparkForCausalLM):
        monkeypatch.setattr(owner, "from_pretrained", load)
    monkeypatch.setattr(hf_dspark.cli.models, "setup_demo", load)


def test_swapped_models(folders, capsys, no_loading):
    message = refused(["generate", "abc", "--target", folders[1], "--draft", folders[0]], capsys)
    assert "swap the two" in message and folders[0] in message and folders[1] in message


def test_a_draft_as_target(folders, capsys, no_loading):
    assert "pass it as `--draft`" in refused(["generate", "abc", "--target", folders[1]], capsys)
    assert "pass it as `--draft`" in refused(["generate", "abc", "--target", folders[1], "--plain"], capsys)


def test_a_target_as_draft(folders, capsys, no_loading):
    assert "is not a DSpark draft" in refused(["generate", "abc", "--draft", folders[0]], capsys)


@pytest.mark.parametrize("which", [0, 1])
def test_the_same_model_twice(folders, which, capsys, no_loading):
    again = os.path.join(folders[which], ".")
    message = refused(["generate", "abc", "--target", folders[which], "--draft", again], capsys)
    assert "`--target` and `--draft` are both" in message


@pytest.mark.parametrize("argument", ["--target", "--draft"])
def test_a_missing_folder(argument, tmp_path, capsys, no_loading):
    missing = str(tmp_path / "nowhere")
    assert f"`{argument} {missing}`: there is no such folder" in refused(["generate", "abc", argument, missing], capsys)
    assert f"`{argument} {tmp_path}` has no" in refused(["generate", "abc", argument, str(tmp_path)], capsys)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "Give a prompt"),
        (["abc", "--temperature", "0.5"], "add `--do-sample`"),
        (["abc", "--top-k", "5"], "add `--do-sample`"),
        (["abc", "--plain", "--num-assistant-tokens", "2"], "about drafts"),
        (["abc", "--json", "/no/such/folder/x.json"], "`--json /no/such/folder/x.json`"),
    ],
)
def test_options_without_effect(arguments, words, capsys, no_loading):
    assert words in refused(["generate", *arguments], capsys)


def test_errors_of_generate_are_one_sentence(pair, capsys):
    assert "1..4" in refused(["generate", "abc", *pair, "--num-assistant-tokens", "5"], capsys)
    assert "[0, 1]" in refused(["generate", "abc", *pair, "--assistant-confidence-threshold", "1.5"], capsys)


def test_unknown_flags_and_verbs(capsys):
    assert run(["generate", "abc", "--bogus"], capsys)[0] == 2
    assert run(["bogus"], capsys)[0] == 2


def test_system_prompt_without_a_chat_template(folders, pair, capsys, monkeypatch):
    monkeypatch.setattr(hf_dspark.cli.models.AutoTokenizer, "from_pretrained", lambda name: tiny.tokenizer())
    monkeypatch.setattr(tiny.tokenizer(), "chat_template", None, raising=False)
    assert "no chat template" in refused(["generate", "abc", *pair, "--system", "z"], capsys)
    code, out, _ = run(["generate", "abc", *pair, "--max-new-tokens", "5"], capsys)
    assert code == 0 and out.strip() == text_after("abc", 5)


# ---- the other verbs


def test_inspect_shows_and_writes_what_was_decided(folders, tmp_path, capsys):
    path = tmp_path / "inspect.json"
    code, out, _ = run(["inspect", folders[1], "--json", str(path)], capsys)
    assert code == 0 and "anchor-first" in out and "vanilla, rank 64" in out
    result = json.loads(path.read_text())
    assert result["num_draft_tokens"] == 4 and result["hidden_states_indices"] == [1, 3, 5]
    assert result["target_layer_ids"] == [0, 2, 4] and result["mask_token_id"] == 63
    assert result["confidence_head"] == "none" and result["dtype"] == ["F32"]
    draft = hf_dspark.DSparkForCausalLM.from_pretrained(folders[1])
    assert result["num_parameters"] == draft.num_parameters()
    for what, why in draft.config.resolution.items():
        assert result["resolution"][what] == why and what in out


def test_inspect_shows_shared_embeddings(capsys):
    code, out, _ = run(["inspect", str(default_pair.default_draft_folder())], capsys)
    assert code == 0 and out.count("shared with the target") == 2 and "2, 9, 15, 22, 28" in out


def test_inspect_shows_the_memory_of_the_fast_path(folders, tmp_path, capsys, no_loading):
    path = tmp_path / "inspect.json"
    code, out, _ = run(["inspect", folders[1], "--target", folders[0], "--json", str(path)], capsys)
    assert code == 0 and "target: 3,072 bytes a token and row" in out and "draft: 256 bytes" in out
    memory = json.loads(path.read_text())["memory"]
    assert memory["dtype"] == "torch.float32" and memory["target"] == folders[0]
    for total, rows in zip(memory["totals"], (1, 8, 32), strict=True):
        assert total["bytes"] == (rows + 1) * 4096 * (3072 + 256)
        assert f"{rows} x 4096: {total['bytes'] / 2**30:.2f} GiB" in out


def test_inspect_refuses_a_target_that_does_not_fit(folders, tmp_path, capsys):
    assert "is a DSpark draft" in refused(["inspect", folders[1], "--target", folders[1]], capsys)
    missing = str(tmp_path / "nowhere")
    assert "no such folder" in refused(["inspect", folders[1], "--target", missing], capsys)
    tiny.random_target("qwen3", hidden_size=32).config.save_pretrained(tmp_path)
    assert "width 64" in refused(["inspect", folders[1], "--target", str(tmp_path)], capsys)


def test_inspect_refuses_other_folders(folders, tmp_path, capsys):
    assert "is not a DSpark draft" in refused(["inspect", folders[0]], capsys)
    assert "config.json" in refused(["inspect", str(tmp_path)], capsys)


def test_setup_demo(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(default_pair, "setup_demo", lambda: tmp_path)
    code, out, _ = run(["setup-demo"], capsys)
    assert code == 0 and str(tmp_path) in out.replace("\n", "")

    def fail():
        raise default_pair.SetupError("no network")

    monkeypatch.setattr(default_pair, "setup_demo", fail)
    code, out, err = run(["setup-demo"], capsys)
    assert code == 1 and not out and "Error: no network" in err


@pytest.mark.slow
def test_generate_with_the_embedded_pair(capsys):
    if not default_pair.is_prepared():
        pytest.skip("the embedded target is not prepared: run `hf-dspark setup-demo`")
    question = "Janet has 3 apples. She buys 4 more. How many apples does she have now?"
    code, drafted, err = run(["generate", question, "--max-new-tokens", "40"], capsys)
    assert code == 0 and "τ" in err
    code, plain, _ = run(["generate", question, "--max-new-tokens", "40", "--plain"], capsys)
    assert code == 0 and plain == drafted
