"""PLACE-4/6, PERF-2/6, STREAM-7: draft and target as a pair in generate()."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import checks
import hf_dspark
import tiny

PROMPT = [7, 21, 40]


def files_without(*names, **settings):
    """A draft led along T-perm's chain whose file lacks some tensors."""
    config, tensors = tiny.guided_files(tiny.one_hot_table(tiny.NEXT, 40.0), **settings)
    return config, {name: tensor for name, tensor in tensors.items() if name not in names}


SHARED = ("embed_tokens.weight", "lm_head.weight")


def test_a_config_that_was_edited_after_loading_is_checked_again():
    target = tiny.random_target()
    for name, value, words in (
        ("target_layer_ids", [0, 2], (128, 192)), ("target_layer_ids", [-2, 0, 1], (-1, 5)),
        ("mask_token_id", 64, (64,)), ("mask_token_id", -1, (-1, 64)),
    ):  # fmt: skip
        draft = tiny.random_draft()
        setattr(draft.config, name, value)
        checks.refused(target, draft, PROMPT, *words)
    draft = tiny.random_draft()
    draft.config.target_layer_ids, draft.config.mask_token_id = [1, 3, 5], 60
    checks.equal_to_plain(target, draft, PROMPT)


def test_another_name_of_the_target_warns_and_works(caplog):
    target, draft = copy.deepcopy(tiny.random_target()), tiny.random_draft()
    target.config._name_or_path, draft.config.target_name_or_path = "owner/Large-Base", "owner/Large"
    checks.equal_to_plain(target, draft, PROMPT)
    checks.equal_to_plain(target, draft, PROMPT)
    (message,) = [r.getMessage() for r in caplog.records if "as its target" in r.getMessage()]
    assert "owner/Large " in message and "owner/Large-Base" in message
    caplog.clear()
    target.config._name_or_path = "mirror/large"
    checks.equal_to_plain(target, draft, PROMPT)
    assert not [r for r in caplog.records if "as its target" in r.getMessage()]


