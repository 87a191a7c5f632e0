"""The plain path's output object, caches of the caller, and turns of a conversation."""

import copy

import pytest
import torch
from transformers import DynamicCache, StoppingCriteriaList

import checks
import hf_dspark
import oracle
import tiny
from hf_dspark._compat import CACHE_KEY

PROMPT = [5, 9, 11, 3, 8, 2, 30]
OUTPUTS = {"output_scores": True, "output_logits": True, "output_hidden_states": True, "output_attentions": True}


def led(target, prompt=PROMPT, length=20, **options):
    """(text, draft, oracle) for a draft that follows the plain text, off the track at every seventh token."""
    text = checks.plain(target, prompt, max_new_tokens=length, **options)[0].tolist()
    table = tiny.text_table(text)
    for token in text[len(prompt) + 3 :: 7]:
        table[token] = table[token].roll(1)
    config, tensors = tiny.guided_files(table, taps=(0, 2))
    return text, tiny.load_draft(config, tensors), oracle.Oracle(config, tensors)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_sliding", "gemma3_text", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("wanted", [*OUTPUTS, "all", "none"])
def test_return_dict(family, wanted):
    target = tiny.random_target(family, layers=3, attention="eager")
    text, draft, _ = led(target)
    options = {"return_dict_in_generate": True} | (
        OUTPUTS if wanted == "all" else {wanted: True} if wanted in OUTPUTS else {}
    )
    expected = checks.plain(target, PROMPT, **options)
    found, stats = checks.generate(target, draft, PROMPT, **options)
    assert 0 < stats.num_accepted < stats.num_verified
    checks.same_outputs(found, expected)
    assert found[CACHE_KEY].get_seq_length() == expected[CACHE_KEY].get_seq_length()


MORE = [
    {"prefill_chunk_size": 3}, {"eos_token_id": 17}, {"repetition_penalty": 1.4}, {"max_new_tokens": 1},
    {"stopping_criteria": StoppingCriteriaList([checks.StopAt(12)])},
]  # fmt: skip


@pytest.mark.parametrize("more", MORE)
def test_return_dict_with_other_options(more):
    target = tiny.random_target(layers=3, attention="eager")
    options = {"return_dict_in_generate": True} | OUTPUTS | more
    text, draft, _ = led(target, **{k: v for k, v in more.items() if k == "repetition_penalty"})
    checks.same_outputs(checks.generate(target, draft, PROMPT, **options)[0], checks.plain(target, PROMPT, **options))


def test_return_dict_with_padding():
    target = tiny.random_target(layers=3, attention="eager")
    ids, mask = checks.tensor([1, 1] + PROMPT), torch.tensor([[0, 0] + [1] * 7])
    text, draft, _ = led(target)
    options = {"return_dict_in_generate": True, "attention_mask": mask} | OUTPUTS
    checks.same_outputs(checks.generate(target, draft, ids, **options)[0], checks.plain(target, ids, **options))


def test_transition_scores():
    target = tiny.random_target(layers=3)
    text, draft, _ = led(target)
    options = {"return_dict_in_generate": True, "output_scores": True}
    found, expected = checks.generate(target, draft, PROMPT, **options)[0], checks.plain(target, PROMPT, **options)
    scores = [target.compute_transition_scores(o.sequences, o.scores, normalize_logits=True) for o in (found, expected)]
    torch.testing.assert_close(*scores, atol=1e-4, rtol=1e-4)


def test_return_dict_while_sampling_is_consistent():
    """One score a token, each allowing the token that was taken."""
    target = tiny.random_target(layers=3)
    text, draft, _ = led(target)
    options = {"do_sample": True, "top_k": 4, "return_dict_in_generate": True, "output_scores": True}
    output, _ = checks.generate(target, draft, PROMPT, **options)
    new = output.sequences[0, len(PROMPT) :].tolist()
    assert len(output.scores) == len(new) == 20
    for token, scores in zip(new, output.scores, strict=True):
        assert scores[0, token] > -torch.inf and (scores > -torch.inf).sum() == 4


