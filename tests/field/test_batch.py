"""BATCH: rows of any length in one call, each as plain generate gives it, or one clear refusal before any forward."""

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

import checks
import hf_dspark
import tiny
from hf_dspark._compat import CACHE_KEY
from hf_dspark.generation.twin import Twin

FIVE, TWELVE = [7, 21, 40, 3, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
ROWS = [FIVE, TWELVE, [40], [8, 30]]
FAMILIES = ("qwen3", "llama", "qwen3_sliding", "mistral", "gemma2", "gemma3_text")


def texts_of(target, rows=ROWS, new=20, **options) -> list[list[int]]:
    """What plain generate makes of each row alone, prompt included."""
    return [checks.plain(target, row, max_new_tokens=new, **options)[0].tolist() for row in rows]


def led(family: str, rows=ROWS, **settings):
    """A target and a draft that knows the rows' texts; a token that two rows continue differently costs drafts."""
    target = tiny.random_target(family, layers=3)
    table = torch.zeros(tiny.V, tiny.V)
    for text in texts_of(target, rows):
        own = tiny.text_table(text)
        table = torch.where(own.any(-1, keepdim=True), own, table)
    return target, tiny.markov_draft(table, **({"taps": (0, 1)} | settings))


# ---- BATCH-2: mixed lengths, mixed acceptance


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_2_each_row_equals_its_own_single_run(family):
    target, draft = led(family)
    new, stats, _ = checks.batch_equals_plain(target, draft, ROWS)
    assert [[*row, *tokens] for row, tokens in zip(ROWS, new, strict=True)] == texts_of(target)
    assert 0 < stats.num_accepted < stats.num_verified
    for row, tokens in zip(ROWS, new, strict=True):
        for options in ({}, {"cache_implementation": "static"}):
            output, _ = checks.generate(target, draft, row, pad_token_id=0, **options)
            assert output[0, len(row) :].tolist() == tokens


def test_batch_2_accept_counts_differ_in_each_round():
    """Rows of T-perm on one scripted cycle: the counts of a row are known from where it stands, alone or not."""
    target, draft = tiny.perm_target(), tiny.scripted_draft([0, 1, 2, 3, 4] * 3, 5)
    rows = [[3, 5], [*TWELVE, tiny.chain(5, 3)[-1]], [5] * 5]
    _, stats, _ = checks.batch_equals_plain(target, draft, rows, max_new_tokens=30)
    counts = [[r.accepted for r in stats.rounds if r.row == row] for row in range(3)]
    for row, found in zip(rows, counts, strict=True):
        _, alone = checks.equal_to_plain(target, draft, row, max_new_tokens=30)
        assert found == [r.accepted for r in alone.rounds]
    assert any(len(set(step)) > 1 for step in zip(*counts, strict=False))


def test_batch_2_the_pair_still_works_for_a_single_prompt():
    target, draft = led("qwen3")
    checks.batch_equals_plain(target, draft, ROWS)
    checks.equal_to_plain(target, draft, FIVE)
    checks.batch_equals_plain(target, draft, ROWS[:2])
    checks.batch_equals_plain(target, draft, [TWELVE], cache_implementation="static")


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_batch_2_every_head_and_depth_of_drafts(head):
    """Proposals of a row depend on its own context only: as many drafts are accepted as in its single run."""
    target = tiny.random_target("qwen3", layers=3)
    table = torch.zeros(tiny.V, tiny.V)
    for text in texts_of(target):
        table += tiny.text_table(text, scale=12.0)
    draft = tiny.load_draft(*tiny.guided_files(table, layers=2, taps=(-1, 0, 1), head=head, num_key_value_heads=4))
    _, stats, _ = checks.batch_equals_plain(target, draft, ROWS)
    for index, row in enumerate(ROWS):
        _, alone = checks.equal_to_plain(target, draft, row)
        found = [r for r in stats.rounds if r.row == index]
        for here, there in zip(found, alone.rounds, strict=True):
            assert (here.position, here.draft_tokens, here.verified, here.accepted) == (
                there.position, there.draft_tokens, there.verified, there.accepted,
            )  # fmt: skip
            torch.testing.assert_close(here.confidence, there.confidence, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(here.survival, there.survival, atol=1e-4, rtol=1e-4)


def test_batch_2_rows_share_the_clock_of_a_step():
    _, stats, _ = checks.batch_equals_plain(tiny.perm_target(), tiny.perm_draft(), ROWS)
    steps = [stats.rounds[i : i + 4] for i in range(0, len(stats.rounds), 4)]
    for step in steps:
        assert [r.row for r in step] == [0, 1, 2, 3] and len({r.milliseconds for r in step}) == 1


# ---- options and masks of a batch


MASKS = {
    "holes": [[1, 0, 1, 1, 1], [0, 1, 1, 0, 1]], "right": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]],
    "both sides": [[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]], "one token": [[0, 0, 0, 0, 1], [1, 1, 1, 1, 1]],
    "none": None,
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_batch_masks_are_plain_generates_business(name):
    """Padding inside or on the right gives what plain generate gives, or a refusal that says how to pad."""
    target, draft = led("qwen3")
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    if MASKS[name] is not None:
        options["attention_mask"] = torch.tensor(MASKS[name])
    ids = torch.tensor([FIVE, TWELVE[:5]])
    expected = target.generate(ids, **options)
    try:
        found = target.generate(ids, assistant_model=draft, **options)
    except ValueError as error:
        assert name in ("right", "both sides") and "left" in str(error)
        return
    assert found.tolist() == expected.tolist()


def test_batch_without_a_mask_pad_tokens_in_the_prompt_are_masked():
    target, draft = led("qwen3")
    ids = torch.tensor([[5, 5, 5, 7, 21], TWELVE[-5:]])
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 5, "eos_token_id": 62}
    expected = target.generate(ids, **options)
    output, stats = checks.generate(target, draft, ids, **options)
    assert output.tolist() == expected.tolist()
    assert [r.position for r in stats.rounds[:2]] == [2, 5]


