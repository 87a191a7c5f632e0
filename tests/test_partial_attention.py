"""Draft layers with windows or in-block causality: each slot sees what its file says, on both paths.

What a slot sees is compared with drafts of full attention that are given only that much.
"""

import pytest
import torch
from family_files import speculators_files, zlab_files

import checks
import hf_dspark
import tiny
from hf_dspark import DSparkForCausalLM

PROMPT = [7, 21, 40, 3, 9, 11, 50, 8, 2, 30]
SLIDING = {"layer_types": ["sliding_attention"], "use_sliding_window": True}
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


def hidden(draft, features):
    return draft.propose(torch.tensor([9]), features).hidden_states


def speculators(config, tensors, window, **keys):
    layers = SLIDING | {"layer_types": ["sliding_attention"] * config["num_hidden_layers"], "sliding_window": window}
    return tiny.load_draft(*speculators_files(config, tensors, layers=layers, **keys))


@pytest.mark.parametrize("layers", [1, 2])
def test_windows_from_the_anchor_hold_w_tokens_before_it(layers):
    config = tiny.draft_config(layers=layers)
    tensors = tiny.draft_tensors(config)
    full, features = tiny.load_draft(config, tensors), torch.randn(1, 12, 192)
    slides = speculators(config, tensors, 5, sliding_window_non_causal=True)
    torch.testing.assert_close(hidden(slides, features), hidden(full, features[:, -5:]), **CLOSE)
    torch.testing.assert_close(hidden(slides, features[:, :3]), hidden(full, features[:, :3]), **CLOSE)
    assert not torch.allclose(hidden(slides, features), hidden(full, features), atol=1e-2)


def block_of(tensors, size):
    config = tiny.draft_config(gamma=size)
    return tiny.load_draft(config, tensors)


def test_causal_slots_see_what_comes_before():
    config = tiny.draft_config()
    tensors = tiny.draft_tensors(config)
    features = torch.randn(1, 12, 192)
    causal = tiny.load_draft(config | {"is_causal": True}, tensors)
    windowed = speculators(config, tensors, 5)
    assert causal.config.causal_layers == windowed.config.causal_layers == [True]
    for k in range(4):
        shorter = block_of(tensors, k + 1)
        torch.testing.assert_close(hidden(causal, features)[:, k], hidden(shorter, features)[:, k], **CLOSE)
        torch.testing.assert_close(hidden(windowed, features)[:, k], hidden(shorter, features[:, -5:])[:, k], **CLOSE)
    assert not torch.allclose(hidden(causal, features)[:, 0], hidden(block_of(tensors, 4), features)[:, 0], atol=1e-2)


@pytest.mark.parametrize("causal", [None, False, True])
def test_windows_of_z_lab_count_from_each_slot(causal):
    """A slot at p sees positions above p - W; sliding layers are causal unless the file says otherwise."""
    config = tiny.draft_config(rank=0, confidence=None)
    tensors = tiny.draft_tensors(config)
    raw, stored = zlab_files(config, tensors, is_causal=causal, **SLIDING, sliding_window=6)
    stored |= {name: tensors[name] for name in ("embed_tokens.weight", "lm_head.weight")}
    draft, features = tiny.load_draft(raw, stored), torch.randn(1, 12, 192)
    assert draft.config.causal_layers == (None if causal is False else [True])
    for k in range(1, 4):
        block = block_of_dflash(config, tensors, k + 1 if causal is not False else 4)
        expected = hidden(block, features[:, -(5 - k) :])[:, k]
        torch.testing.assert_close(hidden(draft, features)[:, k - 1], expected, **CLOSE)


def block_of_dflash(config, tensors, size):
    return tiny.load_draft(config | {"block_size": size}, tensors)


def sliding(config, tensors, *types, **keys):
    layer_types = [f"{kind}_attention" for kind in types]
    return tiny.load_draft(config | SLIDING | {"layer_types": layer_types, "sliding_window": 3} | keys, tensors)


