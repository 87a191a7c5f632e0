"""LoRA on the target, merged or not; adapters switched between calls; targets that are wrapped or compiled."""

import copy

import pytest
import torch
from packaging.version import Version

import checks
import tiny

peft = pytest.importorskip("peft")

ROWS = [[7, 21, 40], [1, 2, 3, 4, 5, 6, 40], [9]]
STATIC = {"cache_implementation": "static"}
BATCHES = [(ROWS, {}), (ROWS[:1], STATIC), (ROWS[:1], {})]


def with_adapters():
    """T-rand under two strong adapters, "a" (active) and "b"."""
    torch.manual_seed(0)
    modules = ["q_proj", "v_proj", "up_proj", "o_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=modules, init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(tiny.random_target(layers=3)), config, adapter_name="a")
    model.add_adapter("b", config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    return model.eval()


def text_of(model, rows):
    return model.generate(**checks.batch(rows), max_new_tokens=16, do_sample=False, pad_token_id=0).tolist()


def equals_plain(model, draft, rows, more, path=None):
    """Texts with and without draft, and the path."""
    expected = text_of(model, rows)
    options = {"max_new_tokens": 16, "pad_token_id": 0, **checks.batch(rows), **more}
    found, stats = checks.generate(model, draft, None, **options)
    assert found.tolist() == expected and stats.num_rounds > 0
    assert stats.path == ("plain" if rows == ROWS[:1] and not more else "ragged"), stats.reason
    return expected


def led(model):
    """A draft that knows the text of the active adapter for the first row."""
    text = text_of(model, ROWS[:1])[0]
    return tiny.load_draft(*tiny.guided_files(tiny.text_table(text), taps=(0, 1)))


@pytest.mark.parametrize("rows,more", BATCHES)
def test_lora_is_part_of_the_target(rows, more):
    model = with_adapters()
    draft = led(model)
    own = equals_plain(model, draft, rows, more)
    with model.disable_adapter():
        assert text_of(model, rows) != own, "the adapter matters"


@pytest.mark.parametrize("rows,more", BATCHES)
def test_adapters_switched_between_calls(rows, more):
    model = with_adapters()
    draft = led(model)
    first = equals_plain(model, draft, rows, more)
    model.set_adapter("b")
    second = equals_plain(model, draft, rows, more)
    with model.disable_adapter():
        third = equals_plain(model, draft, rows, more)
    model.set_adapter("a")
    assert equals_plain(model, draft, rows, more) == first
    assert len({str(texts) for texts in (first, second, third)}) == 3


@pytest.mark.parametrize("rows,more", BATCHES)
def test_adapters_merged_and_unmerged(rows, more):
    model = with_adapters()
    draft = led(model)
    base = model.get_base_model()
    first = equals_plain(model, draft, rows, more)
    model.merge_adapter(["a"])
    assert equals_plain(base, draft, rows, more) == first
    model.unmerge_adapter()
    equals_plain(model, draft, rows, more)
    layer = base.model.layers[0].self_attn.q_proj
    layer.scaling["a"] *= -3
    assert equals_plain(model, draft, rows, more) != first
    layer.scaling["a"] /= -3
    merged = model.merge_and_unload()
    assert equals_plain(merged, draft, rows, more) == first


@pytest.mark.parametrize("rows,more", BATCHES)
def test_transformers_own_adapter_methods(rows, more):
    """`model.add_adapter(...)`, `enable_adapters`, `disable_adapters`, `delete_adapter`."""
    if Version(peft.__version__) < Version("0.22"):
        pytest.skip("transformers asks for PEFT 0.22 here")
    target = copy.deepcopy(tiny.random_target(layers=3))
    draft = led(target)
    plain = equals_plain(target, draft, rows, more)
    target.add_adapter(peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "down_proj"],
                                       init_lora_weights=False), adapter_name="x")  # fmt: skip
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    target.eval()
    assert equals_plain(target, draft, rows, more) != plain
    target.disable_adapters()
    assert equals_plain(target, draft, rows, more) == plain
    target.enable_adapters()
    assert equals_plain(target, draft, rows, more) != plain
    target.delete_adapter("x")
    assert equals_plain(target, draft, rows, more) == plain


@pytest.mark.parametrize("rows,more", BATCHES)
def test_an_adapter_that_changes_the_weights_in_place(rows, more):
    """Training steps between two calls: fused projections are the same memory."""
    model = with_adapters()
    draft = led(model)
    first = equals_plain(model, draft, rows, more)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "k_proj" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    assert equals_plain(model, draft, rows, more) != first


@pytest.mark.parametrize("rows,more", BATCHES)
@pytest.mark.parametrize("how", ["torch.compile(target)", "target.compile()", "target.model.compile()"])
def test_compiled_targets(how, rows, more):
    """Where the caller's compiled modules would be left aside, the text is the same and the reason names it."""
    target = copy.deepcopy(tiny.random_target(layers=2))
    draft = led(target)
    expected = text_of(target, rows)
    if how == "torch.compile(target)":
        target = torch.compile(target, backend="eager")
    else:
        (target if how == "target.compile()" else target.model).compile(backend="eager")
    found, stats = checks.generate(target, draft, None, **checks.batch(rows), max_new_tokens=16, pad_token_id=0, **more)
    assert found.tolist() == expected and stats.reason