def refused_or_equal(target, draft, ids, word: str, **options):
    """An argument the engine may not know: it is honoured, or the target goes alone, or an error names it."""
    make = options.pop("make", dict)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0} | options
    expected = target.generate(ids, **options, **make())
    with hf_dspark.record() as stats:
        try:
            output = target.generate(ids, assistant_model=draft, **options, **make())
        except ValueError as error:
            assert word in str(error)
            return
    assert output.tolist() == expected.tolist()
    assert stats.path == "ragged" or word in stats.reason


def test_batch_positions_of_the_caller_are_not_dropped_in_silence():
    target, draft = led("qwen3")
    positions = torch.tensor([[0, 1, 2, 40, 41], [0, 1, 2, 3, 4]])
    refused_or_equal(target, draft, torch.tensor([FIVE, TWELVE[:5]]), "position", position_ids=positions)


def test_batch_embeddings_as_prompt():
    target, draft = led("qwen3")
    embeds = target.get_input_embeddings()(torch.tensor([FIVE, TWELVE[:5]])).detach()
    refused_or_equal(target, draft, None, "embed", inputs_embeds=embeds)


def test_batch_with_a_filled_cache():
    target, draft = led("qwen3")
    ids = torch.tensor([FIVE, TWELVE[:5]])

    def make():
        cache = DynamicCache(config=target.config)
        with torch.no_grad():
            target(ids[:, :3], use_cache=True, **{CACHE_KEY: cache})
        return {CACHE_KEY: cache}

    refused_or_equal(target, draft, ids, "cache", make=make)


def test_batch_chunked_prefill():
    target, draft = led("qwen3_sliding")
    checks.batch_equals_plain(target, draft, ROWS, prefill_chunk_size=4)


