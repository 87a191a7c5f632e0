"""Checkpoints of every family, made from the description of its format, propose what their DeepSpec twins propose."""

import json
from functools import partial

import pytest
import torch
from family_files import (
    SHARED,
    interleave_heads,
    muse_files,
    specforge_files,
    speculators_files,
    torchspec_files,
    without,
    zlab_files,
)
from safetensors.torch import load_file

import checks
from deepspec_files import draft
from hf_dspark import DSparkForCausalLM
from hf_dspark.formats import open_checkpoint
from tiny import load_draft, random_target, write_draft

DFLASH = {"rank": 0, "confidence": None}
OLD = {"sample_from_anchor": None, "speculators_config": None}
# name -> (form, draft settings, arguments of the form, anchor-first, arguments of the loader)
FORMS = {
    "z-lab": (zlab_files, DFLASH, {}, False, {}),
    "z-lab, nested": (zlab_files, DFLASH, {"nested_block_size": True}, False, {}),
    "SpecForge": (specforge_files, {}, {}, True, {}),
    "SpecForge, legacy": (specforge_files, {"head": "rnn"}, {"prefix": "logit_head."}, True, {}),
    "ModelOpt": (
        specforge_files,
        {},
        {"nest": {"shift_label": True, "use_confidence_head": True, "enable_confidence_head": None}},
        True,
        {},
    ),
    "LFM2.5": (specforge_files, {}, {"architectures": ["Lfm2DSparkDraftModel"], "runtime_block_size": 3}, True, {}),
    "TorchSpec": (torchspec_files, {}, {}, True, {"block_size": 4}),
    "TorchSpec, internal": (torchspec_files, {"head": "gated"}, {"internal": True}, True, {"block_size": 4}),
    "TorchSpec, qwen3_dspark": (torchspec_files, {}, {"model_type": "qwen3_dspark"}, True, {"block_size": 4}),
    "TorchSpec, DFlash": (torchspec_files, DFLASH, {"internal": True, "block_size": 4}, False, {}),
    "transformers": (muse_files, DFLASH, {}, False, {}),
    "speculators": (speculators_files, {}, {}, True, {}),
    "speculators, DFlash": (speculators_files, DFLASH, OLD, False, {}),
}  # fmt: skip
SOURCES = {"z-lab": "zlab", "ModelOpt": "specforge", "LFM2.5": "specforge", "transformers": "muse_glimmer_assistant"}


def files_of(name, layers=2):
    """(foreign files, DeepSpec files, anchor-first, arguments of the loader)."""
    form, settings, arguments, anchor_first, loading = FORMS[name]
    config, tensors = draft(layers=layers, **settings)
    return form(config, tensors, **arguments), (config, tensors), anchor_first, loading


def shared_with(target, tensors):
    embeddings, head = target.get_input_embeddings().weight, target.lm_head.weight
    return tensors | {"embed_tokens.weight": embeddings.detach(), "lm_head.weight": head.detach()}


same_proposals = partial(checks.same_proposals, num_tokens=9)


def loaded_pair(name):
    (raw, stored), (config, tensors), anchor_first, loading = files_of(name)
    target = random_target()
    found = load_draft(raw, stored, **loading).attach_target(target)
    kept = {key: tensors[key] for key in SHARED if key in stored}
    twin = load_draft(config, shared_with(target, tensors) | kept, sample_from_anchor=anchor_first)
    return found, twin


@pytest.mark.parametrize("name", FORMS)
def test_proposes_what_the_deepspec_form_proposes(name):
    found, twin = loaded_pair(name)
    assert found.config.source_format == SOURCES.get(name.split(",")[0], name.split(",")[0].lower())
    assert found.config.sample_from_anchor is twin.config.sample_from_anchor
    assert {"family", "layout", "vocabulary"} <= found.config.resolution.keys()
    for temperature in (0.0, 1.0):
        same_proposals(found, twin, temperature)
    other = load_draft(*files_of(name)[0], sample_from_anchor=not twin.config.sample_from_anchor, **files_of(name)[3])
    assert other.config.num_draft_tokens != found.config.num_draft_tokens  # the control: the layout matters
    assert "caller" in other.config.resolution["layout"]


@pytest.mark.parametrize("name", FORMS)
def test_saved_as_it_came_and_byte_for_byte_again(name, tmp_path):
    (raw, stored), _, _, loading = files_of(name)
    folders = [write_draft(tmp_path / "0", raw, stored), tmp_path / "1", tmp_path / "2"]
    first = DSparkForCausalLM.from_pretrained(folders[0], **loading)
    first.save_pretrained(folders[1])
    second = DSparkForCausalLM.from_pretrained(folders[1])
    second.save_pretrained(folders[2])
    written = json.loads((folders[1] / "config.json").read_text())
    assert without(written, *loading) == without(raw, "auto_map")
    assert (folders[1] / "config.json").read_bytes() == (folders[2] / "config.json").read_bytes()
    before, after = (load_file(path / "model.safetensors") for path in folders[1:])
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    same_proposals(*(model.attach_target(random_target()) for model in (first, second)))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("form", ["deepspec", "speculators"])
def test_converted_drafts_propose_the_same(name, form, tmp_path):
    (raw, stored), _, _, loading = files_of(name)
    found = load_draft(raw, stored, **loading).attach_target(random_target())
    if name == "transformers":
        with pytest.raises(ValueError, match="no word for"):
            found.save_pretrained(tmp_path, format=form)
        return
    found.save_pretrained(tmp_path, format=form)
    again = DSparkForCausalLM.from_pretrained(tmp_path).attach_target(random_target())
    assert again.config.source_format == form
    same_proposals(found, again)


