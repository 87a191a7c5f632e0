"""LOAD: how a folder becomes a draft, whatever its class name, and where embeddings and head come from."""

import copy

import pytest
import torch
from family_files import SHARED, specforge_files, speculators_files, without, zlab_files
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

import checks
import tiny
from hf_dspark import DSparkForCausalLM

PROMPT = [7, 21, 40]


def files_without(*names, **settings):
    """A draft led along T-perm's chain whose file lacks some tensors."""
    config, tensors = tiny.guided_files(tiny.one_hot_table(tiny.NEXT, 40.0), **settings)
    return config, without(tensors, *names)


@pytest.mark.parametrize("label", ["DSparkDraftModel", "DSparkSpeculator", None])
def test_load_2_class_names_do_not_decide(label, tmp_path):
    """A Qwen3-style folder under another family's class name, or none, loads from its keys and tensor names."""
    config, tensors = files_without()
    config = without(config, "architectures") | ({"architectures": [label]} if label else {})
    folder = tiny.write_draft(tmp_path, config, tensors)
    draft = DSparkForCausalLM.from_pretrained(folder)
    _, stats = checks.equal_to_plain(tiny.perm_target(), draft, PROMPT)
    assert stats.num_accepted > 0
    if label:
        assert isinstance(AutoModel.from_pretrained(folder), DSparkForCausalLM)
        assert isinstance(AutoModelForCausalLM.from_pretrained(folder), DSparkForCausalLM)


