"""Odd but real situations: interrupted forwards, wrapped and broken drafts, adapters, unusual targets."""

import contextvars
import copy

import numpy as np
import pytest
import torch
from transformers import DynamicCache, GenerationConfig, MambaConfig, MambaForCausalLM

import checks
import hf_dspark
import tiny
from hf_dspark._compat import CACHE_KEY, SELECTS_HIDDEN_STATES

IDS = torch.tensor([[3, 9, 20, 4, 8]])
GREEDY = {"do_sample": False, "max_new_tokens": 15}


def guided(target):
    """A draft whose every proposal is the target's greedy text."""
    text = target.generate(IDS, **GREEDY)[0].tolist()
    return tiny.markov_draft(tiny.text_table(text))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_sliding"])
@pytest.mark.parametrize("layer, forward", [(0, 4), (0, 3), (1, 5), (4, 3)])
def test_an_interrupt_inside_a_forward_keeps_the_committed_tokens(family, layer, forward):
    target = copy.deepcopy(tiny.random_target(family))
    plain = target.generate(IDS, **GREEDY)
    draft, cache, calls = tiny.bad_draft(), DynamicCache(config=target.config), [0]

    def interrupt(module, inputs):
        calls[0] += 1
        if calls[0] == forward:
            raise KeyboardInterrupt

    handle = target.model.layers[layer].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        target.generate(IDS, assistant_model=draft, **{CACHE_KEY: cache}, **GREEDY)
    handle.remove()
    lengths = {int(layer.get_seq_length()) for layer in cache.layers}
    assert len(lengths) == 1, "every layer holds the same committed tokens"
    (length,) = lengths
    again = target.generate(plain[:, : length + 1], **{CACHE_KEY: cache}, do_sample=False, max_length=20)
    assert torch.equal(again, plain)


def test_a_target_without_attention_goes_on_alone():
    config = MambaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=6, state_size=4, eos_token_id=None)
    target = MambaForCausalLM(config).eval()
    output = target.generate(IDS, assistant_model=tiny.perm_draft(), return_dict_in_generate=True, **GREEDY)
    assert torch.equal(output.sequences, target.generate(IDS, **GREEDY))
    assert output.speculation.path == "target_only"
    assert "cache" in output.speculation.reason.lower()