@pytest.mark.parametrize("name", FORMS)
def test_a_change_reaches_the_file(name, tmp_path):
    (raw, stored), _, anchor_first, loading = files_of(name)
    found = load_draft(raw, stored, sample_from_anchor=not anchor_first, target_layer_ids=[1, 3, 4], **loading)
    gamma = found.config.num_draft_tokens
    found.config.confidence_temperatures = [1.5] * gamma
    found.save_pretrained(tmp_path)
    again = open_checkpoint(tmp_path).config
    assert again.source_format == found.config.source_format
    assert again.num_draft_tokens == gamma and again.target_layer_ids == [1, 3, 4]
    assert again.confidence_temperatures == [1.5] * gamma


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("unknown norm", "unknown.*aux_norm.0.weight"),
        ("per-tap norm", "unknown.*fc_norm.weight"),
        ("missing", "missing: .*up_proj"),
        ("NaN", "NaN.*q_proj"),
        ("head announced", "markov_rank.*markov_head"),
        ("taps", "fits no 5 taps"),
    ],
)
def test_wrong_variants_give_the_named_error(name, change, message, tmp_path):
    (raw, stored), _, _, loading = files_of(name)
    stored = dict(stored)
    if "norm" in change:
        stored[{"unknown norm": "aux_norm.0.weight", "per-tap norm": "fc_norm.weight"}[change]] = torch.ones(64)
    elif change == "missing":
        del stored[next(key for key in sorted(stored) if key.endswith("up_proj.weight"))]
    elif change == "NaN":
        key = next(key for key in sorted(stored) if key.endswith("q_proj.weight"))
        stored[key] = stored[key].clone().fill_(float("nan"))
    elif change == "head announced":
        stored = {key: tensor for key, tensor in stored.items() if "markov_head" not in key}
        nested = isinstance(raw.get("dflash_config"), dict)
        raw = raw | ({"dflash_config": raw["dflash_config"] | {"markov_rank": 8}} if nested else {"markov_rank": 8})
        loading = {"block_size": 4}
    elif change == "taps":
        loading = loading | {"target_layer_ids": [0, 1, 2, 3, 4]}
    with pytest.raises(ValueError, match=message):
        DSparkForCausalLM.from_pretrained(write_draft(tmp_path, raw, stored), **loading)


@pytest.mark.parametrize("name", FORMS)
def test_taps_out_of_the_targets_depth_are_refused_at_pairing(name):
    (raw, stored), _, _, loading = files_of(name)
    found = load_draft(raw, stored, **loading)
    with pytest.raises(ValueError, match="4.*3 layers"):
        found.attach_target(random_target(layers=3))


# ---- z-lab


def test_taps_that_the_file_does_not_name_are_spread_over_the_target(tmp_path):
    config, tensors = draft(layers=3, gamma=5, **DFLASH)
    files = zlab_files(config, tensors, nest={"target_layer_ids": None}, num_target_layers=36)
    found = open_checkpoint(write_draft(tmp_path, *files)).config
    assert found.target_layer_ids == [1, 17, 33] and "spread" in found.resolution["taps"]
    lacking = without(files[0], "num_target_layers")
    with pytest.raises(ValueError, match="target_layer_ids.*from_pretrained"):
        open_checkpoint(write_draft(tmp_path, lacking, files[1]))


def test_z_lab_counts_the_anchor(tmp_path):
    files = zlab_files(*draft(gamma=16, **DFLASH))
    config = open_checkpoint(write_draft(tmp_path, *files)).config
    assert (config.block_size, config.num_draft_tokens) == (16, 15) and "counts the anchor" in config.resolution[
        "layout"
    ]


def test_factors_and_cap_of_z_lab_are_applied():
    config, tensors = draft(**DFLASH)
    nest = {"input_embedding_scale": 3.0, "output_multiplier": 0.25, "final_logit_softcapping": 2.0}
    target = random_target()
    found = load_draft(*zlab_files(config, tensors, nest=nest)).attach_target(target)
    full = shared_with(target, tensors)
    full["embed_tokens.weight"] = full["embed_tokens.weight"] * 3
    twin = load_draft(config, full, sample_from_anchor=False)
    anchors, features = torch.tensor([5]), torch.randn(1, 9, 192)
    block, plain = (model.propose(anchors, features) for model in (found, twin))
    torch.testing.assert_close(block.hidden_states, plain.hidden_states)
    torch.testing.assert_close(block.logits, 2 * torch.tanh(plain.logits / 8))


