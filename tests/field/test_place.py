"""PLACE on the ragged path: devices, dtypes, and targets whose modules are not plain linear layers."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import checks
import tiny

PROMPT = [7, 21, 40]
ROWS = [PROMPT, [1, 2, 3, 4, 5, 6, 40], [9]]
SHARED = ("embed_tokens.weight", "lm_head.weight")
SINGLE = {"cache_implementation": "static"}
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
BATCHES = [(ROWS, {}), ([PROMPT], SINGLE)]


def led(target, slim: bool = False, **kwargs):
    """A draft that knows the texts of `ROWS`; `slim` files share embedding and head with the target."""
    table = torch.zeros(tiny.V, tiny.V)
    for row in ROWS:
        text = checks.plain(target, row)[0].tolist()
        own = tiny.text_table(text)
        table = torch.where(own.any(-1, keepdim=True), own, table)
    config, tensors = tiny.guided_files(table)
    if slim:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in SHARED}
    return tiny.load_draft(config, tensors, **kwargs)


# ---- PLACE-2


@pytest.mark.parametrize("rows,more", BATCHES)
@pytest.mark.parametrize("eos", [[38, 9], torch.tensor([38, 9]), torch.tensor(38)])
def test_place_2_every_form_of_end_of_text_ids(rows, more, eos):
    target, draft = tiny.perm_target(), tiny.perm_draft()
    for options in ({}, {"min_new_tokens": 6}, {"min_length": 12}):
        given = {"eos_token_id": eos, "pad_token_id": 0, "max_new_tokens": 20, "do_sample": False} | options
        expected = target.generate(**checks.batch(rows), **given)
        found = target.generate(**checks.batch(rows), assistant_model=draft, **given, **more)
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("draft_device", [pytest.param(d, marks=GPU) for d in ("cuda", "cpu")])
@pytest.mark.parametrize("rows,more", BATCHES)
def test_place_2_devices(rows, more, draft_device):
    """Target on the GPU, draft beside it or on the CPU (the reason says what that costs, or it is refused)."""
    target = copy.deepcopy(tiny.perm_target()).cuda()
    draft = copy.deepcopy(tiny.perm_draft()).to(draft_device)
    batch = {name: tensor.cuda() for name, tensor in checks.batch(rows).items()}
    options = {"eos_token_id": [61, 60], "min_new_tokens": 6, "pad_token_id": 0, "max_new_tokens": 20}
    expected = target.generate(**batch, do_sample=False, **options)
    try:
        found = target.generate(**batch, do_sample=False, assistant_model=draft, **options, **more)
    except ValueError as error:
        assert draft_device == "cpu" and "device" in str(error)
        return
    assert found.tolist() == expected.tolist()


# ---- PLACE-4: the head is called, and so is every other module


class Opaque(nn.Module):
    """A layer without `.weight`, as quantisation back ends make them."""

    def __init__(self, linear):
        super().__init__()
        self.inner = linear

    def forward(self, x):
        return self.inner(x)


def with_opaque(names: tuple[str, ...]):
    target = copy.deepcopy(tiny.random_target())
    for module in list(target.modules()):
        for name in names:
            if isinstance(getattr(module, name, None), nn.Linear):
                setattr(module, name, Opaque(getattr(module, name)))
    return target


@pytest.mark.parametrize("rows,more", BATCHES)
@pytest.mark.parametrize("slim", [False, True])
@pytest.mark.parametrize("names", [("lm_head",), ("q_proj", "down_proj"), ("k_proj", "v_proj", "gate_proj", "lm_head")])
def test_place_4_layers_are_called_not_sliced(names, slim, rows, more):
    target = with_opaque(names)
    _, stats, _ = checks.batch_equals_plain(target, led(target, slim), rows, **more)
    assert stats.num_accepted > 0


@pytest.mark.parametrize("rows,more", BATCHES)
def test_place_4_int8_head(rows, more):
    """A dynamically quantised head depends on who is beside whom in the batch; text is T-perm's all the same."""
    target = copy.deepcopy(tiny.perm_target())
    torch.backends.quantized.engine = "onednn" if "onednn" in torch.backends.quantized.supported_engines else "qnnpack"
    target.lm_head.qconfig = torch.ao.quantization.default_dynamic_qconfig
    target.lm_head = torch.ao.nn.quantized.dynamic.Linear.from_float(target.lm_head)
    new, stats, _ = checks.batch_equals_plain(target, tiny.perm_draft(), rows, **more)
    assert new == [tiny.chain(row[-1], 20) for row in rows] and stats.num_accepted > 0


