"""Anchors, masks and the loss against readable references, for every head and layout."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_mask
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from hf_dspark import training
from hf_dspark.training.anchors import possible_anchors, slot_targets
from hf_dspark.training.attention import dense_mask, visibility

HEADS = {
    "vanilla": {},
    "gated": {"head": "gated"},
    "rnn": {"head": "rnn"},
    "dflash": {"rank": 0, "confidence": None},
    "hidden": {"confidence": "hidden"},
    "1+N": {"sample_from_anchor": False},
}
LENGTH = 24


def batch(draft, *, rows: int = 2, num_anchors: int = 5):
    """Random (input_ids, loss_mask, features, anchors, keep) and the target's logits; the mask has a hole."""
    ids = torch.randint(1, 63, (rows, LENGTH))
    mask = torch.ones(rows, LENGTH, dtype=torch.long)
    mask[:, :4] = 0
    mask[0, 15] = 0
    features = torch.randn(rows, LENGTH, draft.config.context_size)
    anchors, keep = training.sample_anchors(mask, num_anchors, torch.Generator().manual_seed(3))
    logits = 3 * torch.randn(rows, num_anchors, draft.config.num_draft_tokens, tiny.V)
    return (ids, mask, features, anchors, keep), logits


@pytest.fixture(params=HEADS)
def draft(request):
    return tiny.random_draft(**HEADS[request.param])


# ---- anchors


def test_anchors_are_supervised_with_their_first_target():
    mask = torch.tensor([[0, 1, 1, 0, 1, 0, 1, 1, 1], [0, 0, 0, 1, 0, 0, 0, 0, 1]])
    assert possible_anchors(mask).int().tolist() == [[0, 1, 0, 0, 0, 0, 1, 1, 0], [0] * 9]
    anchors, keep = training.sample_anchors(mask, 4)
    assert anchors.tolist() == [[1, 6, 7, 0], [0, 0, 0, 0]]
    assert keep.tolist() == [[True, True, True, False], [False] * 4]


def test_anchors_are_drawn_evenly_and_repeatably():
    mask = torch.ones(1, 11)
    draws = torch.cat([training.sample_anchors(mask, 3, torch.Generator().manual_seed(i))[0] for i in range(2000)])
    assert all(len(set(row)) == 3 and row == sorted(row) for row in draws.tolist())
    counts = draws.flatten().bincount(minlength=11)
    assert counts[10] == 0 and (counts[:10] - 600).abs().max() < 90  # 4.4 standard deviations
    again = training.sample_anchors(mask, 3, torch.Generator().manual_seed(1999))[0]
    assert torch.equal(draws[-1:], again)


def test_more_anchors_than_tokens():
    anchors, keep = training.sample_anchors(torch.ones(2, 3), 6)
    assert anchors.tolist() == [[0, 1, 0, 0, 0, 0]] * 2 and keep.sum(dim=1).tolist() == [2, 2]


@pytest.mark.parametrize("arguments", [(torch.ones(3), 2), (torch.ones(2, 3), 0)])
def test_wrong_anchors_are_refused(arguments):
    with pytest.raises(ValueError, match="must be"):
        training.sample_anchors(*arguments)