def test_bare_rows_of_a_scaled_embedding():
    """Gemma's embedding module multiplies by sqrt(H); these drafts were trained on the rows as they are stored."""
    target = random_target("gemma3_text")
    found = load_draft(*zlab_files(*draft(**DFLASH))).attach_target(target)
    rows = found._embed(torch.tensor([[3, 9]]), found.vocabulary)
    weight = target.get_input_embeddings().weight.detach()
    assert torch.equal(rows[0], weight[[3, 9]])
    assert not torch.allclose(target.get_input_embeddings()(torch.tensor([3]))[0], weight[3])  # the control


# ---- TorchSpec


def test_a_block_size_that_is_not_in_the_file_is_asked_for(tmp_path):
    folder = write_draft(tmp_path, *torchspec_files(*draft()))
    with pytest.raises(ValueError, match="lacks `block_size`.*block_size=.*from_pretrained"):
        DSparkForCausalLM.from_pretrained(folder)
    for wrong in (0, "7", True):
        with pytest.raises(ValueError, match="`block_size` must be an integer"):
            DSparkForCausalLM.from_pretrained(folder, block_size=wrong)
    config = DSparkForCausalLM.from_pretrained(folder, block_size=7).config
    assert config.num_draft_tokens == 7 and "set by the caller" in config.resolution["block_size"]
    assert config.num_target_layers == 6 and "taps" in config.resolution["num_target_layers"]
    assert config.markov_head_type == "vanilla" and "classical" in config.resolution["markov_head_type"]


def test_two_names_for_one_tensor_are_an_error(tmp_path):
    raw, stored = torchspec_files(*draft(), internal=True)
    stored["fc.weight"] = stored["context_proj.weight"].clone()
    with pytest.raises(ValueError, match="context_proj.weight and fc.weight are both fc.weight"):
        DSparkForCausalLM.from_pretrained(write_draft(tmp_path, raw, stored), block_size=4)


def test_the_same_class_name_stands_for_two_layouts(tmp_path):
    """`DFlashDraftModel` without a block of its own keys: only the Markov head tells TorchSpec's DSpark apart."""
    config, tensors = draft()
    raw = without(config, "num_anchors") | {"architectures": ["DFlashDraftModel"]}
    with_head = open_checkpoint(write_draft(tmp_path / "a", raw, tensors)).config
    assert with_head.source_format == "torchspec" and with_head.num_draft_tokens == 4
    config, tensors = draft(**DFLASH)
    raw = without(config, "num_anchors") | {"architectures": ["DFlashDraftModel"]}
    without_head = open_checkpoint(write_draft(tmp_path / "b", raw, tensors)).config
    assert without_head.source_format == "zlab" and without_head.num_draft_tokens == 3


# ---- rotary pairs


@pytest.mark.parametrize("key", ["rope_is_neox_style", "is_neox_style"])
def test_interleaved_pairs_are_another_order_of_the_same_rows(key):
    config, tensors = draft(layers=2)
    target = random_target()
    raw, stored = specforge_files(config, interleave_heads(config, tensors), architectures=["Lfm2DSparkDraftModel"])
    found = load_draft(raw | {key: False}, stored).attach_target(target)
    twin = load_draft(config, shared_with(target, tensors))
    anchors, features = torch.tensor([5, 40]), torch.randn(2, 9, 192)
    block, other = (model.propose(anchors, features) for model in (found, twin))
    torch.testing.assert_close(block.logits, other.logits)
    halves = load_draft(raw, stored).attach_target(target).propose(anchors, features)
    assert not torch.allclose(halves.logits, other.logits)  # the control: the key matters


# ---- transformers' own


def test_the_same_hidden_states_as_transformers_own_class():
    muse = pytest.importorskip("transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant")
    from transformers import MuseGlimmerAssistantConfig

    config, tensors = draft(layers=2, gamma=5, **DFLASH)
    raw, stored = muse_files(config, tensors, sliding_window=4)
    own = muse.MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**raw)).eval()
    own.load_state_dict(stored)
    target = random_target()
    found = load_draft(raw, stored).attach_target(target)
    features, anchor, length = torch.randn(1, 9, 192), 7, 9
    ids = torch.tensor([[anchor, *[config["mask_token_id"]] * 4]])
    position_ids = torch.arange(length + 5)[None]
    distance = position_ids[0, length:, None] - position_ids
    mask = torch.zeros(1, 1, 5, length + 5).masked_fill(distance.abs() > 4, float("-inf"))
    masks = {"sliding_attention": mask, "full_attention": None}
    with torch.no_grad():
        embeds = target.get_input_embeddings()(ids)
        # Without a cache, transformers 5.24 needs the masks spelled out.
        expected = own(embeds, features, attention_mask=masks, position_ids=position_ids, use_cache=False)
    block = found.propose(torch.tensor([anchor]), features)
    torch.testing.assert_close(block.hidden_states, expected.last_hidden_state[:, 1:], atol=1e-4, rtol=1e-4)
    full = load_draft(raw | {"sliding_window": 100}, stored).attach_target(target)
    assert not torch.allclose(full.propose(torch.tensor([anchor]), features).hidden_states, block.hidden_states)