KINDS = {
    "anchor, causal": lambda c, t: speculators(c, t, 4),
    "anchor, both ways": lambda c, t: speculators(c, t, 4, sliding_window_non_causal=True),
    "slot, causal": lambda c, t: sliding(c, t, "sliding", "sliding"),
    "slot, both ways": lambda c, t: sliding(c, t, "sliding", "full", is_causal=False),
    "no window, causal": lambda c, t: tiny.load_draft(c | {"is_causal": True}, t),
    "interleaved": lambda c, t: tiny.load_draft(c | {"rope_is_neox_style": False}, t),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("gamma", [4, 1])
def test_both_paths_propose_the_same(kind, implementation, gamma):
    target = tiny.random_target()
    text = checks.plain(target, PROMPT, max_new_tokens=24)[0].tolist()
    config, tensors = tiny.guided_files(tiny.text_table(text, scale=4.0), layers=2, gamma=gamma)
    draft = KINDS[kind](config, tensors)
    draft.set_attn_implementation(implementation)
    runs = []
    for options in ({}, {"cache_implementation": "static"}):
        output, stats = checks.generate(target, draft, PROMPT, max_new_tokens=24, **options)
        assert output[0].tolist() == text
        runs.append(stats)
    assert [stats.path for stats in runs] == ["plain", "ragged"] and runs[0].num_accepted > 0
    assert [[r.draft_tokens for r in stats.rounds] for stats in runs][0] == [r.draft_tokens for r in runs[1].rounds]
    for here, there in zip(runs[0].rounds, runs[1].rounds, strict=True):
        torch.testing.assert_close(torch.tensor(here.confidence), torch.tensor(there.confidence), atol=1e-4, rtol=1e-4)


def test_rows_of_a_batch_have_windows_of_their_own():
    target = tiny.random_target()
    prompts = [PROMPT, PROMPT[:3], PROMPT[2:7]]
    texts = [checks.plain(target, prompt, max_new_tokens=16)[0].tolist() for prompt in prompts]
    config, tensors = tiny.guided_files(sum(tiny.text_table(text, scale=4.0) for text in texts), layers=2)
    draft = KINDS["anchor, causal"](config, tensors)
    with hf_dspark.record() as together:
        target.generate(
            **checks.batch(prompts), assistant_model=draft, do_sample=False, max_new_tokens=16, pad_token_id=0
        )
    for row, prompt in enumerate(prompts):
        _, alone = checks.generate(target, draft, prompt, max_new_tokens=16)
        found = [r.draft_tokens for r in together.rounds if r.row == row]
        assert found[: len(alone.rounds) - 1] == [r.draft_tokens for r in alone.rounds[:-1]]


def test_context_windows_and_training_are_refused_with_the_reason():
    config = tiny.draft_config()
    draft = speculators(config, tiny.draft_tensors(config), 4)
    draft.context_window = hf_dspark.ContextWindow(sinks=1, recent=4)
    with pytest.raises(ValueError, match="context_window.*full attention"):
        checks.generate(tiny.random_target(), draft, PROMPT)
    from hf_dspark.training import forward_blocks, sample_anchors

    ids, mask = torch.randint(1, 60, (1, 12)), torch.ones(1, 12)
    with pytest.raises(ValueError, match="whole context"):
        forward_blocks(draft, ids, mask, torch.randn(1, 12, 192), *sample_anchors(mask, 2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 5}, "sliding_window"),
        ({"layer_types": ["full_attention"]}, "one entry for each of 5 layers"),
        ({"causal_layers": [True]}, "one entry for each of 5 layers"),
        ({"layer_types": ["linear_attention"] * 5}, "linear_attention"),
        ({"draft_vocab_size": 10}, "needs an own head"),
        ({"draft_vocab_size": 151936, "has_lm_head": True}, "less than `vocab_size`"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"rope_interleaved": True, "value_from_key": True}, "rope_interleaved"),
    ],
)
def test_configs_that_cannot_work(fields, message):
    with pytest.raises(ValueError, match=message):
        hf_dspark.DSparkConfig(**fields)
    assert DSparkForCausalLM.config_class is hf_dspark.DSparkConfig