@pytest.mark.parametrize("options,word", [
    ({"streamer": checks.ListStreamer()}, "streamer"), ({"num_return_sequences": 2, "do_sample": True}, "num_return"),
    ({"num_beams": 2}, "num_beams"), ({"num_assistant_tokens": 9}, "num_assistant_tokens"),
])  # fmt: skip
def test_batch_what_cannot_be_honoured_is_refused_before_any_forward(options, word):
    target, draft = tiny.random_target("qwen3"), tiny.perm_draft()
    with checks.CallCounter(target) as calls, pytest.raises(ValueError, match=word):
        checks.generate(target, draft, torch.tensor([FIVE, TWELVE[:5]]), pad_token_id=0, **options)
    assert not calls.shapes
    checks.batch_equals_plain(target, draft, ROWS)


@pytest.mark.parametrize("wanted", ["output_hidden_states", "output_attentions"])
def test_batch_what_the_ragged_path_does_not_keep(wanted):
    """Whole output of plain generate from the target alone with the reason, or a refusal that names the option."""
    target, draft = tiny.random_target("qwen3", layers=3, attention="eager"), tiny.random_draft(taps=(0, 1))
    batch = checks.batch([FIVE, TWELVE]) | {"pad_token_id": 0, "max_new_tokens": 9, "do_sample": False}
    options = {wanted: True, "return_dict_in_generate": True}
    try:
        output = target.generate(**batch, **options, assistant_model=draft)
    except ValueError as error:
        assert wanted in str(error)
    else:
        checks.same_outputs(output, target.generate(**batch, **options))
        assert output.speculation.path == "target_only" and wanted in output.speculation.reason


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_batch_layers_with_a_state_instead_of_keys(family):
    target, draft = tiny.random_target(family, layers=4), tiny.random_draft(taps=(0, 2))
    refused_or_equal(target, draft, torch.tensor([FIVE, TWELVE[:5]]), "")


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_batch_other_kinds_of_positions_and_attention(family):
    target, draft = led(family)
    ids = torch.tensor([[0] * 7 + FIVE, TWELVE])
    mask = torch.tensor([[0] * 7 + [1] * 5, [1] * 12])
    refused_or_equal(target, draft, ids, "", attention_mask=mask)


def test_batch_scores_and_logits_are_those_of_each_row():
    """Of rows that have ended, plain generate scores padding; only living rows are compared."""
    target, draft = led("qwen3")
    eos = texts_of(target)[0][9]
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "eos_token_id": eos,
               "repetition_penalty": 1.2}  # fmt: skip
    new, _, output = checks.batch_equals_plain(target, draft, ROWS, **options)
    expected = target.generate(**checks.batch(ROWS), max_new_tokens=20, do_sample=False, pad_token_id=0, **options)
    assert len(set(map(len, new))) > 1
    for name in ("scores", "logits"):
        ours, theirs = torch.stack(output[name]), torch.stack(expected[name])
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        for row, tokens in enumerate(new):
            torch.testing.assert_close(ours[: len(tokens), row], theirs[: len(tokens), row], atol=2e-4, rtol=2e-4)
    assert output.speculation.num_tokens == sum(map(len, new))


# ---- ends of rows


def test_batch_ended_rows_are_padded_and_cost_no_verify_tokens(monkeypatch):
    target, draft = tiny.perm_target(), tiny.perm_draft()
    eos = tiny.chain(9, 3)[-1]
    checks.batch_equals_plain(target, draft, ROWS, max_new_tokens=24)  # builds what the pair keeps
    widths, original = [], Twin.forward

    def count(self, ids, *args):
        widths.append(ids.shape[-1])
        return original(self, ids, *args)

    monkeypatch.setattr(Twin, "forward", count)
    new, stats, output = checks.batch_equals_plain(target, draft, ROWS, eos_token_id=eos, max_new_tokens=24)
    assert len(new[0]) == 3 and max(map(len, new)) == 24
    assert sum(widths) == sum(map(len, ROWS)) + sum(1 + r.verified for r in stats.rounds)
    assert output[0, 12 + 3 :].eq(0).all()


