"""Rotary parameters of DeepSpec folders, in all their spellings."""

import pytest
import torch

from deepspec_files import draft, read, without
from hf_dspark import DSparkForCausalLM
from tiny import write_draft


def rope_of(**keys):
    config, tensors = draft()
    return read(without(config, "rope_parameters") | keys, tensors)


def test_rope_theta_is_found_in_every_place():
    for keys in (
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": 5e5},
        {"rope_scaling": {"rope_theta": 5e5, "type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}},
    ):
        assert rope_of(**keys).rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


def test_two_bases_are_an_error_and_none_is_a_stated_default():
    with pytest.raises(ValueError, match="1000.0 .*5000.0"):
        rope_of(rope_theta=1000.0, rope_parameters={"rope_theta": 5000.0})
    with pytest.raises(ValueError, match="`rope_parameters.rope_theta` is 1.0 but `rope_scaling.rope_theta` is 2.0"):
        rope_of(rope_parameters={"rope_theta": 1.0}, rope_scaling={"rope_theta": 2.0})
    config = rope_of()
    assert config.rope_parameters["rope_theta"] == 10000.0 and "10000.0" in config.resolution["rope_theta"]


def test_yarn_of_the_draft_is_kept_and_incomplete_parameters_are_refused():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    found = rope_of(rope_theta=5e5, rope_scaling=yarn).rope_parameters
    assert found == yarn | {"rope_theta": 5e5}
    for keys, message in [
        ({"rope_type": "yarn"}, "factor"),
        ({"rope_type": "yarn", "factor": "4"}, "factor"),
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "invented"}, "invented"),
        ({"rope_type": "linear", "factor": -1.0}, "factor"),
        ({"rope_type": "default", "rope_theta": 0}, "rope_theta"),
        ({"rope_type": "default", "beta_fast": "x"}, "beta_fast"),
    ]:
        with pytest.raises(ValueError, match=message):
            rope_of(rope_parameters={"rope_theta": 5e5} | keys)


@pytest.mark.parametrize("name", ["rope_is_neox_style", "is_neox_style"])
def test_interleaved_rotary_pairs_are_read(name):
    config, tensors = draft()
    assert not read(config | {name: True}, tensors).rope_interleaved
    for keys in ({name: False}, {"dflash_config": {name: False}}):
        found = read(config | keys, tensors)
        assert found.rope_interleaved and f"{name}: false" in found.resolution["rope"]


def test_leaked_keys_of_the_target_change_nothing(tmp_path):
    config, tensors = draft()
    leaked = {
        "partial_rotary_factor": 0.25, "mrope_section": [4, 2, 2], "vision_config": {"depth": 2}, "num_experts": 8,
        "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    rope = {"rope_parameters": config["rope_parameters"] | {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.25}}
    plain = DSparkForCausalLM.from_pretrained(write_draft(tmp_path / "plain", config, tensors))
    found = DSparkForCausalLM.from_pretrained(write_draft(tmp_path / "leaked", config | leaked | rope, tensors))
    assert found.config.rope_parameters == plain.config.rope_parameters
    assert leaked.keys() <= found.config.resolution.keys()
    anchors, taps = torch.tensor([5]), torch.randn(1, 3, 3 * 64)
    assert torch.equal(found.propose(anchors, taps).logits, plain.propose(anchors, taps).logits)


def test_partial_rotation_with_scaled_rope_is_refused():
    with pytest.raises(ValueError, match="partial_rotary_factor"):
        rope_of(rope_theta=1e4, rope_scaling={"rope_type": "linear", "factor": 2.0}, partial_rotary_factor=0.5)
