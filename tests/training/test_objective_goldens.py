"""The objective against the public reference's values for every variant in `../shared/reference` ("Training")."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from hf_dspark import training

VARIANTS = ("vanilla", "gated", "rnn", "dflash", "conf_hidden", "conf_only", "gemma4")
SETTINGS = ("dspark", "ce_only", "no_decay")


class Case:
    """One variant: its draft, the batch of its target, and the golden files."""

    def __init__(self, folder, variant: str):
        family = "gemma4" if variant == "gemma4" else "qwen3"
        self.draft = AutoModel.from_pretrained(folder / "drafts" / variant, dtype=torch.float32)
        self.batch = load_file(folder / "goldens" / family / "training_batch.safetensors")
        golden = folder / "goldens" / "variants" / variant
        self.tensors = load_file(golden / "training.safetensors")
        self.settings = json.loads((golden / "training.json").read_text())["settings"]
        self.kept = self.tensors["eval_mask"].bool()

    def forward(self, **options):
        hidden = [self.batch["hidden.embed"], *(self.batch[f"hidden.layer{i}"] for i in range(6))]
        features = torch.cat([hidden[i + 1] for i in self.draft.config.target_layer_ids], dim=-1)
        anchors, keep = self.tensors["anchor_positions"], self.tensors["block_keep_mask"]
        inputs = self.batch["input_ids"], self.batch["loss_mask"], features, anchors, keep
        return training.forward_blocks(self.draft, *inputs, **options)

    def loss(self, setting: str, **options):
        golden = self.settings[setting]
        weights = {
            "ce": golden["ce_loss_alpha"],
            "tv": golden["l1_loss_alpha"],
            "confidence": golden["confidence_head_alpha"],
            "decay": golden["loss_decay_gamma"],
        }
        block = self.forward(lazy="chunk_elements" in options)
        return training.dspark_loss(block, self.batch["aligned_target_logits"], **weights, **options)


@pytest.fixture(scope="module", params=VARIANTS)
def case(request, shared_folder):
    return Case(shared_folder / "reference", request.param)


def test_forward(case):
    block, kept = case.forward(), case.kept
    assert torch.equal(block.eval_mask, kept)
    assert torch.equal(block.target_ids[kept], case.tensors["target_ids"][kept])
    torch.testing.assert_close(block.draft_logits[kept], case.tensors["draft_logits"][kept], atol=1e-4, rtol=0)
    assert (block.confidence_logits is None) == ("confidence_pred" not in case.tensors)
    if block.confidence_logits is not None:
        golden = case.tensors["confidence_pred"]
        torch.testing.assert_close(block.confidence_logits[kept], golden[kept], atol=1e-4, rtol=0)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("options", [{}, {"chunk_elements": 3000}], ids=["at once", "in chunks"])
def test_loss_and_gradients(case, setting, options):
    """Loss and components within 1e-5, the norm of every parameter's gradient within 1e-4, relative."""
    golden = case.settings[setting]
    case.draft.zero_grad()
    found = case.loss(setting, **options)
    found.loss.backward()
    components = {"loss": golden["loss"], "ce": golden["ce_loss"]}
    if golden["l1_loss_alpha"]:  # the reference leaves out what has no weight
        components["tv"] = golden["l1_loss"]
    if golden["has_confidence"]:
        components["confidence"] = golden["confidence_loss"]
    for name, value in components.items():
        assert getattr(found, name).item() == pytest.approx(value, rel=1e-5), name
    torch.testing.assert_close(found.accept_rate[case.kept], case.tensors["accept_rate"][case.kept], atol=1e-5, rtol=0)
    norms = {name: p.grad.norm().item() for name, p in case.draft.named_parameters() if p.grad is not None}
    norms = {name: norm for name, norm in norms.items() if name in golden["grad_norms"] or norm}
    assert norms == pytest.approx(golden["grad_norms"], rel=1e-4, abs=1e-7)
    if setting == "dspark":
        gradients = {name.removeprefix("grad."): t for name, t in case.tensors.items() if name.startswith("grad.")}
        for name, gradient in gradients.items():
            torch.testing.assert_close(case.draft.get_parameter(name).grad, gradient, atol=1e-6, rtol=1e-4)


def test_vocabulary_is_frozen(case):
    case.loss("dspark").loss.backward()
    assert case.draft.embed_tokens.weight.grad is None and case.draft.lm_head.weight.grad is None