def test_blocks_end_at_the_first_unsupervised_token():
    ids = torch.arange(10, 20).unsqueeze(0)
    mask = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1, 1, 1]])
    targets = slot_targets(ids, mask, torch.tensor([[1, 6, 0]]), torch.tensor([[True, True, False]]), 4)
    assert targets.eval_mask.int().tolist() == [[[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]]
    assert targets.target_ids.tolist()[0][:2] == [[12, 13, 14, 15], [17, 18, 19, 19]]
    assert targets.prev_ids.tolist()[0][:2] == [[11, 12, 13, 14], [16, 17, 18, 19]]


# ---- attention and forward


def test_mask_rule():
    """Against the rule in words, entry by entry."""
    anchors, keep, length, size = torch.tensor([[2, 5], [0, 3]]), torch.tensor([[1, 1], [1, 0]]).bool(), 6, 3
    mask = dense_mask(visibility(anchors, keep, size), 2, 6, 6 + length, torch.device("cpu"))
    for row in range(2):
        for query in range(6):
            block = query // size
            for key in range(6 + length):
                own = key < 6 and key // size == block
                before = key >= 6 and bool(keep[row, block]) and key - 6 < anchors[row, block]
                assert mask[row, 0, query, key] == (own or before)
    assert torch.equal(create_mask(visibility(anchors, keep, size), 2, 1, 6, 6 + length, device="cpu"), mask)


def test_slots_equal_inference(draft):
    """Each block's logits and confidence are those of `propose` with the same walk, up to its first other token."""
    inputs, _ = batch(draft)
    ids, _, features, anchors, keep = inputs
    block = training.forward_blocks(draft, *inputs)
    for row, number in keep.nonzero().tolist():
        start = int(anchors[row, number])
        ours = draft.propose(ids[row, start : start + 1], features[row : row + 1, :start])
        equal = ours.tokens[0].eq(block.target_ids[row, number]).long().cumprod(0)
        slots = 1 + int(equal[:-1].sum())  # slot k is as in inference while x_1..x_{k-1} are
        torch.testing.assert_close(block.draft_logits[row, number, :slots], ours.logits[0, :slots], atol=1e-4, rtol=0)
        if ours.confidence_logits is not None:
            found, expected = block.confidence_logits[row, number, :slots], ours.confidence_logits[0, :slots]
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_walk_along_given_tokens(draft):
    """The batched walk equals `step` slot by slot."""
    head = draft.markov_head
    if head is None:
        pytest.skip("no Markov head")
    inputs, _ = batch(draft)
    hidden = torch.randn(4, 5, draft.config.hidden_size)
    prev, state = torch.randint(0, 63, (4, 5)), None
    vectors = training.blocks.transitions(head, prev, hidden)
    for k in range(5):
        bias, state = head.step(prev[:, k], hidden[:, k], state)
        torch.testing.assert_close(head.markov_w2(vectors[:, k]), bias)


def test_nothing_leaks_from_behind_the_anchor(draft):
    """Features at and behind the anchor, and tokens behind it, change no base logits of a block."""
    (ids, mask, features, _, _), _ = batch(draft)
    anchors, keep = torch.tensor([[8], [8]]), torch.ones(2, 1, dtype=torch.bool)
    with torch.no_grad():
        before = training.forward_blocks(draft, ids, mask, features, anchors, keep)
        features[:, 8:] += 1
        after = training.forward_blocks(draft, ids, mask, features, anchors, keep)
        features[:, 7] += 1
        control = training.forward_blocks(draft, ids, mask, features, anchors, keep)
    assert torch.equal(before.draft_logits, after.draft_logits)
    assert not torch.allclose(before.draft_logits, control.draft_logits, atol=1e-3)


def test_eager_attention_agrees(draft):
    inputs, _ = batch(draft)
    expected = training.forward_blocks(draft, *inputs).draft_logits
    draft.config._attn_implementation = "eager"
    torch.testing.assert_close(training.forward_blocks(draft, *inputs).draft_logits, expected, atol=1e-4, rtol=0)
    draft.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2"):
        training.forward_blocks(draft, *inputs)


def test_flex_attention_agrees(draft, monkeypatch):
    """Its forward runs on the CPU too: same mask, same order of keys, same groups of heads."""
    inputs, _ = batch(draft)
    expected = training.forward_blocks(draft, *inputs).draft_logits
    monkeypatch.setattr(training.attention, "uses_flex", lambda device: True)
    monkeypatch.setattr(training.attention, "compiled", lambda function: function)
    with torch.no_grad():
        found = training.forward_blocks(draft, *inputs).draft_logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_shapes_are_checked(draft):
    (ids, mask, features, anchors, keep), _ = batch(draft)
    for wrong in (
        (ids, mask[:, 1:], features, anchors, keep),
        (ids, mask, features[..., 1:], anchors, keep),
        (ids, mask, features, anchors, keep[:, 1:]),
        (ids, mask, features, anchors[:1], keep[:1]),
    ):
        with pytest.raises(ValueError, match="got|sequences"):
            training.forward_blocks(draft, *wrong)


# ---- loss


def plain_loss(block, target_logits, ce=0.1, tv=0.9, confidence=1.0, decay=4.0):
    """The objective in ordinary autograd, all logits at once."""
    slots = torch.arange(block.eval_mask.shape[-1])
    weights = block.eval_mask * torch.exp(-slots / decay)
    q, p = block.draft_logits.softmax(-1), target_logits.softmax(-1)
    l1 = (q - p).abs().sum(-1)
    entropy = F.cross_entropy(block.draft_logits.flatten(0, 2), block.target_ids.flatten(), reduction="none")
    terms = [ce * entropy.view_as(l1), tv * l1]
    if block.confidence_logits is not None:
        accept = (1 - l1 / 2).detach()
        bce = F.binary_cross_entropy_with_logits(block.confidence_logits, accept, reduction="none")
        terms.append(confidence * bce)
    return sum((weights * term).sum() for term in terms) / (weights.sum() + 1e-6)


def gradients(draft, loss) -> dict[str, torch.Tensor]:
    draft.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("chunk_elements", [1, 7 * tiny.V, 2**25])
def test_chunks_change_nothing(draft, chunk_elements):
    """Lazy logits in chunks of any size give the loss and gradients of ordinary autograd."""
    inputs, target_logits = batch(draft)
    options = {"ce": 0.3, "tv": 0.5, "confidence": 0.7, "decay": 3.0}
    plain = plain_loss(training.forward_blocks(draft, *inputs), target_logits, **options)
    expected = gradients(draft, plain)
    block = training.forward_blocks(draft, *inputs, lazy=True)
    assert block.draft_logits.shape == target_logits.shape
    found = training.dspark_loss(block, target_logits, **options, chunk_elements=chunk_elements)
    assert found.loss.item() == pytest.approx(plain.item(), rel=1e-5)
    ours = gradients(draft, 2 * found.loss)
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], 2 * gradient, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, torch.Tensor):
                self.size = max(self.size, tensor.numel())
        return output