class Opaque(nn.Module):
    """A head without `.weight`, as quantisation back ends make them."""

    def __init__(self, linear):
        super().__init__()
        self.inner, self.rows = [linear], []

    def forward(self, x):
        self.rows.append(x.numel() // x.shape[-1])
        return self.inner[0](x)


def test_place_4_head_is_called_not_sliced():
    target = copy.deepcopy(tiny.random_target())
    text = checks.plain(target, PROMPT)[0].tolist()
    target.lm_head = Opaque(target.lm_head)
    config, tensors = tiny.guided_files(tiny.text_table(text))
    draft = tiny.load_draft(config, {name: tensor for name, tensor in tensors.items() if name not in SHARED})
    _, stats = checks.equal_to_plain(target, draft, PROMPT)
    assert stats.num_accepted > 0


def test_place_4_int8_head():
    target = copy.deepcopy(tiny.random_target())
    torch.backends.quantized.engine = "onednn" if "onednn" in torch.backends.quantized.supported_engines else "qnnpack"
    target.lm_head = torch.ao.nn.quantized.dynamic.Linear.from_float(with_qconfig(target.lm_head))
    text = checks.plain(target, PROMPT)[0].tolist()
    config, tensors = tiny.guided_files(tiny.text_table(text))
    draft = tiny.load_draft(config, {name: tensor for name, tensor in tensors.items() if name not in SHARED})
    _, stats = checks.generate(target, draft, PROMPT)
    assert stats.num_tokens == 20 and stats.num_accepted > 0


def with_qconfig(linear):
    linear.qconfig = torch.ao.quantization.default_dynamic_qconfig
    return linear


@pytest.mark.parametrize("draft_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slim", [False, True])
def test_place_6_mixed_dtypes(target_dtype, draft_dtype, slim):
    target = tiny.perm_target(dtype=target_dtype)
    config, tensors = files_without(*(SHARED if slim else ()))
    draft = tiny.load_draft(config, tensors, dtype=draft_dtype)
    assert {p.dtype for p in draft.parameters()} == {draft_dtype}
    new, stats = checks.equal_to_plain(target, draft, PROMPT, return_dict_in_generate=True, output_scores=True)
    assert new == tiny.chain(40, 20) and stats.num_accepted > 0
    output, _ = checks.generate(target, draft, PROMPT, do_sample=True)
    assert output[0, 3:].tolist() == new


def test_place_6_autocast_and_inference_mode():
    target, draft = tiny.perm_target(), tiny.load_draft(*files_without())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert checks.generate(target, draft, PROMPT)[0][0, 3:].tolist() == tiny.chain(40, 20)
    checks.equal_to_plain(target, draft, PROMPT)
    with torch.inference_mode():
        output, _ = checks.generate(target, draft, PROMPT, return_dict_in_generate=True)
    checks.equal_to_plain(target, draft, PROMPT)
    options = {"past_key_values": output.past_key_values} if hasattr(output, "past_key_values") else {}
    again, _ = checks.generate(target, draft, output.sequences, **options)
    assert again[0, 3:].tolist() == tiny.chain(40, 40)
    copy.deepcopy(draft).fc.weight.sum().backward()


@pytest.mark.parametrize("name", ["no head", "confidence"])
@pytest.mark.parametrize("sample", [False, True])
def test_perf_2_work_per_round(name, sample):
    """A round is one target forward over ℓ+1 tokens and one backbone forward; heads see no more rows than that."""
    target = copy.deepcopy(tiny.random_target())
    text = checks.plain(target, PROMPT, max_new_tokens=30)[0].tolist()
    config, tensors = tiny.guided_files(
        tiny.text_table(text), layers=2, confidence=None if name == "no head" else "markov"
    )
    draft = tiny.load_draft(config, tensors)
    rows = {"target": [], "draft": [], "context": []}
    hooks = [
        target.lm_head.register_forward_pre_hook(lambda m, a: rows["target"].append(a[0].shape[1])),
        draft.lm_head.register_forward_pre_hook(lambda m, a: rows["draft"].append(a[0].shape[1])),
        draft.fc.register_forward_pre_hook(lambda m, a: rows["context"].append(a[0].shape[1])),
    ]
    options = {"do_sample": sample, "temperature": 0.7, "max_new_tokens": 30}
    with checks.CallCounter(target) as target_calls, checks.CallCounter(draft.layers[1]) as draft_calls:
        _, stats = checks.generate(target, draft, PROMPT, **options)
    for hook in hooks:
        hook.remove()
    assert target_calls.shapes == [(1, 3)] + [(1, r.verified + 1) for r in stats.rounds]
    assert len(draft_calls.shapes) == stats.num_rounds
    assert rows["target"] == [1] + [r.verified + 1 for r in stats.rounds]
    assert rows["draft"] == [4] * stats.num_rounds
    committed = [r.accepted + (r.next_token is not None) for r in stats.rounds]
    assert rows["context"][:-1] == [3, *committed[:-1]] or rows["context"] == [3, *committed]


class CountSyncs(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts reads of one value from a tensor (`.item()`, `bool()`, `int()`), each a sync on an accelerator."""

    reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("gamma", [2, 7])
def test_perf_2_host_reads_do_not_grow_with_the_block(gamma):
    target, draft = tiny.perm_target(), tiny.perm_draft(gamma)
    checks.generate(target, draft, PROMPT)
    with CountSyncs() as count:
        _, stats = checks.generate(target, draft, PROMPT, max_new_tokens=1 + 6 * (gamma + 1))
    assert stats.num_rounds == 6
    with CountSyncs() as prefill:
        checks.generate(target, draft, PROMPT, max_new_tokens=1)
    assert (count.reads - prefill.reads) / stats.num_rounds <= 4


@pytest.mark.parametrize("options", [{"max_new_tokens": 1}, {"eos_token_id": tiny.NEXT[40]}, {"max_new_tokens": 2},
                                     {"eos_token_id": tiny.chain(40, 2)[1]}])  # fmt: skip
def test_perf_6_counters_of_short_replies(options):
    """Accepted never exceeds what was returned; no division by zero; everything is plain Python and serialisable."""
    import json

    new, stats = checks.equal_to_plain(tiny.perm_target(), tiny.perm_draft(7), PROMPT, **options)
    assert stats.num_accepted <= len(new)
    assert isinstance(stats.mean_acceptance_length, float) and isinstance(stats.acceptance_rate, float)
    assert json.loads(json.dumps(stats.to_dict()))["num_tokens"] == len(new)
    with hf_dspark.record() as nothing:
        pass
    assert (nothing.mean_acceptance_length, nothing.acceptance_rate, nothing.calls) == (0.0, 0.0, 0)
    assert nothing.expected_acceptance_length is None


def test_stream_7_swapped_and_unfit_models():
    """A draft in the target's place, or a target in the draft's, is named; nothing crashes on a missing attribute."""
    draft, target = tiny.perm_draft(), tiny.perm_target()
    with pytest.raises((ValueError, TypeError, AttributeError)) as error:
        draft.generate(checks.tensor(PROMPT), assistant_model=target)
    assert "draft" in str(error.value).lower() or "generate" in str(error.value).lower()
    assert isinstance(target, AutoModelForCausalLM.from_config(target.config).__class__)