@pytest.mark.parametrize("eos,pad", [(tiny.chain(9, 3)[-1], None), (tiny.chain(9, 3)[-1], 62), ([61, 9], 1), (None, 0)])
def test_batch_padding_token(eos, pad):
    """Without one, plain generate takes the (first) end-of-text id."""
    target, draft = tiny.perm_target(), tiny.perm_draft()
    batch = checks.batch(ROWS)
    options = {"max_new_tokens": 15, "do_sample": False, "eos_token_id": eos, "pad_token_id": pad}
    expected = target.generate(**batch, **options)
    assert target.generate(**batch, assistant_model=draft, **options).tolist() == expected.tolist()


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6, 11])
@pytest.mark.parametrize("drafts", [tiny.perm_draft, tiny.bad_draft])
def test_batch_length_limits(limit, drafts):
    new, stats, _ = checks.batch_equals_plain(tiny.perm_target(), drafts(), ROWS, max_new_tokens=limit)
    assert [len(row) for row in new] == [limit] * 4
    assert stats.num_rounds == 4 * (-(-(limit - 1) // 5) if drafts is tiny.perm_draft else limit - 1)
    output, _ = checks.generate(tiny.perm_target(), drafts(), max_length=12 + limit, **prompts())
    assert output.shape[1] == 12 + limit


def prompts():
    batch = checks.batch(ROWS)
    return {"ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "pad_token_id": 0}


class EndsByRow(StoppingCriteria):
    """A caller's criterion with a length for each row, counted from the end of the prompt."""

    def __init__(self, lengths: list[int], width: int):
        self.lengths, self.width = torch.tensor(lengths), width

    def __call__(self, input_ids, scores, **kwargs):
        assert input_ids.shape[0] == len(self.lengths)
        return input_ids.shape[1] - self.width >= self.lengths


class EndsAfter(StoppingCriteria):
    """A caller's criterion that looks at text: ends a row behind one of these tokens."""

    def __init__(self, tokens: list[int]):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.tokens)


@pytest.mark.parametrize("eos", [61, None])
@pytest.mark.parametrize("kind", ["row", "token"])
def test_batch_a_callers_criterion_ends_single_rows(kind, eos):
    """With an end-of-text id in play plain generate pads ended rows; without one it lets them go on till all ended."""
    target, draft = tiny.perm_target(), tiny.scripted_draft([2, 4, 0, 3], 5)
    lengths = [3, 12, 1, 7]
    if kind == "row":
        make = lambda: {"stopping_criteria": StoppingCriteriaList([EndsByRow(lengths, 12)])}  # noqa: E731
    else:
        ends = [tiny.chain(row[-1], n)[-1] for row, n in zip(ROWS, lengths, strict=True)]
        make = lambda: {"stopping_criteria": StoppingCriteriaList([EndsAfter(ends)])}  # noqa: E731
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": eos}
    batch = checks.batch(ROWS)
    expected = target.generate(**batch, **options, **make())
    output = target.generate(**batch, **options, **make(), assistant_model=draft)
    assert output.tolist() == expected.tolist()


def test_batch_stop_strings():
    target, draft, tokenizer = tiny.perm_target(), tiny.perm_draft(), tiny.tokenizer()
    ends = [tokenizer.decode(tiny.chain(row[-1], 2 + 3 * i)[-2:]) for i, row in enumerate(ROWS[:3])]
    for eos in (61, None):
        options = {"stop_strings": ends, "eos_token_id": eos, "max_new_tokens": 24, "do_sample": False}
        batch = checks.batch(ROWS) | {"pad_token_id": 0, "tokenizer": tokenizer}
        expected = target.generate(**batch, **options)
        output = target.generate(**batch, **options, assistant_model=draft)
        assert output.tolist() == expected.tolist()


# ---- processors of a batch


class ByLengthAndRow(LogitsProcessor):
    """Depends on everything plain generate shows: how many rows, which row, how wide the text is, its last token."""

    def __init__(self, num_rows: int):
        self.num_rows, self.shapes = num_rows, set()

    def __call__(self, input_ids, scores):
        self.shapes.add((tuple(input_ids.shape), tuple(scores.shape)))
        assert input_ids.shape[0] == scores.shape[0] == self.num_rows
        rows = torch.arange(self.num_rows)
        banned = (7 * rows + 3 * input_ids.shape[1] + input_ids[:, -1]) % tiny.V
        return scores.scatter(-1, banned[:, None], -torch.inf)


@pytest.mark.parametrize("safe", [False, True])
def test_batch_a_callers_processor_sees_what_plain_generate_shows(safe):
    target, draft = led("qwen3")

    def make():
        processor = ByLengthAndRow(4)
        processor.draft_safe = safe
        return {"logits_processor": LogitsProcessorList([processor])}

    _, stats, _ = checks.batch_equals_plain(target, draft, ROWS, make, eos_token_id=[30, 31, 32, 33, 34])
    assert 0 < stats.num_accepted < stats.num_verified


class Prefixes(LogitsProcessor):
    """Notes the text that each row's own scores were processed with: rows are told apart by what they begin with."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        return scores


def test_batch_a_callers_processor_is_never_shown_unconfirmed_drafts():
    target, processor = tiny.perm_target(), Prefixes()
    draft = tiny.scripted_draft([0, 1, 2, 3, 4], 5)
    make = lambda: {"logits_processor": LogitsProcessorList([processor])}  # noqa: E731
    new, _, _ = checks.batch_equals_plain(target, draft, ROWS, make)
    texts = [[0] * (12 - len(row)) + row + tokens for row, tokens in zip(ROWS, new, strict=True)]
    shown = {tuple(row) for call in processor.seen for row in call}
    for row in shown:
        stripped = list(row)
        while stripped and stripped[0] == 0:
            stripped.pop(0)
        assert any("".join(map(chr, stripped)) in "".join(map(chr, text)) for text in texts), "text of no row"
    for text in texts:
        assert all(tuple(text[:length]) in shown for length in range(12, len(text)))


OPTIONS = {
    "repetition_penalty": {"repetition_penalty": 1.8}, "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "encoder_repetition": {"encoder_repetition_penalty": 1.5}, "bad_words": {"bad_words_ids": [[36], [49, 1]]},
    "sequence_bias": {"sequence_bias": [[[41], 6.0], [[49, 36], -9.0]]}, "forced_eos": {"forced_eos_token_id": 12},
    "begin_suppress": {"begin_suppress_tokens": [2, 24]}, "min_length": {"eos_token_id": [49, 12], "min_length": 20},
    "decay": {"eos_token_id": 12, "exponential_decay_length_penalty": (4, 1.6)},
    "prefix_allowed": {"prefix_allowed_tokens_fn": lambda row, ids: [t for t in range(64) if t % 4 != row % 4]},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_batch_every_processor_of_transformers(name):
    target, draft = led("qwen3")
    checks.batch_equals_plain(target, draft, ROWS, **OPTIONS[name])


# ---- BATCH-4: nothing to do is said, not done


def test_batch_4_empty_batches_and_prompts():
    """As plain generate, or a sentence: never an empty result that looks like success."""
    target, draft = tiny.perm_target(), tiny.perm_draft()
    for ids in (torch.zeros(0, 5, dtype=torch.long), torch.zeros(2, 0, dtype=torch.long)):
        with pytest.raises((ValueError, RuntimeError, IndexError)):
            checks.generate(target, draft, ids, pad_token_id=0)
    checks.batch_equals_plain(target, draft, ROWS)


def test_batch_4_a_row_of_padding_only():
    target, draft = tiny.perm_target(), tiny.perm_draft()
    mask = torch.tensor([[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    refused_or_equal(target, draft, torch.tensor([FIVE, TWELVE[:5]]), "mask", attention_mask=mask)


def test_batch_4_prompts_longer_than_allowed():
    target, draft = tiny.perm_target(), tiny.perm_draft()
    batch = checks.batch(ROWS)
    with pytest.raises(ValueError, match="max_length"):
        target.generate(**batch, max_length=12, do_sample=False, pad_token_id=0)
    with pytest.raises(ValueError, match="max_length"):
        target.generate(**batch, max_length=12, do_sample=False, pad_token_id=0, assistant_model=draft)
