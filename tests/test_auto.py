"""What importing the package does to transformers' Auto classes, and what it leaves alone."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from family_files import specforge_files, speculators_files, torchspec_files, zlab_files
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto import auto_factory

import hf_dspark
from hf_dspark import DSparkConfig, DSparkForCausalLM, Gemma4DSparkModel, Qwen3DSparkModel, auto
from tiny import draft_config, draft_tensors, write_draft

AUTOS = [AutoModel, AutoModelForCausalLM]
QWEN3 = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA4 = QWEN3 | {"global_head_dim": 8, "hidden_size_per_layer_input": 0, "layer_types": ["full_attention"] * 2}


@pytest.fixture
def folder(tmp_path):
    config = draft_config()
    return write_draft(tmp_path / "draft", config, draft_tensors(config))


@pytest.mark.parametrize("auto_class", AUTOS)
def test_known_names_are_claimed(auto_class, folder, shared_folder):
    assert type(auto_class.from_pretrained(folder)) is Qwen3DSparkModel
    assert type(auto_class.from_pretrained(shared_folder / "reference" / "drafts" / "gemma4")) is Gemma4DSparkModel


@pytest.mark.parametrize("auto_class", AUTOS)
def test_arguments_reach_the_draft(auto_class, folder):
    draft = auto_class.from_pretrained(folder, dtype=torch.bfloat16, sample_from_anchor=False)
    assert draft.dtype == torch.bfloat16 and draft.config.num_draft_tokens == 3


def test_drafts_saved_by_the_package_are_claimed_again(folder, tmp_path):
    AutoModel.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    assert type(AutoModel.from_pretrained(tmp_path / "saved")) is Qwen3DSparkModel


@pytest.mark.parametrize("auto_class", AUTOS)
def test_the_packages_own_model_type(auto_class, tmp_path):
    config = DSparkConfig(
        **QWEN3, mask_token_id=31, target_hidden_size=16, target_layer_ids=[0], has_embed_tokens=True, has_lm_head=True,
        markov_rank=4,
    )  # fmt: skip
    draft = auto_class.from_config(config)
    assert type(draft) is DSparkForCausalLM
    draft.save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), DSparkConfig)
    assert type(auto_class.from_pretrained(tmp_path)) is DSparkForCausalLM


# ---- other families


NAMED = {
    "speculators": lambda *files: speculators_files(*files),
    "speculators without a name": lambda *files: speculators_files(*files, architectures=None),
    "speculators with a model type": lambda *files: speculators_files(*files, model_type="llama", architectures=None),
    "SpecForge": lambda *files: specforge_files(*files),
    "LFM2.5": lambda *files: specforge_files(*files, architectures=["Lfm2DSparkDraftModel"]),
    "TorchSpec": lambda *files: torchspec_files(*files, block_size=4),
    "TorchSpec without a model type": lambda *files: torchspec_files(*files, block_size=4, model_type=None),
    "z-lab": lambda *files: zlab_files(*files),
    "z-lab for another target": lambda *files: zlab_files(*files, model_type="llama"),
}


@pytest.mark.parametrize("auto_class", AUTOS)
@pytest.mark.parametrize("name", NAMED)
def test_other_families_are_claimed_by_name(auto_class, name, tmp_path, modules_cache):
    dflash = {"rank": 0, "confidence": None} if name.startswith("z-lab") else {}
    config = draft_config(**dflash)
    folder = write_draft(tmp_path / "draft", *NAMED[name](config, draft_tensors(config)))
    for trust in (None, True):
        add_code(folder, tmp_path / "ran")
        draft = auto_class.from_pretrained(folder, trust_remote_code=trust, dtype=torch.bfloat16)
        assert isinstance(draft, DSparkForCausalLM) and draft.dtype == torch.bfloat16
    assert not (tmp_path / "ran").exists()
    layout = draft.config.sample_from_anchor
    other = auto_class.from_pretrained(folder, sample_from_anchor=not layout, mask_token_id=5)
    assert other.config.sample_from_anchor is not layout and other.config.mask_token_id == 5


def test_a_block_size_reaches_a_file_that_has_none(tmp_path):
    config = draft_config()
    folder = write_draft(tmp_path, *torchspec_files(config, draft_tensors(config)))
    assert AutoModel.from_pretrained(folder, block_size=6).config.num_draft_tokens == 6
    with pytest.raises(ValueError, match="block_size"):
        AutoModel.from_pretrained(folder)


def test_unknown_model_types_without_a_drafts_name_fail_as_before(tmp_path):
    config = draft_config() | {"model_type": "no_such_model", "architectures": ["NoSuchModel"]}
    with pytest.raises(ValueError, match="no_such_model"):
        AutoModel.from_pretrained(write_draft(tmp_path, config, draft_tensors(config)))


# ---- everything else is as before


def native(name, auto_class, fields):
    """The native class of a config, and a tiny config of it."""
    config_class = getattr(transformers, name, None)
    if config_class is None:
        pytest.skip(f"this transformers has no {name}")
    model = {"Qwen3Config": "Qwen3", "Gemma4TextConfig": "Gemma4", "Gemma4UnifiedTextConfig": "Gemma4Unified"}[name]
    middle = "" if name == "Qwen3Config" else "Text"
    full = f"{model}{middle}Model" if auto_class is AutoModel else f"{model}ForCausalLM"
    return full, config_class(**fields)


@pytest.mark.parametrize("auto_class", AUTOS)
@pytest.mark.parametrize("name", auto.CLAIMED_CONFIGS)
def test_plain_models_resolve_to_their_native_class(auto_class, name, tmp_path):
    expected, config = native(name, auto_class, QWEN3 if name == "Qwen3Config" else GEMMA4)
    if type(config) not in auto_class._model_mapping:
        pytest.skip(f"{auto_class.__name__} knows no {name}")
    assert config.architectures is None
    model = auto_class.from_config(config)
    assert type(model).__name__ == expected and type(model).__module__.startswith("transformers.")
    model.save_pretrained(tmp_path)
    assert type(auto_class.from_pretrained(tmp_path)) is type(model)
    raw = json.loads((tmp_path / "config.json").read_text())
    for architectures in (None, [], ["SomethingElse"]):
        changed = {key: value for key, value in raw.items() if key != "architectures"}
        if architectures is not None:
            changed["architectures"] = architectures
        (tmp_path / "config.json").write_text(json.dumps(changed))
        assert type(auto_class.from_pretrained(tmp_path)) is type(model)


def test_composite_models_with_a_qwen3_text_part():
    vision = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 8, "patch_size": 4, "projection_dim": 16}  # fmt: skip
    for architectures in (None, ["Qwen3ForCausalLM"]):
        text = transformers.Qwen3Config(**QWEN3, architectures=architectures)
        config = transformers.LlavaConfig(
            text_config=text, vision_config=transformers.CLIPVisionConfig(**vision), image_token_id=3
        )
        model = AutoModelForImageTextToText.from_config(config)
        assert type(model.model.language_model).__name__ == "Qwen3Model"


def test_registering_again_changes_nothing():
    def state():
        contents = [dict(auto_class._model_mapping._extra_content) for auto_class in AUTOS]
        return contents, auto_factory._get_model_class, AutoConfig.from_pretrained.__func__

    before = state()
    auto.register()
    auto.register()
    assert state() == before
    models = AutoModel._model_mapping[transformers.Qwen3Config]
    assert models == (transformers.Qwen3Model, Qwen3DSparkModel, Gemma4DSparkModel)


def test_another_packages_claims_are_kept(monkeypatch):
    class Theirs(transformers.Qwen3Model):
        pass

    contents = dict(AutoModel._model_mapping._extra_content)
    contents[transformers.Qwen3Config] = (transformers.Qwen3Model, Theirs)
    monkeypatch.setattr(AutoModel._model_mapping, "_extra_content", contents)
    auto.register()
    models = (transformers.Qwen3Model, Theirs, Qwen3DSparkModel, Gemma4DSparkModel)
    assert AutoModel._model_mapping[transformers.Qwen3Config] == models


# ---- code that comes with a checkpoint

CODE = """
open({marker!r}, "a").write("ran")
from transformers import Qwen3Config, Qwen3Model
class Config(Qwen3Config): pass
class Model(Qwen3Model): config_class = Config
"""


def add_code(folder, marker):
    (folder / "modeling_own.py").write_text(CODE.format(marker=str(marker)))
    raw = json.loads((folder / "config.json").read_text())
    raw["auto_map"] = {"AutoConfig": "modeling_own.Config", "AutoModel": "modeling_own.Model"}
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.fixture
def modules_cache(tmp_path, monkeypatch):
    """Keeps transformers' copies of remote code inside this test."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def test_code_of_a_claimed_folder_never_runs(folder, tmp_path, modules_cache):
    add_code(folder, tmp_path / "ran")
    for trust in (None, False, True):
        assert type(AutoModel.from_pretrained(folder, trust_remote_code=trust)) is Qwen3DSparkModel
        assert type(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)) is Qwen3DSparkModel
        assert type(AutoConfig.from_pretrained(folder, trust_remote_code=trust)) is transformers.Qwen3Config
    assert not (tmp_path / "ran").exists()