FAMILIES = ["qwen3", "qwen3_sliding", "llama", "mistral", "gemma2", "gemma3_text", "gpt_neox", "gpt2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_prefilled_cache(family):
    """A system prompt computed once: the whole text with its cache continues where the cache ends."""
    target = tiny.random_target(family, layers=3)
    text, draft, slow = led(target)
    for filled in (1, 4, 6):
        caches = []
        for _ in range(2):
            caches.append(DynamicCache(config=target.config))
            with torch.no_grad():
                target(checks.tensor(PROMPT[:filled]), use_cache=True, **{CACHE_KEY: caches[-1]})
        expected = checks.plain(target, PROMPT, **{CACHE_KEY: caches[0]})
        with checks.CallCounter(target) as calls:
            output, stats = checks.generate(target, draft, PROMPT, **{CACHE_KEY: caches[1]})
        assert output.tolist() == expected.tolist() and output[0].tolist() == text
        assert calls.shapes[0] == (1, len(PROMPT) - filled), "the cached part is not computed again"
        checks.adds_up(stats, 20, 4)
        assert stats.rounds[0].position == len(PROMPT)
        assert caches[0].get_seq_length() == caches[1].get_seq_length()
        assert str(filled) in stats.reason, "the draft has not seen what was cached by others, and says so"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("style", ["returned", "passed"])
def test_turns_of_a_conversation_reuse_cache_and_draft_context(family, style):
    """Three turns over one cache: text of plain generate, and proposals as if all of it had been read at once."""
    target = tiny.random_target(family, layers=3)
    draft_files = tiny.guided_files(torch.zeros(tiny.V, tiny.V), taps=(0, 2))
    draft, slow = tiny.load_draft(*draft_files), oracle.Oracle(*draft_files)
    text, cache, plain_cache = PROMPT, None, None
    if style == "passed":
        cache, plain_cache = DynamicCache(config=target.config), DynamicCache(config=target.config)
    for turn in range(3):
        options = {"return_dict_in_generate": True, "max_new_tokens": 7}
        reuse = lambda c: {} if c is None else {CACHE_KEY: c}  # noqa: E731
        expected = checks.plain(target, text, **options, **reuse(plain_cache))
        table = tiny.text_table(expected.sequences[0].tolist())
        tiny.set_table(draft, table)
        slow.tensors["markov_head.markov_w2.weight"] = table.T.clone()
        output, stats = checks.generate(target, draft, text, **options, **reuse(cache))
        assert output.sequences.tolist() == expected.sequences.tolist()
        assert stats.rounds[0].position == len(text) and stats.num_accepted > 0
        checks.rounds_match(stats, slow, target, output.sequences[0].tolist())
        cache, plain_cache = output[CACHE_KEY], expected[CACHE_KEY]
        text = output.sequences[0].tolist() + [20 + turn, 31, 32]


def test_only_new_tokens_with_a_full_mask():
    """The other way to continue: only the new tokens, under a mask of the whole length."""
    target = tiny.random_target(layers=3)
    first = checks.plain(target, PROMPT, max_new_tokens=6, return_dict_in_generate=True)
    text, draft, _ = led(target, first.sequences[0].tolist() + [40, 41])
    new = torch.cat((first.sequences[:, -1:], torch.tensor([[40, 41]])), dim=-1)
    mask = torch.ones(1, first[CACHE_KEY].get_seq_length() + 3, dtype=torch.long)
    run = lambda **more: {"attention_mask": mask, CACHE_KEY: copy.deepcopy(first[CACHE_KEY])} | more  # noqa: E731
    expected = checks.plain(target, new, **run())
    output, stats = checks.generate(target, draft, new, **run())
    assert output.tolist() == expected.tolist()
    assert stats.rounds[0].position == 15 and stats.num_accepted > 0


def test_a_cache_that_was_cropped_or_changed_by_others_gives_the_right_text():
    """Regenerate: the caller crops the cache to the prompt; or another model call extended it in between."""
    target = tiny.random_target(layers=3)
    text, draft, slow = led(target)
    output, _ = checks.generate(target, draft, PROMPT, return_dict_in_generate=True)
    cache = output[CACHE_KEY]
    cache.crop(len(PROMPT) - 1 - cache.get_seq_length())
    other = PROMPT[:-1] + [50]
    expected = checks.plain(target, other)[0].tolist()
    again, stats = checks.generate(target, draft, other, return_dict_in_generate=True, **{CACHE_KEY: cache})
    assert again.sequences[0].tolist() == expected
    checks.rounds_match(stats, slow, target, expected)
    with torch.no_grad():
        target(checks.tensor([expected[-1], 3, 4]), use_cache=True, **{CACHE_KEY: again[CACHE_KEY]})
    longer = expected + [3, 4, 5]
    last, stats = checks.generate(target, draft, longer, **{CACHE_KEY: again[CACHE_KEY]})
    assert last.tolist() == checks.plain(target, longer).tolist()


@pytest.mark.parametrize("window", [None, (2, 5)])
def test_a_cache_that_the_draft_has_seen_in_part_and_is_cut_back(window):
    """The first tokens were cached without the draft; after the cut it sees none of those that were taken away."""
    target = tiny.random_target(layers=3)
    text, draft, slow = led(target)
    draft.context_window = window and hf_dspark.ContextWindow(*window)
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(checks.tensor(PROMPT[:4]), use_cache=True, **{CACHE_KEY: cache})
    checks.generate(target, draft, PROMPT, **{CACHE_KEY: cache})
    cache.crop(12 - cache.get_seq_length())
    edited = [*text[:12], 50, 51]
    expected = checks.plain(target, edited)[0].tolist()
    _, stats = checks.generate(target, draft, edited, **{CACHE_KEY: cache})
    sinks, recent = window or (0, 99)
    # The window had moved to the end of the text; of its tokens only the sinks are left.
    left = range(4, 12) if window is None else range(4, 4 + sinks)
    slow.seen = lambda length: torch.tensor(
        [*left[:sinks], *[i for i in [*left[sinks:], *range(12, length)] if i >= length - recent]], dtype=torch.long
    )
    checks.rounds_match(stats, slow, target, expected)
    assert ("the draft has not seen" in stats.reason) and stats.num_reused == 12


def test_a_text_that_others_have_replaced_in_a_cache_is_no_context():
    """Cut back and filled again without the draft: what the draft remembers of the old text is gone."""
    target = tiny.random_target(layers=3)
    text, draft, slow = led(target)
    output, _ = checks.generate(target, draft, PROMPT, return_dict_in_generate=True)
    cache = output[CACHE_KEY]
    cache.crop(9 - cache.get_seq_length())
    other = [*text[:9], 50, 51, 52]
    with torch.no_grad():
        target(checks.tensor(other[9:]), use_cache=True, **{CACHE_KEY: cache})
    expected = checks.plain(target, [*other, 53])[0].tolist()
    found, stats = checks.generate(target, draft, [*other, 53], **{CACHE_KEY: cache})
    assert found[0].tolist() == expected and "holds 3 tokens that the draft has not seen" in stats.reason
    slow.seen = lambda length: torch.tensor([i for i in range(length) if i not in (9, 10, 11)])
    checks.rounds_match(stats, slow, target, expected)


def test_a_cache_from_another_draft_is_no_context():
    target = tiny.random_target(layers=3)
    text, draft, slow = led(target)
    stranger = tiny.random_draft(taps=(0, 2), layers=2)
    output, _ = checks.generate(target, stranger, PROMPT, max_new_tokens=5, return_dict_in_generate=True)
    longer = output.sequences[0].tolist() + [4, 5]
    expected = checks.plain(target, longer)
    found, stats = checks.generate(target, draft, longer, **{CACHE_KEY: output[CACHE_KEY]})
    assert found.tolist() == expected.tolist() and "not seen" in stats.reason


WITH_EMBEDS = [
    {}, {"eos_token_id": 17}, {"max_length": 18}, {"max_new_tokens": 1}, {"repetition_penalty": 1.3},
    {"return_dict_in_generate": True, "output_scores": True},
]  # fmt: skip


@pytest.mark.parametrize("options", WITH_EMBEDS)
def test_inputs_embeds(options):
    target = tiny.random_target(layers=3)
    text, draft, _ = led(target)
    embeds = target.get_input_embeddings()(checks.tensor(PROMPT)).detach()
    expected = checks.plain(target, None, inputs_embeds=embeds, **options)
    output, stats = checks.generate(target, draft, None, inputs_embeds=embeds, **options)
    assert checks.sequences(output).tolist() == checks.sequences(expected).tolist()
    if stats.num_rounds:
        assert stats.rounds[0].position == len(PROMPT)


def test_embeds_and_ids_together():
    target = tiny.random_target(layers=3)
    text, draft, _ = led(target)
    embeds = target.get_input_embeddings()(checks.tensor(PROMPT)).detach()
    checks.equal_to_plain(target, draft, PROMPT, inputs_embeds=embeds)


def test_padding_inside_and_on_the_right_is_plain_generates_business():
    """A mask with holes: the target's answer is whatever plain generate gives; the draft reads the unmasked rows."""
    target = tiny.random_target(layers=3)
    text, draft, _ = led(target)
    for mask in ([0, 1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0, 1]):
        checks.equal_to_plain(target, draft, PROMPT, attention_mask=torch.tensor([mask]))


def test_a_prompt_with_pad_tokens_in_it():
    """Without a mask, generate() masks the pad tokens that it finds in the prompt."""
    target = tiny.random_target(layers=3)
    text, draft, _ = led(target)
    for pad in (PROMPT[0], PROMPT[2]):
        checks.equal_to_plain(target, draft, PROMPT, pad_token_id=pad, eos_token_id=63)


def test_padded_embeds():
    target = tiny.random_target(layers=3)
    text, draft, slow = led(target)
    embeds = target.get_input_embeddings()(checks.tensor([1, 1] + PROMPT)).detach()
    options = {"inputs_embeds": embeds, "attention_mask": torch.tensor([[0, 0] + [1] * 7])}
    output, stats = checks.generate(target, draft, None, **options)
    assert output[0].tolist() == checks.plain(target, None, **options)[0].tolist() == text[7:]
    checks.rounds_match(stats, slow, target, text)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_sliding"])
def test_turns_with_a_padded_prompt(family):
    """The cache holds the padding, the draft's context does not; both find their place again in the next turn."""
    target = tiny.random_target(family, layers=3)
    text, draft, slow = led(target, length=30)
    pad = [1, 1, 1]
    first, stats = checks.generate(
        target, draft, checks.tensor(pad + PROMPT), max_new_tokens=9, return_dict_in_generate=True,
        attention_mask=torch.tensor([[0] * 3 + [1] * 7]),
    )  # fmt: skip
    longer = first.sequences[0].tolist()
    assert longer == pad + text[:16]
    mask = torch.tensor([[0] * 3 + [1] * 16])
    output, stats = checks.generate(
        target, draft, longer, attention_mask=mask, max_new_tokens=10, **{CACHE_KEY: first[CACHE_KEY]}
    )
    assert output[0].tolist() == pad + text[:26]
    assert stats.rounds[0].position == 16 and "not seen" not in stats.reason
    checks.rounds_match(stats, slow, target, text)


@pytest.mark.parametrize("implementation", ["dynamic", "offloaded", "dynamic_full"])
def test_cache_implementations(implementation):
    target = tiny.random_target("qwen3_sliding", layers=3)
    text, draft, _ = led(target)
    try:
        checks.plain(target, PROMPT, cache_implementation=implementation)
    except Exception as error:  # noqa: BLE001 - not every kind runs on a CPU; then ours must not pretend either
        with pytest.raises(type(error)):
            checks.generate(target, draft, PROMPT, cache_implementation=implementation)
        return
    checks.equal_to_plain(target, draft, PROMPT, cache_implementation=implementation)


def test_prompt_ids_on_the_model_without_bos():
    """Generation from nothing: bos only."""
    target = tiny.perm_target()
    output, stats = checks.generate(target, tiny.perm_draft(), None, bos_token_id=9)
    assert output[0].tolist() == [9, *tiny.chain(9, 20)]
    assert stats.num_accepted == 15
