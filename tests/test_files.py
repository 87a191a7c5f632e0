"""Saving a draft: options of its user, what it shares with its target, foreign code."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModel

import checks
import tiny
from hf_dspark import DSparkForCausalLM
from hf_dspark.files import shared_tensors
from hf_dspark.target import TargetVocabulary


def test_options_set_on_the_draft_survive_saving(tmp_path):
    draft = tiny.perm_draft()
    draft.generation_config.num_assistant_tokens = 2
    draft.generation_config.assistant_confidence_threshold = 0.25
    draft.save_pretrained(tmp_path)
    for load in (AutoModel, DSparkForCausalLM):
        loaded = load.from_pretrained(tmp_path)
        assert loaded.generation_config.num_assistant_tokens == 2
        assert loaded.generation_config.assistant_confidence_threshold == 0.25
    _, stats = checks.generate(tiny.perm_target(), loaded, [40])
    assert {r.verified for r in stats.rounds[:-1]} == {2}
    loaded, info = DSparkForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert loaded.generation_config.num_assistant_tokens == 2 and not info["missing_keys"]


def test_a_draft_without_options_has_no_file_of_them(tmp_path):
    draft = tiny.perm_draft()
    draft.generation_config.num_assistant_tokens = 2
    draft.save_pretrained(tmp_path)
    draft.generation_config.num_assistant_tokens = None
    draft.save_pretrained(tmp_path)
    assert not (tmp_path / "generation_config.json").exists()
    assert DSparkForCausalLM.from_pretrained(tmp_path).generation_config.num_assistant_tokens is None


def slim(**settings):
    """A random draft that stores neither embeddings nor head."""
    config = tiny.draft_config(**settings)
    tensors = tiny.draft_tensors(config)
    del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    return tiny.load_draft(config, tensors)


def proposals(draft):
    """What a draft proposes for two contexts."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, 5, 3 * 64, generator=generator, dtype=torch.float32).to(draft.dtype)
    return draft.propose(torch.tensor([3, 40]), features)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_saved_with_what_it_shares_proposes_the_same_alone(family, dtype, tmp_path):
    """Gemma multiplies embeddings by a factor, which is in the stored ones."""
    draft = slim().to(dtype).attach_target(tiny.random_target(family, dtype=dtype))
    draft.save_pretrained(tmp_path, include_shared=True)
    alone = DSparkForCausalLM.from_pretrained(tmp_path)
    assert alone.dtype == dtype and alone.config.has_embed_tokens and alone.config.has_lm_head
    expected, found = proposals(draft), proposals(alone)
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.logits, expected.logits)
    assert torch.equal(found.confidence_logits, expected.confidence_logits)


def test_embeddings_with_the_drafts_own_factor_are_stored_exactly(tmp_path):
    """A quotient would be rounded: sqrt(80) is no power of two, unlike the factor of the tiny Gemma targets."""

    class Scaled(torch.nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * torch.tensor(80**0.5, dtype=self.weight.dtype)

    embeddings = Scaled(16, 80, dtype=torch.bfloat16)
    vocabulary = TargetVocabulary(embeddings, None, 16, torch.device("cpu"), torch.bfloat16)
    config = SimpleNamespace(vocab_size=16, embedding_scale=80**0.5, raw_embeddings=False)
    draft = SimpleNamespace(vocabulary=vocabulary, config=config, dtype=torch.bfloat16)
    assert torch.equal(shared_tensors(draft)["embed_tokens.weight"], embeddings.weight)
    config.embedding_scale = 1.0
    ids = torch.arange(16)
    assert torch.equal(shared_tensors(draft)["embed_tokens.weight"], embeddings(ids))


def test_rotary_frequencies_are_those_of_a_draft_loaded_in_its_dtype(tmp_path):
    """`to()` rounds every float tensor of a module; frequencies must not be among them."""
    slim(rope_parameters={"rope_type": "default", "rope_theta": 1e6}).save_pretrained(tmp_path)
    loaded = DSparkForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    moved = DSparkForCausalLM.from_pretrained(tmp_path).to(torch.bfloat16).to("cpu")
    assert moved.dtype == loaded.dtype == torch.bfloat16 and moved.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(moved.rotary_emb.inv_freq, loaded.rotary_emb.inv_freq)


def test_shared_tensors_have_the_rows_of_the_draft(tmp_path):
    """A target whose embedding is padded beyond the draft's vocabulary."""
    draft = slim(vocab=200, mask=199).attach_target(tiny.random_target(vocab_size=201))
    draft.save_pretrained(tmp_path, include_shared=True)
    alone = DSparkForCausalLM.from_pretrained(tmp_path)
    assert alone.embed_tokens.weight.shape == alone.lm_head.weight.shape == (200, 64)
    assert torch.equal(proposals(alone).tokens, proposals(draft).tokens)


def test_what_cannot_be_stored_is_named(tmp_path):
    short = slim(vocab=200, mask=198).attach_target(tiny.random_target(vocab_size=199))
    with pytest.raises(ValueError, match="199 rows for a draft of 200 tokens"):
        short.save_pretrained(tmp_path, include_shared=True)
    biased = copy.deepcopy(tiny.random_target())
    biased.lm_head = torch.nn.Linear(64, 64)
    with pytest.raises(ValueError, match="bias=True"):
        slim().attach_target(biased).save_pretrained(tmp_path, include_shared=True)
    with pytest.raises(ValueError, match="attach_target"):
        slim().save_pretrained(tmp_path, include_shared=True)


def test_foreign_code_is_not_promised_by_a_saved_config(tmp_path):
    config = tiny.draft_config(auto_map={"AutoModel": "theirs.Model"})
    tiny.load_draft(config, tiny.draft_tensors(config)).save_pretrained(tmp_path)
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