def test_code_of_other_folders_runs_as_before(tmp_path, modules_cache):
    transformers.Qwen3Model(transformers.Qwen3Config(**QWEN3)).save_pretrained(tmp_path / "plain")
    add_code(tmp_path / "plain", tmp_path / "ran")
    assert type(AutoModel.from_pretrained(tmp_path / "plain")) is transformers.Qwen3Model
    assert not (tmp_path / "ran").exists()
    model = AutoModel.from_pretrained(tmp_path / "plain", trust_remote_code=True)
    assert type(model).__name__ == "Model" and (tmp_path / "ran").exists()


def test_unused_arguments_are_returned_as_before(folder):
    for trust in (False, True):
        config, unused = AutoConfig.from_pretrained(
            folder, return_unused_kwargs=True, trust_remote_code=trust, something_else=3
        )
        assert type(config) is transformers.Qwen3Config and unused["something_else"] == 3


# ---- refusals through the Auto classes


def test_a_claimed_name_on_the_wrong_tensors_is_refused(tmp_path):
    config = draft_config()
    save_file({"model.embed_tokens.weight": torch.ones(4, 4)}, write_draft(tmp_path, config, {}) / "model.safetensors")
    with pytest.raises(ValueError, match="not a DSpark draft"):
        AutoModel.from_pretrained(tmp_path)


def test_without_the_import_nothing_is_claimed(folder):
    """The control: what the claim is for. Plain transformers builds a Qwen3 with fresh weights, in silence."""
    script = (
        "from transformers import AutoModel\n"
        f"print(type(AutoModel.from_pretrained({str(folder)!r})).__name__)\n"
        "import hf_dspark\n"
        f"print(type(AutoModel.from_pretrained({str(folder)!r})).__name__)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.stdout.split() == ["Qwen3Model", "Qwen3DSparkModel"], run.stderr
    assert hf_dspark.__name__ in sys.modules
