"""The teacher on several families, default taps and mask token, texts and their order, what validation counts."""

import copy
import functools
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel

import tiny
from hf_dspark import context_features, training
from hf_dspark.training import metrics
from hf_dspark.training.data import Texts
from hf_dspark.training.from_target import start_from_target
from hf_dspark.training.teacher import Teacher

# ---- teacher


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_teacher_equals_the_target(family):
    """Taps and slot logits are those of an ordinary forward of each text alone, without its padding."""
    target = tiny.random_target(family)
    teacher = Teacher(target, list(tiny.TAPS))
    ids = torch.randint(1, 60, (2, 12))
    ids[1, 9:] = 0  # padding
    features, last_hidden = teacher.read(ids)
    anchors = torch.tensor([[3, 6], [0, 4]])
    logits = teacher.slot_logits(last_hidden, anchors, 4)
    assert logits.shape == (2, 2, 4, tiny.V)
    for row, length in enumerate((12, 9)):
        with torch.no_grad():
            outputs = target(ids[row : row + 1, :length], output_hidden_states=True)
        expected = context_features(outputs, list(tiny.TAPS))
        torch.testing.assert_close(features[row : row + 1, :length], expected, atol=1e-4, rtol=1e-4)
        for number, start in enumerate(anchors[row].tolist()):
            found = logits.tensor()[row, number]
            torch.testing.assert_close(found, outputs.logits[0, start : start + 4], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "lfm2", "qwen3_sliding"])
def test_compiled_teacher_agrees(family, monkeypatch):
    """Other lengths included. The backend is the one that checks the graphs without making code from them."""
    monkeypatch.setattr(training.teacher.torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    plain = Teacher(copy.deepcopy(tiny.random_target(family)), [-1, 0, 3])
    compiled = Teacher(copy.deepcopy(tiny.random_target(family)), [-1, 0, 3], compiled=True)
    for length in (12, 20, 20, 7):
        ids = torch.randint(1, 60, (2, length))
        for found, expected in zip(compiled.read(ids), plain.read(ids), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_teacher_refuses_what_it_cannot_reproduce():
    class Shifted(type(tiny.perm_target())):
        def forward(self, input_ids=None, **inputs):
            output = super().forward(input_ids=input_ids, **inputs)
            if input_ids is not None:  # something that the last hidden states do not show
                output.logits = output.logits + 10 * input_ids[..., None]
            return output

    target = Shifted(tiny.perm_target().config)
    with pytest.raises(ValueError, match="Shifted"):
        Teacher(target, [0])


# ---- a new draft


@pytest.mark.parametrize(
    ("depth", "taps"),
    [
        (36, [1, 9, 17, 25, 33]),
        (40, [1, 10, 19, 28, 37]),
        (30, [1, 8, 14, 21, 27]),
        (6, [1, 2, 3]),
        (4, [1]),
        (3, [1]),
        (2, [0]),
        (1, [-1]),
    ],
)
def test_default_taps(depth, taps):
    assert training.default_taps(depth) == taps


def test_mask_token():
    """A padding row first, then a special token that means nothing else, then a token that does not occur."""
    target, tokenizer = tiny.perm_target(), tiny.tokenizer()
    assert training.unused_token(target, None, range(60)) == 63
    assert training.unused_token(target, None, range(2, 64)) == 1
    with pytest.raises(ValueError, match="mask_token_id"):
        training.unused_token(target, None, range(64))
    padded = tiny.table_target(torch.zeros(70, 70))
    assert training.unused_token(padded, tokenizer, range(64)) == 64
    assert training.unused_token(target, tokenizer, range(60)) == 63  # it has no special tokens


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_new_draft_fits_any_family(family, tmp_path):
    target = tiny.random_target(family)
    draft = training.new_draft(target, mask_token_id=63, markov_rank=8)
    draft.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert type(again).__name__ == "Qwen3DSparkModel" and not again.config.has_embed_tokens
    output = target.generate(torch.tensor([[3, 4]]), assistant_model=again, max_new_tokens=8, do_sample=False)
    assert torch.equal(output, target.generate(torch.tensor([[3, 4]]), max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_new_draft_begins_with_the_last_layers(family):
    """What was taken is the target's, what was not is as it was, and a norm that means something else is not taken."""
    target = tiny.random_target(family, layers=3)
    draft = training.new_draft(target, mask_token_id=63, markov_rank=8)
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    taken = start_from_target(draft, target)
    given = target.base_model.state_dict()
    for name, tensor in draft.state_dict().items():
        if name not in taken:
            assert torch.equal(tensor, before[name]), name
        elif name.startswith("layers."):
            assert torch.equal(tensor, given[name.replace("s.1.", "s.2.").replace("s.0.", "s.1.")]), name
    assert "fc.weight" in taken
    usual = family.startswith(("qwen3", "llama", "mistral", "gemma")) and family != "qwen3_next"
    assert ("layers.0.mlp.down_proj.weight" in taken) == usual
    assert ("norm.weight" in taken) == (usual and not family.startswith("gemma")), taken
    width = draft.config.hidden_size
    assert torch.equal(draft.fc.weight[:, -width:], before["fc.weight"][:, -width:] + torch.eye(width))


def test_layers_are_those_of_the_language_model():
    """Not of a vision tower of the same depth."""
    target = tiny.llava(vision_layers=6)
    draft = training.new_draft(target, mask_token_id=61, markov_rank=8)
    taken = start_from_target(draft, target)
    language = target.model.language_model
    assert {"norm.weight", "layers.1.self_attn.v_proj.weight"} <= set(taken)
    for name in ("v_proj", "o_proj"):
        own, given = (m.layers[-1].self_attn.get_submodule(name).weight for m in (draft, language))
        assert torch.equal(own, given)


def test_weights_that_are_not_the_numbers_that_count_are_not_taken():
    """A quantised weight without its scale, and one that is elsewhere."""
    target = copy.deepcopy(tiny.random_target("qwen3", layers=2))
    draft = training.new_draft(target, mask_token_id=63, markov_rank=8)
    attention = target.model.layers[1].self_attn
    attention.q_proj.weight = nn.Parameter(attention.q_proj.weight.to(torch.float8_e4m3fn), requires_grad=False)
    attention.k_proj.to("meta")
    taken = start_from_target(draft, target)
    assert "layers.1.self_attn.v_proj.weight" in taken
    assert not {"layers.1.self_attn.q_proj.weight", "layers.1.self_attn.k_proj.weight"} & set(taken)


# ---- texts


def write(path, texts):
    path.write_text("".join(json.dumps(text) + "\n" for text in texts))
    return path


def texts_of(tmp_path, lengths):
    lines = [{"input_ids": [i % 60] * n, "loss_mask": [1] * n} for i, n in enumerate(lengths)]
    return Texts.read([write(tmp_path / "texts.jsonl", lines)], 1000, 64)


def test_texts_are_cut_and_useless_ones_left_out(tmp_path):
    lines = [
        {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 1]},
        {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 0, 1]},
        {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 0, 1, 1]},
    ]
    texts = Texts.read([write(tmp_path / "a.jsonl", lines)], 4, 64)
    assert len(texts) == 1 and texts.num_tokens == 4 and texts.used_tokens() == {1, 2, 3, 4}
    batch = texts.batch([0])
    assert batch.input_ids.shape == (1, 64) and batch.input_ids[0, :5].tolist() == [1, 2, 3, 4, 0]
    assert batch.loss_mask[0, :5].tolist() == [False, True, True, True, False]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": []}', "a.jsonl:1 holds no `input_ids`.*synthesize"),
        ("not json", "a.jsonl:1"),
        ('{"input_ids": [1, 2], "loss_mask": [1]}', "2 `input_ids` but 1"),
        ('{"input_ids": [1, 64], "loss_mask": [1, 1]}', "64"),
        ('{"input_ids": [1, 2], "loss_mask": [0, 1]}', "no text with two supervised"),
    ],
)
def test_bad_texts_are_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        Texts.read([path], 8, 64)