def test_a_compiled_draft_is_a_draft():
    target = tiny.random_target()
    draft = torch.compile(guided(target), backend="eager")
    output = target.generate(IDS, assistant_model=draft, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(output.sequences, target.generate(IDS, **GREEDY))
    assert output.speculation.mean_acceptance_length > 2


@pytest.mark.parametrize("change", ["cast", "copy"])
def test_context_of_a_changed_draft_is_not_used(change):
    target = tiny.random_target()
    draft = copy.deepcopy(guided(target))
    first = target.generate(IDS, assistant_model=draft, return_dict_in_generate=True, **GREEDY)
    draft = draft.to(torch.bfloat16) if change == "cast" else copy.deepcopy(draft)
    ids = torch.cat((first.sequences, torch.tensor([[1, 2]])), dim=1)
    cache = {CACHE_KEY: first[CACHE_KEY]}
    second = target.generate(ids, assistant_model=draft, return_dict_in_generate=True, **cache, **GREEDY)
    assert torch.equal(second.sequences, target.generate(ids, **GREEDY))
    assert "the draft has not seen" in second.speculation.reason


class Adapter(torch.nn.Module):
    def __init__(self, base: torch.nn.Linear):
        super().__init__()
        self.base, self.delta = base, torch.nn.Parameter(torch.randn_like(base.weight))

    def forward(self, x):
        return self.base(x) + torch.nn.functional.linear(x, self.delta)


def test_adapters_on_the_draft_also_reach_its_context():
    adapted, merged = copy.deepcopy(tiny.random_draft()), copy.deepcopy(tiny.random_draft())
    attention = adapted.layers[0].self_attn
    attention.k_proj = Adapter(attention.k_proj)
    merged.layers[0].self_attn.k_proj.weight.data += attention.k_proj.delta.data
    features = torch.randn(1, 5, adapted.config.context_size)
    one, other = (draft.propose(torch.tensor([3]), features) for draft in (adapted, merged))
    torch.testing.assert_close(one.base_logits, other.base_logits, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not SELECTS_HIDDEN_STATES, reason="lists of hidden states have this meaning from transformers 5.23")
def test_selected_hidden_states_are_those_of_plain():
    target = tiny.random_target()
    options = {"return_dict_in_generate": True, "output_hidden_states": [1, 3], **GREEDY}
    plain = target.generate(IDS, **options)
    output = target.generate(IDS, assistant_model=guided(target), **options)
    for here, there in zip(output.hidden_states, plain.hidden_states, strict=True):
        assert [state is None for state in here] == [state is None for state in there]
        for state, other in zip(here, there, strict=True):
            if state is not None:
                torch.testing.assert_close(state, other, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_a_broken_draft_cannot_break_sampling(damage):
    target, draft = tiny.random_target(), copy.deepcopy(tiny.random_draft())
    draft.fc.weight.data.fill_(damage)
    output = target.generate(IDS, do_sample=True, max_new_tokens=15, assistant_model=draft)
    assert output.shape == (1, 20)


def test_a_record_may_be_closed_in_another_context():
    def collect():
        with hf_dspark.record() as stats:
            yield stats
            yield stats

    generator = collect()
    contextvars.copy_context().run(next, generator)
    contextvars.copy_context().run(next, generator)
    generator.close()


def test_no_drafts_past_the_length_limit():
    target, draft = tiny.perm_target(), tiny.perm_draft()
    for max_length in (3, 4, 5):
        config = GenerationConfig(max_length=max_length, do_sample=False)
        generator = hf_dspark.DSparkCandidateGenerator(draft, target, config)
        outputs = target(IDS[:, :-1], output_hidden_states=True)
        candidates, _ = generator.get_candidates(IDS, model_outputs=outputs, is_first_iteration=False)
        assert torch.equal(candidates, IDS)


@pytest.mark.parametrize("temperatures", [[1.0] * 3, [0.0] * 4, [-1.0] * 4, [float("nan")] * 4])
def test_edited_temperatures_are_checked(temperatures):
    draft = copy.deepcopy(tiny.perm_draft())
    draft.config.confidence_temperatures = temperatures
    with pytest.raises(ValueError, match="confidence_temperatures"):
        tiny.perm_target().generate(IDS, assistant_model=draft, **GREEDY)


def test_values_that_generate_fills_in_count_when_given():
    target, draft = tiny.perm_target(), tiny.perm_draft()
    with pytest.raises(ValueError, match="num_assistant_tokens"):
        target.generate(IDS, assistant_model=draft, num_assistant_tokens=20, **GREEDY)
    with pytest.raises(ValueError, match="num_assistant_tokens"):
        config = GenerationConfig(num_assistant_tokens=20, **GREEDY)
        target.generate(IDS, assistant_model=draft, generation_config=config)
    for number in (np.int64(2), 2):
        output = target.generate(
            IDS, assistant_model=draft, num_assistant_tokens=number, return_dict_in_generate=True, **GREEDY
        )
        assert max(r.verified for r in output.speculation.rounds) == 2


def test_a_plain_call_leaves_no_note_on_its_config():
    target, seen = tiny.perm_target(), []

    def decode(model, input_ids, generation_config, **kwargs):
        seen.append(generation_config)
        return input_ids

    target.generate(IDS, custom_generate=decode, **GREEDY)
    assert not any("dspark" in name for name in vars(seen[0]))


def test_an_unknown_scheduler_is_not_ignored():
    draft = copy.deepcopy(tiny.perm_draft())
    draft.scheduler = "fastest"
    with pytest.raises(ValueError, match="scheduler"):
        checks.generate(tiny.perm_target(), draft, IDS[0].tolist())


@pytest.mark.parametrize(
    "arguments",
    [
        {"temperature": float("inf")},
        {"temperature": "1"},
        {"temperature": -1.0},
        {"anchor_ids": torch.tensor([True])},
        {"anchor_ids": torch.tensor([1.0])},
        {"anchor_ids": [3]},
    ],
)
def test_propose_refuses_what_it_cannot_read(arguments):
    draft = tiny.random_draft()
    features = torch.randn(1, 2, draft.config.context_size)
    anchors = arguments.pop("anchor_ids", torch.tensor([3]))
    with pytest.raises(ValueError, match="anchor_ids|temperature"):
        draft.propose(anchors, features, **arguments)


def test_positions_without_rounds_are_gamma_nones():
    with hf_dspark.record() as stats:
        tiny.perm_target().generate(IDS, assistant_model=tiny.perm_draft(), do_sample=False, max_new_tokens=1)
    assert stats.num_rounds == 0
    assert stats.acceptance_by_position == [None] * 4