def test_load_2_another_architecture_is_refused_by_name(tmp_path):
    config, tensors = files_without()
    with pytest.raises(ValueError, match="Kimi K3.*multi-head latent attention.*run it with") as error:
        DSparkForCausalLM.from_pretrained(
            tiny.write_draft(tmp_path, config | {"architectures": ["K3DSparkModel"]}, tensors)
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("missing", [SHARED, SHARED[:1], SHARED[1:]])
def test_load_4_slim_files_share_the_targets_modules(missing):
    target = tiny.perm_target()
    config, tensors = files_without(*missing)
    draft = tiny.load_draft(config, tensors)
    assert all(not p.is_meta and p.isfinite().all() for p in draft.parameters())
    features = torch.randn(1, 3, 192)
    with pytest.raises(ValueError, match="attach_target"):
        draft.propose(torch.tensor([9]), features)
    _, stats = checks.equal_to_plain(target, draft, PROMPT)
    assert stats.num_accepted > 0
    full = dict(tensors)
    if "embed_tokens.weight" in missing:
        full["embed_tokens.weight"] = target.model.embed_tokens.weight.detach()
    if "lm_head.weight" in missing:
        full["lm_head.weight"] = target.lm_head.weight.detach()
    expected = tiny.load_draft(config, full).propose(torch.tensor([9]), features)
    block = draft.attach_target(target).propose(torch.tensor([9]), features)
    torch.testing.assert_close(block.logits, expected.logits)
    assert block.tokens.tolist() == expected.tokens.tolist()
    assert not any(name.startswith(missing) for name in draft.state_dict())


SLIM = {
    "speculators": (speculators_files, {"rank": 64}), "z-lab": (zlab_files, {"rank": 0, "confidence": None}),
    "SpecForge": (specforge_files, {"rank": 64}),
}  # fmt: skip


@pytest.mark.parametrize("form", SLIM)
@pytest.mark.parametrize("low_memory", [False, True])
def test_load_4_slim_files_of_other_families(form, low_memory, tmp_path):
    """Usable only once paired, equal to a draft with the target's tensors of its own, nothing left uninitialised."""
    make, settings = SLIM[form]
    target = tiny.perm_target()
    config = tiny.draft_config(**settings)
    tensors = tiny.draft_tensors(config)
    raw, stored = make(config, without(tensors, *SHARED))
    options = {"low_cpu_mem_usage": True, "device_map": {"": "cpu"}} if low_memory else {}
    draft = DSparkForCausalLM.from_pretrained(tiny.write_draft(tmp_path, raw, stored), **options)
    assert all(not p.is_meta and p.isfinite().all() for p in draft.parameters())
    features, anchor = torch.randn(1, 5, 192), torch.tensor([9])
    with pytest.raises(ValueError, match="attach_target"):
        draft.propose(anchor, features)
    full = tensors | {
        "embed_tokens.weight": target.model.embed_tokens.weight.detach(),
        "lm_head.weight": target.lm_head.weight.detach(),
    }
    twin = tiny.load_draft(config, full, sample_from_anchor=draft.config.sample_from_anchor)
    block, expected = draft.attach_target(target).propose(anchor, features), twin.propose(anchor, features)
    assert torch.equal(block.logits, expected.logits)
    checks.equal_to_plain(target, draft, PROMPT)


@pytest.mark.parametrize("form", ["deepspec", "speculators", "SpecForge"])
def test_load_6_heads_are_never_dropped_in_silence(form, tmp_path):
    """A head in the file that the config denies, and one that the config announces and the file lacks."""
    config = tiny.draft_config()
    tensors = tiny.draft_tensors(config)
    make = {"deepspec": lambda *files: files, "speculators": speculators_files, "SpecForge": specforge_files}[form]
    raw, stored = make(config | {"markov_rank": 0}, tensors)
    with pytest.raises(ValueError, match="`markov_rank` is 0.*markov_head.markov_w1.weight"):
        DSparkForCausalLM.from_pretrained(tiny.write_draft(tmp_path / "a", raw, stored))
    raw, stored = make(config | {"markov_rank": 256}, tensors)
    stored = {name: tensor for name, tensor in stored.items() if "markov" not in name}
    with pytest.raises(ValueError, match="`markov_rank` is 256.*markov_head.markov_w1.weight"):
        DSparkForCausalLM.from_pretrained(tiny.write_draft(tmp_path / "b", raw, stored))
    raw, stored = make(config, without(tensors, "confidence_head.proj.weight", "confidence_head.proj.bias"))
    with pytest.raises(ValueError, match="enable_confidence_head.*confidence_head.proj.weight"):
        DSparkForCausalLM.from_pretrained(tiny.write_draft(tmp_path / "c", raw, stored))


def test_load_8_own_embedding_and_head_of_another_width():
    """A draft narrower than its target keeps its own tensors; only `fc` is sized for the target."""
    config = tiny.draft_config(hidden=32, rank=64)
    tensors = tiny.markov_tensors(config, tiny.one_hot_table(tiny.NEXT), torch.zeros(64), target_hidden=64)
    draft = tiny.load_draft(config, tensors)
    assert draft.embed_tokens.weight.shape == (64, 32)
    _, stats = checks.equal_to_plain(tiny.perm_target(), draft, PROMPT)
    assert stats.num_accepted == 15
    slim = {name: tensor for name, tensor in tensors.items() if name not in SHARED}
    checks.refused(tiny.perm_target(), tiny.load_draft(config, slim), PROMPT, 32, 64)


class Wrapper(nn.Module):
    """As adapters wrap a model: the target is `base_model.model`, everything else is passed through."""

    def __init__(self, model):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model.model, name)

    def forward(self, *args, **kwargs):
        return self.base_model.model(*args, **kwargs)

    def generate(self, *args, **kwargs):
        return self.base_model.model.generate(*args, **kwargs)


@pytest.mark.parametrize("slim", [False, True])
@pytest.mark.parametrize("kind", ["wrapped", "compiled", "multimodal"])
def test_load_10_wherever_the_target_keeps_its_embedding(kind, slim):
    target = {
        "wrapped": lambda: Wrapper(tiny.random_target()), "multimodal": tiny.llava,
        "compiled": lambda: torch.compile(copy.deepcopy(tiny.random_target()), backend="eager"),
    }[kind]()  # fmt: skip
    text = checks.plain(target, PROMPT)[0].tolist()
    config, tensors = tiny.guided_files(tiny.text_table(text))
    if slim:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in SHARED}
    draft = tiny.load_draft(config, tensors)
    _, stats = checks.equal_to_plain(target, draft, PROMPT)
    assert stats.num_accepted > 0
    draft.attach_target(target)
