"""`Session`: each turn is the text of plain generate() on the whole history; what is in a cache is not fed again."""

import copy
import random
import threading

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    MambaConfig,
    MambaForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

import checks
import hf_dspark
import oracle
import tiny
from hf_dspark._compat import CACHE_KEY

PROMPT = [5, 9, 11, 3, 8]
FAMILIES = ["qwen3", "qwen3_sliding", "mistral", "gemma3_text", "gemma2", "gpt_neox", "gpt2"]
STATIC = {"cache_implementation": "static"}


def pair(family: str = "qwen3", gamma: int = 4):
    files = tiny.guided_files(torch.zeros(tiny.V, tiny.V), taps=(0, 2), gamma=gamma)
    return tiny.random_target(family, layers=3), tiny.load_draft(*files), oracle.Oracle(*files)


def teach(draft, slow, text: list[int]) -> None:
    table = tiny.text_table(text)
    tiny.set_table(draft, table)
    slow.tensors["markov_head.markov_w2.weight"] = table.T.clone()


def turn(session, text: list[int], slow=None, **options):
    """One call, compared with plain generate() on the same ids: (whole text, statistics)."""
    options = {"max_new_tokens": 8, "do_sample": False} | options
    plain_options = {name: value for name, value in options.items() if name != "cache_implementation"}
    expected = session.target.generate(checks.tensor(text), **plain_options)[0].tolist()
    if slow is not None:
        teach(session.draft, slow, expected)
    with hf_dspark.record() as stats:
        found = session.generate(checks.tensor(text), **options)[0].tolist()
    assert found == expected
    if slow is not None:
        checks.rounds_match(stats, slow, session.target, found)
        assert stats.num_accepted > 0 or options["max_new_tokens"] < 6
    return found, stats


