"""NUMERIC on the ragged path: bit-identity with plain decoding in float32, and what holds in lower precision."""

import pytest
import torch

import checks
import tiny

GAMMA = 4
LENGTHS = range(1, 2 * GAMMA + 2)
WORDS = [7, 21, 40, 3, 9, 30, 12, 50, 41, 5] * 3
FAMILIES = ("qwen3", "qwen3_sliding", "llama", "mistral", "gemma2", "gemma3_text")


def led(target, rows, pattern=3, **settings):
    """A draft that knows the rows' texts but for every `pattern`-th token."""
    table = torch.zeros(tiny.V, tiny.V)
    for row in rows:
        text = checks.plain(target, row)[0].tolist()
        own = tiny.text_table(text)
        for token in text[len(row) + 1 :: pattern]:
            own[token] = own[token].roll(1)
        table = torch.where(own.any(-1, keepdim=True), own, table)
    return tiny.markov_draft(table, taps=(0, 2), gamma=GAMMA, **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_numeric_2_every_prompt_length_in_one_batch(family):
    """One-token prompts and prompts of length γ-1, γ, γ+1 side by side."""
    target = tiny.random_target(family, layers=3)
    rows = [WORDS[i : i + length] for i, length in enumerate(LENGTHS)]
    for draft in (led(target, rows), tiny.random_draft(taps=(0, 2))):
        checks.batch_equals_plain(target, draft, rows)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", ["qwen3_sliding", "gemma2"])
def test_numeric_2_every_prompt_length_alone(family, length):
    target = tiny.random_target(family, layers=3)
    draft = led(target, [WORDS[:length]])
    _, stats, _ = checks.batch_equals_plain(target, draft, [WORDS[:length]], cache_implementation="static")
    assert stats.num_verified > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numeric_2_dtypes(dtype):
    """T-perm has no near ties, so text is equal in low precision too."""
    target = tiny.perm_target(layers=2, dtype=dtype)
    rows = [tiny.chain(40 + i, length) for i, length in enumerate(LENGTHS)]
    draft = tiny.scripted_draft([2, 4, 0, 1, 3], tiny.NEXT[rows[0][-1]], taps=(0, 1)).to(dtype)
    new, _, _ = checks.batch_equals_plain(target, draft, rows)
    assert new == [tiny.chain(row[-1], 20) for row in rows]
    checks.batch_equals_plain(target, draft, rows[3:4], cache_implementation="static")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_low_precision_are_as_near_as_rounding_allows(dtype):
    """Not further from float32 than a few times what plain generate itself is in this precision."""
    options = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 9, "do_sample": False}
    exact, rough = tiny.perm_target(layers=2), tiny.perm_target(layers=2, dtype=dtype)
    prompt = checks.tensor(WORDS[:7])
    draft = tiny.perm_draft(taps=(0, 1))
    wanted, plain = (torch.cat(model.generate(prompt, **options).logits) for model in (exact, rough))
    output = rough.generate(prompt, assistant_model=draft, cache_implementation="static", **options)
    found = torch.cat(output.logits)
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() <= 4 * (plain - wanted).abs().max() + 1e-3


def test_a_row_is_the_same_whoever_its_neighbours_are():
    """No row reads another: text and proposals of a row do not change with the batch around it."""
    target = tiny.random_target("qwen3", layers=3)
    config, tensors = tiny.guided_files(torch.randn(tiny.V, tiny.V), taps=(0, 2))
    draft, row = tiny.load_draft(config, tensors), WORDS[:6]
    seen = []
    for others in ([], [[1]], [WORDS[:20], [2, 3]], [[60] * 9] * 4):
        for place in {0, len(others)}:
            rows = [*others[:place], row, *others[place:]]
            static = {"cache_implementation": "static"} if not others else {}
            new, stats, _ = checks.batch_equals_plain(target, draft, rows, **static)
            rounds = [(r.position, r.draft_tokens, r.accepted) for r in stats.rounds if r.row == place]
            seen.append((new[place], rounds))
    assert all(one == seen[0] for one in seen)
