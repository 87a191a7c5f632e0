"""Gemma4-style drafts: both kinds of values, both spellings of the full-attention shape."""

import pytest
import torch

from deepspec_files import gemma4_files, read, without
from hf_dspark import DSparkForCausalLM
from tiny import random_target, write_draft


def test_gemma4_values_from_keys_or_from_a_projection_of_their_own(tmp_path):
    for from_key in (True, False):
        config, tensors = gemma4_files(from_key=from_key, heads=2 - from_key)
        model = DSparkForCausalLM.from_pretrained(write_draft(tmp_path / str(from_key), config, tensors))
        assert model.config.value_from_key is from_key and model.config.num_key_value_heads == 2 - from_key
        assert model.layers[0].layer_scalar.item() == 0.5
        with pytest.raises(ValueError, match="attention_k_eq_v"):
            read(config | {"attention_k_eq_v": not from_key}, tensors)


def test_gemma4_per_layer_config_of_newer_transformers():
    config, tensors = gemma4_files()
    newer = without(config, "global_head_dim", "num_global_key_value_heads")
    newer |= {"per_layer_config": {"0": {"head_dim": 16, "num_key_value_heads": 1}}}
    assert read(newer, tensors).head_dim == 16 and read(newer, tensors).num_key_value_heads == 1
    newer["per_layer_config"]["1"] = {"head_dim": 8}
    with pytest.raises(ValueError, match="per_layer_config"):
        read(newer, tensors)
    with pytest.raises(ValueError, match="global_head_dim"):
        read(without(config, "global_head_dim"), tensors)


def test_gemma4_without_rotary_parameters_takes_the_familys_default():
    config, tensors = gemma4_files()
    found = read(without(config, "rope_parameters"), tensors)
    assert found.rope_parameters == {
        "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6
    }  # fmt: skip
    assert "rope_theta" in found.resolution
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        read(config | {"final_logit_softcapping": 0.0}, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemma4_embeddings_are_stored_without_their_factor(dtype, tmp_path):
    """Shared ones come with the target's factor, own ones get the draft's: saved, the draft proposes the same alone."""
    config, tensors = gemma4_files()
    slim = write_draft(tmp_path / "slim", config, without(tensors, "embed_tokens.weight", "lm_head.weight"))
    draft = DSparkForCausalLM.from_pretrained(slim, dtype=dtype)
    draft.attach_target(random_target("gemma2", dtype=dtype))
    draft.save_pretrained(tmp_path / "full", include_shared=True)
    alone = DSparkForCausalLM.from_pretrained(tmp_path / "full")
    anchors, features = torch.tensor([3, 40]), torch.randn(2, 5, 3 * 64).to(dtype)
    expected, found = (one.propose(anchors, features) for one in (draft, alone))
    assert alone.config.has_embed_tokens and torch.equal(found.logits, expected.logits)