def test_memory_stays_flat():
    """No tensor of the loss or its gradients is larger than a chunk, whatever the number of slots."""
    shape, size, chunk = (5, 10, 4), 1000, 6000
    hidden, w2 = torch.randn(200, 4, requires_grad=True), torch.randn(size, 4, requires_grad=True)
    rows = training.LogitRows(lambda x, w: (F.linear(x, w),), (hidden,), (w2,), torch.Size((*shape, size)))
    target = training.LogitRows(lambda x: (F.linear(x, w2.detach()),), (torch.randn(200, 4),), (), rows.shape)
    mask = torch.ones(shape, dtype=torch.bool)
    block = training.BlockOutput(rows, torch.randint(0, size, shape), mask, None)
    sizes = []
    for draft_logits, target_logits in ((rows, target), (rows.tensor(), target.tensor())):  # the second as a control
        with Largest() as largest:
            block = training.BlockOutput(draft_logits, block.target_ids, mask, None)
            training.dspark_loss(block, target_logits, chunk_elements=chunk).loss.backward()
        sizes.append(largest.size)
    assert sizes[0] <= chunk < sizes[1]


def test_a_slot_that_does_not_count_changes_nothing(draft):
    inputs, target_logits = batch(draft)
    block = training.forward_blocks(draft, *inputs)
    first = training.dspark_loss(block, target_logits)
    target_logits[~block.eval_mask] = float("nan")
    second = training.dspark_loss(block, target_logits)
    for name in ("loss", "ce", "tv", "confidence"):
        assert getattr(first, name).item() == getattr(second, name).item()
    expected = gradients(draft, first.loss)
    block = training.forward_blocks(draft, *inputs)
    found = gradients(draft, training.dspark_loss(block, target_logits).loss)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_accept_rate_is_the_overlap(draft):
    inputs, target_logits = batch(draft)
    block = training.forward_blocks(draft, *inputs)
    found = training.dspark_loss(block, target_logits)
    overlap = torch.minimum(block.draft_logits.softmax(-1), target_logits.softmax(-1)).sum(-1)
    torch.testing.assert_close(found.accept_rate, overlap, atol=1e-5, rtol=0)
    same = training.dspark_loss(block, block.draft_logits.detach())
    assert same.tv.item() < 1e-5 and same.accept_rate.min() > 0.999


def test_no_gradient_when_none_is_wanted(draft):
    inputs, target_logits = batch(draft)
    with torch.no_grad():
        found = training.dspark_loss(training.forward_blocks(draft, *inputs, lazy=True), target_logits)
    assert not found.loss.requires_grad
    assert not training.dspark_loss(training.forward_blocks(draft, *inputs), target_logits).accept_rate.requires_grad


def test_wrong_loss_arguments(draft):
    inputs, target_logits = batch(draft)
    block = training.forward_blocks(draft, *inputs)
    with pytest.raises(ValueError, match="target_logits"):
        training.dspark_loss(block, target_logits[..., 1:])
    with pytest.raises(ValueError, match="decay"):
        training.dspark_loss(block, target_logits, decay=0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_flex_attention_equals_the_dense_mask(draft):
    inputs, target_logits = batch(draft)
    expected = gradients(draft, training.dspark_loss(training.forward_blocks(draft, *inputs), target_logits).loss)
    draft.cuda()
    inputs, target_logits = tuple(x.cuda() for x in inputs), target_logits.cuda()
    block = training.forward_blocks(draft, *inputs, lazy=True)
    found = gradients(draft, training.dspark_loss(block, target_logits).loss)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].cpu(), gradient, atol=1e-4, rtol=1e-3)