@pytest.mark.parametrize("static", [{}, STATIC], ids=["plain", "ragged"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_growing_history_feeds_only_what_is_new(family, static):
    target, draft, slow = pair(family)
    session, text, held = hf_dspark.Session(target, draft), PROMPT, 0
    for i in range(4):
        text, stats = turn(session, text, slow, **static)
        assert stats.path == ("ragged" if static else "plain")
        assert stats.num_reused == held
        held = len(text) - 1  # all but the last token, which is the next anchor
        text = [*text, 20 + i, 31]


@pytest.mark.parametrize("static", [{}, STATIC], ids=["plain", "ragged"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_sliding", "gemma3_text"])
def test_an_edited_history_keeps_the_common_prefix(family, static):
    """Cut short, changed in the middle, extended again, the same once more, another text altogether."""
    target, draft, slow = pair(family)
    session = hf_dspark.Session(target, draft)
    text, _ = turn(session, PROMPT, slow, max_new_tokens=14, **static)
    for edited, reused in (
        (text[:12], 11),  # the last token of a prompt is always fed
        (text[:7] + [40, 41, 42], 7),
        (text[:7] + [40, 41, 42], 9),
        ([7, 7, 7], 0),
        (PROMPT, 0),
    ):
        _, stats = turn(session, edited, slow, **static)
        assert stats.num_reused == reused


@pytest.mark.parametrize("static", [{}, STATIC], ids=["plain", "ragged"])
def test_random_histories(static):
    target, draft, slow = pair("qwen3_sliding")
    rng = random.Random(4)
    session, text = hf_dspark.Session(target, draft), PROMPT
    for _ in range(12):
        text, _ = turn(session, text, slow, max_new_tokens=rng.randint(1, 9), **static)
        cut = rng.choice([len(text), len(text), rng.randint(1, len(text))])
        text = text[:cut] + [rng.randrange(1, 62) for _ in range(rng.randint(cut == 0, 3))]


def test_the_target_is_fed_only_what_is_new():
    target, draft, _ = pair()
    session = hf_dspark.Session(target, draft)
    text, _ = turn(session, PROMPT)
    with checks.CallCounter(target) as calls:
        session.generate(checks.tensor([*text, 40, 41]), max_new_tokens=2, do_sample=False)
    assert calls.shapes[0] == (1, 3)


def test_without_a_draft():
    target, _, _ = pair("qwen3_sliding")
    session = hf_dspark.Session(target)
    text = session.generate(checks.tensor(PROMPT), max_new_tokens=8, do_sample=False)[0].tolist()
    edited = [*text[:9], 50]
    with checks.CallCounter(target) as calls:
        found = session.generate(checks.tensor(edited), max_new_tokens=5, do_sample=False)
    assert calls.shapes[0] == (1, 1)
    assert found.tolist() == checks.plain(target, edited, max_new_tokens=5).tolist()


@pytest.mark.parametrize("static", [{}, STATIC], ids=["plain", "ragged"])
def test_branches_do_not_meet(static):
    target, draft, slow = pair()
    session = hf_dspark.Session(target, draft)
    text, _ = turn(session, PROMPT, slow, **static)
    branch = session.fork()
    one, stats = turn(session, [*text, 40], slow, **static)
    assert stats.num_reused == len(text) - 1
    other, stats = turn(branch, [*text, 41], slow, **static)
    assert stats.num_reused >= len(text) - 1
    turn(session, [*one, 42], slow, **static)
    turn(branch, [*other, 42], slow, **static)


def test_rows_of_a_batch_keep_their_own():
    target, draft, _ = pair("qwen3_sliding")
    session = hf_dspark.Session(target, draft)
    rows = [[5, 9], [3, 8, 30, 31, 17], [40]]
    for i in range(3):
        inputs = checks.batch(rows) | {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        expected = target.generate(**inputs)
        with hf_dspark.record() as stats:
            assert session.generate(**inputs).tolist() == expected.tolist()
        assert stats.num_reused == (sum(len(row) - 2 for row in rows) if i else 0)
        rows = [[*row, *new, 20 + i] for row, new in zip(rows, expected[:, -6:].tolist(), strict=True)]


def test_other_calls_of_the_pair_neither_use_nor_spoil_what_a_session_holds():
    target, draft, slow = pair()
    session = hf_dspark.Session(target, draft)
    text, _ = turn(session, PROMPT, slow, **STATIC)
    _, stats, _ = checks.batch_equals_plain(target, draft, [text], max_new_tokens=3, **STATIC)
    assert stats.num_reused == 0, "a call outside a session computes everything itself"
    checks.batch_equals_plain(target, draft, [[7, 7, 7]] * 3, max_new_tokens=3)
    _, stats = turn(session, [*text, 40], slow, **STATIC)
    assert stats.num_reused == 0


def test_weights_that_change_need_a_reset():
    target, draft, _ = pair()
    target = copy.deepcopy(target)
    session = hf_dspark.Session(target, draft)
    for static in ({}, STATIC):
        text, _ = turn(session, PROMPT, **static)
        with torch.no_grad():
            target.model.layers[0].self_attn.v_proj.weight.mul_(-1)
        session.reset()
        _, stats = turn(session, [*text, 3], **static)
        assert stats.num_reused == 0


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_layers_with_a_state_only_go_forward(family):
    target, draft, _ = pair(family)
    session = hf_dspark.Session(target, draft)
    text, _ = turn(session, PROMPT)
    text, stats = turn(session, [*text, 4])
    assert stats.num_reused == len(text) - 10
    _, stats = turn(session, [*text[:9], 50])
    assert stats.num_reused == 0


def test_a_target_without_attention_goes_forward():
    config = MambaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=6, state_size=4, eos_token_id=None)
    session = hf_dspark.Session(MambaForCausalLM(config).eval(), tiny.perm_draft())
    text, _ = turn(session, PROMPT)
    turn(session, [*text, 4])
    turn(session, text[:9])


class Bomb(StoppingCriteria):
    """Raises once the text has `length` tokens."""

    def __init__(self, length: int, error: BaseException):
        self.length, self.error = length, error

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] >= self.length:
            raise self.error
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("static", [{}, STATIC], ids=["plain", "ragged"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("user code failed")])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_sliding", "lfm2"])
def test_an_interrupted_answer_leaves_the_session_right(family, error, static):
    target, draft, slow = pair(family)
    slow = None if family == "lfm2" else slow  # plain only, and its oracle would have to know convolutions
    session = hf_dspark.Session(target, draft)
    text, _ = turn(session, PROMPT, slow, **static)
    for length in range(1, 6):
        longer = [*text, 40, 41]
        bomb = StoppingCriteriaList([Bomb(len(longer) + length, error)])
        with pytest.raises(type(error)):
            session.generate(
                checks.tensor(longer), stopping_criteria=bomb, max_new_tokens=20, do_sample=False, **static
            )
        _, stats = turn(session, [*longer[:-1], 50 + length], slow, **static)
        if not static and family != "lfm2":
            assert stats.num_reused == len(longer) - 1, "the prompt is kept"


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_sliding", "qwen3_next"])
@pytest.mark.parametrize("layer, forward", [(0, 1), (2, 1), (1, 2), (2, 3), (1, 4)])
def test_an_interrupt_inside_a_forward(family, layer, forward, draft, first):
    """Also in the middle of a prompt that goes by chunks, when some layers hold a chunk and others do not."""
    target, draft_model, _ = pair(family)
    target = copy.deepcopy(target)
    session = hf_dspark.Session(target, draft_model if draft else None)
    text, _ = turn(session, PROMPT)
    calls = [0]

    def interrupt(module, inputs):
        calls[0] += 1
        if calls[0] == forward:
            raise KeyboardInterrupt

    if first:  # of the session: some layers are not there yet
        session.reset()
    longer = [*text, *range(30, 37)]
    handle = target.model.layers[layer].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.generate(checks.tensor(longer), prefill_chunk_size=3, max_new_tokens=9, do_sample=False)
    handle.remove()
    turn(session, [*longer, 50])


@pytest.mark.parametrize("draft", [True, False])
def test_chunks_where_transformers_knows_none_behind_a_cache(draft, monkeypatch):
    """Before 5.21 it would feed the whole text again, behind what the cache holds."""
    for module in (hf_dspark.session, hf_dspark.generation.loop):
        monkeypatch.setattr(module, "CHUNKS_BEHIND_TOKENS", False)
    target, draft_model, _ = pair()
    lengths, forward = [], type(target).forward

    def watched(self, input_ids=None, **inputs):
        lengths.append(input_ids.shape[1])
        return forward(self, input_ids=input_ids, **inputs)

    session = hf_dspark.Session(target, draft_model if draft else None)
    text, _ = turn(session, PROMPT, prefill_chunk_size=2)
    with monkeypatch.context() as patch:
        patch.setattr(type(target), "forward", watched)
        turn(session, [*text, *range(30, 50)], prefill_chunk_size=4)
    assert 21 in lengths, "the rest in one"


def test_chunks_into_a_cache_of_the_callers_where_transformers_knows_none(monkeypatch):
    monkeypatch.setattr(hf_dspark.generation.loop, "CHUNKS_BEHIND_TOKENS", False)
    target, draft, _ = pair()
    ids = checks.tensor(range(5, 25))
    plain = target.generate(ids, max_new_tokens=8, do_sample=False)
    cache = DynamicCache()
    target(ids[:, :9], **{CACHE_KEY: cache})
    output, stats = checks.generate(
        target, draft, ids, max_new_tokens=8, prefill_chunk_size=4, **{CACHE_KEY: cache}, return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, plain) and "one forward" in stats.reason


def test_padding_is_part_of_the_history():
    target, draft, _ = pair()
    session = hf_dspark.Session(target, draft)
    inputs = {"input_ids": torch.tensor([[1, 1, *PROMPT]]), "attention_mask": torch.tensor([[0, 0] + [1] * 5])}
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = target.generate(**inputs, **options)
    assert session.generate(**inputs, **options).tolist() == expected.tolist()
    longer = expected[0].tolist() + [3]
    mask = torch.tensor([[0, 0] + [1] * (len(longer) - 2)])
    with hf_dspark.record() as stats:
        found = session.generate(checks.tensor(longer), attention_mask=mask, **options)
    assert found.tolist() == target.generate(checks.tensor(longer), attention_mask=mask, **options).tolist()
    assert stats.num_reused == len(longer) - 4
    with hf_dspark.record() as stats:  # the same ids, but not the same text
        found = session.generate(checks.tensor(longer), **options)
    assert found.tolist() == target.generate(checks.tensor(longer), **options).tolist() and stats.num_reused == 0


@pytest.mark.parametrize("place", ["option", "config", "target"])
@pytest.mark.parametrize("kind, path", [("static", "ragged"), ("dynamic", "plain"), (None, "plain")])
def test_where_a_cache_is_asked_for(kind, path, place):
    target, draft, _ = pair()
    session = hf_dspark.Session(copy.deepcopy(target), draft)
    options, config = {"max_new_tokens": 5, "do_sample": False}, GenerationConfig(cache_implementation=kind)
    if place == "target":
        session.target.generation_config.cache_implementation = kind
    options |= {"option": {"cache_implementation": kind}, "config": {"generation_config": config}}.get(place, {})
    for ids in (PROMPT, [*PROMPT, 4]):
        with hf_dspark.record() as stats:
            found = session.generate(checks.tensor(ids), **options)
        assert found.tolist() == checks.plain(target, ids, max_new_tokens=5).tolist()
        assert stats.path == path
    assert stats.num_reused == len(PROMPT)


def test_a_pad_token_in_the_text_is_text():
    """generate() without a mask takes pad tokens for padding; those of an earlier answer are none."""
    target, draft, _ = pair()
    text = checks.plain(target, PROMPT, max_new_tokens=9)[0].tolist()
    for static in ({}, STATIC):
        session = hf_dspark.Session(target, draft)
        for ids in (PROMPT, text[:12], [*text, 4]):
            options = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": text[7]}
            mask = torch.ones(1, len(ids), dtype=torch.long)
            expected = target.generate(checks.tensor(ids), attention_mask=mask, **options)
            assert session.generate(checks.tensor(ids), **options, **static).tolist() == expected.tolist()


def test_sampling_goes_on_and_dicts_come_back():
    target, draft, _ = pair()
    session = hf_dspark.Session(target, draft)
    torch.manual_seed(0)
    first = session.generate(checks.tensor(PROMPT), max_new_tokens=9, do_sample=True, return_dict_in_generate=True)
    longer = torch.cat((first.sequences, torch.tensor([[4]])), dim=1)
    second = session.generate(longer, max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
    assert second.sequences.tolist() == checks.plain(target, longer, max_new_tokens=9).tolist()
    assert second.speculation.num_reused == 13


class Chat:
    def __init__(self):
        self.target, self.draft = tiny.perm_target(), tiny.perm_draft()
        self.tokenizer = copy.deepcopy(tiny.tokenizer())
        self.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        self.session = hf_dspark.Session(self.target, self.draft, self.tokenizer)

    def answer(self, message: str, length: int) -> str:
        return self.tokenizer.decode(tiny.chain(self.tokenizer(message).input_ids[-1], length))


def test_a_chat():
    chat = Chat()
    session, options = chat.session, {"max_new_tokens": 5}
    assert session.send("abc", **options) == chat.answer("abc", 5)
    with hf_dspark.record() as stats:
        assert session.send("de", **options) == chat.answer("de", 5)
    assert stats.num_reused == 7 and [m["role"] for m in session.messages] == ["user", "assistant"] * 2
    branch = session.fork()
    del session.messages[2:]
    assert session.send("x", **options) == chat.answer("x", 5) and len(session.messages) == 4
    assert branch.messages[2]["content"] == "de"
    bomb = StoppingCriteriaList([Bomb(1, KeyboardInterrupt())])
    kept = copy.deepcopy(session.messages)
    with pytest.raises(KeyboardInterrupt):
        session.send("never", stopping_criteria=bomb, **options)
    assert session.messages == kept and session.send("y", **options) == chat.answer("y", 5)


def test_what_a_session_refuses():
    chat = Chat()
    ids = checks.tensor(PROMPT)
    for name in ("past_key_values", "inputs_embeds", "pixel_values", "position_ids"):
        with pytest.raises(ValueError, match=name):
            chat.session.generate(ids, **{name: torch.zeros(1, 5, 64)})
    for kind in ("quantized", "offloaded", "offloaded_static"):
        with pytest.raises(ValueError, match=f"cache_implementation='{kind}'"):
            chat.session.generate(ids, cache_implementation=kind)
    for wrong in ([PROMPT], ids[0], ids[:, :0]):
        with pytest.raises(ValueError, match=r"`input_ids` must be a tensor of token ids \[B, S\]"):
            chat.session.generate(wrong)
    with pytest.raises(ValueError, match=r"`attention_mask` must have the shape.*\[1, 5\], got \[1, 7\]"):
        chat.session.generate(ids, attention_mask=torch.ones(1, 7))
    with pytest.raises(ValueError, match="chat template"):
        hf_dspark.Session(chat.target, chat.draft, tiny.tokenizer()).send("abc")
    with pytest.raises(ValueError, match="chat template"):
        hf_dspark.Session(chat.target, chat.draft).send("abc")


@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("place", ["option", "config"])
def test_what_would_leave_other_caches_is_refused(place, draft):
    """Beams and several texts leave a cache of several rows; without a cache plain decoding lost the whole text."""
    target, drafting, _ = pair()
    session = hf_dspark.Session(target, drafting if draft else None)
    text, _ = turn(session, PROMPT)
    for name, value in {"num_beams": 2, "num_return_sequences": 3, "use_cache": False}.items():
        options = {name: value}
        options = options if place == "option" else {"generation_config": GenerationConfig(do_sample=True, **options)}
        with pytest.raises(ValueError, match=f"Drop `{name}={value}`"):
            session.generate(checks.tensor(text), do_sample=True, max_new_tokens=4, **options)
    _, stats = turn(session, [*text, 9])
    assert not draft or stats.num_reused == len(text) - 1


@pytest.mark.parametrize("draft", [True, False])
def test_a_target_that_is_told_to_keep_no_cache(draft):
    """As training leaves it: the session's cache is used all the same."""
    target, drafting, _ = pair()
    target = copy.deepcopy(target)
    session, text = hf_dspark.Session(target, drafting if draft else None), PROMPT
    for _ in range(3):
        target.generation_config.use_cache = True
        expected = target.generate(checks.tensor(text), max_new_tokens=6, do_sample=False)[0].tolist()
        target.generation_config.use_cache = target.config.use_cache = False
        assert session.generate(checks.tensor(text), max_new_tokens=6, do_sample=False)[0].tolist() == expected
        assert len(session._held) == len(expected) - 1
        text = [*expected, 9]


class Nested(StoppingCriteria):
    def __init__(self, run):
        self.run = run

    def __call__(self, input_ids, scores, **kwargs):
        self.run()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def test_one_call_at_a_time_and_a_session_for_each_thread():
    target, draft, _ = pair()
    session = hf_dspark.Session(target, draft)
    nested = StoppingCriteriaList([Nested(lambda: session.generate(checks.tensor([3]), max_new_tokens=2))])
    with pytest.raises(ValueError, match="generating already"):
        session.generate(checks.tensor(PROMPT), stopping_criteria=nested, max_new_tokens=4)
    turn(session, PROMPT)

    def work(session, start, texts):
        text = [start, 9]
        for i in range(3):
            text = session.generate(checks.tensor(text), max_new_tokens=6, do_sample=False)[0].tolist() + [20 + i]
            texts.append(text)

    found = [[] for _ in range(4)]
    threads = [
        threading.Thread(target=work, args=(hf_dspark.Session(target, draft), i + 1, texts))
        for i, texts in enumerate(found)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, texts in enumerate(found):
        text = [i + 1, 9]
        for j, one in enumerate(texts):
            text = checks.plain(target, text, max_new_tokens=6)[0].tolist() + [20 + j]
            assert one == text
        assert len(texts) == 3


@pytest.mark.slow
def test_a_chat_with_the_embedded_pair():
    """The template writes the history again at each turn; what it has in common with the cache is the whole of it."""
    target, draft, tokenizer = hf_dspark.load_default_pair()
    options = {"max_new_tokens": 16, "do_sample": False}
    for static in ({}, STATIC):
        session, reused = hf_dspark.Session(target, draft, tokenizer), []
        for message in ("What is 3 + 4?", "And plus 5?"):
            with hf_dspark.record() as stats:
                reply = session.send(message, **options, **static)
            reused.append(stats.num_reused)
            assert stats.num_accepted > 0
        inputs = tokenizer.apply_chat_template(
            session.messages[:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        length = inputs["input_ids"].shape[1]
        expected = target.generate(**inputs, **options)[0, length:]
        assert reply == tokenizer.decode(expected, skip_special_tokens=True)
        assert reused[0] == 0 and reused[1] > length / 2