def test_order(tmp_path):
    """Every text once an epoch, in batches of similar length, another order each epoch, the same for one seed."""
    texts = texts_of(tmp_path, [2 + i % 50 for i in range(200)])
    first = texts.order(8, seed=0, epoch=0)
    assert sorted(i for batch in first for i in batch) == list(range(200))
    assert first == texts.order(8, seed=0, epoch=0)
    assert first != texts.order(8, seed=0, epoch=1) and first != texts.order(8, seed=1, epoch=0)
    spread = [max(i % 50 for i in batch) - min(i % 50 for i in batch) for batch in first]
    assert sum(spread) / len(spread) < 5
    assert [len(batch) for batch in texts.order(300, seed=0, epoch=0)] == [200]


def test_split(tmp_path):
    texts = texts_of(tmp_path, [3] * 10)
    train, validation = texts.split(3)
    assert len(train) == 7 and len(validation) == 3
    assert train.used_tokens() | validation.used_tokens() == set(range(10))
    assert not train.used_tokens() & validation.used_tokens()
    with pytest.raises(ValueError, match="hold 10 of 10"):
        texts.split(10)


# ---- validation


def test_validation_counts_as_the_reference_does(shared_folder):
    """Expected τ, acceptance by position; the reference's confidence means are weighted, so those have another test."""
    golden = shared_folder / "reference" / "goldens"
    tensors = load_file(golden / "variants" / "vanilla" / "training.safetensors")
    expected = json.loads((golden / "variants" / "vanilla" / "training.json").read_text())
    expected = expected["settings"]["dspark"]["metrics"]
    target_logits = load_file(golden / "qwen3" / "training_batch.safetensors")["aligned_target_logits"]
    mask = tensors["eval_mask"].bool()
    block = training.BlockOutput(tensors["draft_logits"], tensors["target_ids"], mask, tensors["confidence_pred"])
    found = metrics.summarise(metrics.block_sums(block, target_logits, 1000), has_confidence=True)
    assert found.tau == pytest.approx(expected["train/tau_probabilistic"], rel=1e-5)
    for k, rate in enumerate(found.acceptance_by_position):
        assert rate == pytest.approx(expected[f"train/accept_rate@{k}"], rel=1e-5)
    difference = (tensors["confidence_pred"].sigmoid() - tensors["accept_rate"])[mask]
    assert found.confidence_error == pytest.approx(difference.abs().mean().item(), rel=1e-5)
    assert found.confidence_bias == pytest.approx(difference.mean().item(), rel=1e-4)
    assert found.num_blocks == int(mask[..., 0].sum())
    right = (tensors["draft_logits"].argmax(-1) == target_logits.argmax(-1)) & mask
    assert found.tau_greedy == pytest.approx(1 + right.long().cumprod(-1).sum().item() / found.num_blocks)