@pytest.mark.parametrize("vision_layers", [1, 6])
@pytest.mark.parametrize("rows,more", BATCHES)
def test_place_4_text_tower_inside_a_multimodal_model(rows, more, vision_layers):
    """The vision tower may be as deep as the text tower; the taps are the text tower's."""
    target = tiny.llava(vision_layers)
    draft = led(target)
    expected = target.generate(**checks.batch(rows), max_new_tokens=20, do_sample=False, pad_token_id=0)
    output, stats = checks.generate(target, draft, None, **checks.batch(rows), pad_token_id=0, **more)
    assert output.tolist() == expected.tolist()
    assert stats.path != "ragged" or stats.num_accepted > 0


@pytest.mark.parametrize("rows,more", BATCHES)
def test_place_4_tied_weights_stay_tied(rows, more):
    """Head and embedding are one tensor before and after; the twin computes with the same one."""
    target = copy.deepcopy(tiny.random_target(tie_word_embeddings=True))
    draft = led(target)
    checks.batch_equals_plain(target, draft, rows, **more)
    assert target.lm_head.weight is target.model.embed_tokens.weight
    with torch.no_grad():
        target.lm_head.weight.add_(0.3 * torch.randn_like(target.lm_head.weight))
    checks.batch_equals_plain(target, draft, rows, **more)


# ---- PLACE-6


@pytest.mark.parametrize("draft_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slim", [False, True])
def test_place_6_mixed_dtypes(target_dtype, draft_dtype, slim):
    target = tiny.perm_target(dtype=target_dtype)
    config, tensors = tiny.guided_files(tiny.one_hot_table(tiny.NEXT, 40.0))
    draft = tiny.load_draft(config, {n: t for n, t in tensors.items() if not (slim and n in SHARED)}, dtype=draft_dtype)
    for rows, more in BATCHES:
        new, stats, _ = checks.batch_equals_plain(target, draft, rows, **more)
        assert new == [tiny.chain(row[-1], 20) for row in rows] and stats.num_accepted > 0
        sampled = target.generate(
            **checks.batch(rows), assistant_model=draft, do_sample=True, max_new_tokens=20, pad_token_id=0, **more
        )
        assert sampled[:, -20:].tolist() == new
    assert {p.dtype for p in draft.parameters()} == {draft_dtype}


@pytest.mark.parametrize("rows,more", BATCHES)
def test_place_6_autocast_inference_mode_and_what_follows(rows, more):
    """Buffers made in one mode are used in another; a draft that has generated can still be trained."""
    target, draft = tiny.perm_target(), copy.deepcopy(led(tiny.perm_target()))
    modes = [torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16), nullcontext, torch.no_grad]
    expected = [tiny.chain(row[-1], 20) for row in rows]
    for mode in [*modes, *reversed(modes)]:
        with mode():
            output, _ = checks.generate(target, draft, None, **checks.batch(rows), pad_token_id=0, **more)
        assert output[:, -20:].tolist() == expected
    assert not any(p.is_inference() for p in (*target.parameters(), *draft.parameters()))
    draft.fc(torch.randn(1, 2, 192)).sum().backward()
    assert draft.fc.weight.grad is not None
