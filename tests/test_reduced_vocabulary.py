"""Drafts that can propose some tokens only: exact on every path, also where the target wants the others."""

import pytest
import test_chi_squared as chi
import torch
from family_files import some_ids, speculators_files
from transformers import LogitsProcessorList

import checks
import hf_dspark
import tiny
from hf_dspark.generation import rounds
from hf_dspark.proposal import Proposer

SIZE, GAMMA = chi.SIZE, 3
IDS = torch.tensor([1, 2, 4, 5, 7])  # of 8
ROWS = [[0], [5, 1, 2], [3, 3]]


def reduced(config, tensors, ids, **kwargs):
    return tiny.load_draft(*speculators_files(config, tensors, ids), **kwargs)


def markov_pair(target_table, draft_table, method="probabilistic", positions=4096, **settings):
    target = tiny.table_target(target_table, layers=1, mask=None, max_position_embeddings=positions)
    confidence = settings.pop("confidence", None)
    config = tiny.draft_config(
        gamma=GAMMA, vocab=SIZE, rank=SIZE, hidden=SIZE, taps=(-1,), mask=6,
        confidence=None if confidence is None else "markov",
    )  # fmt: skip
    draft = reduced(config, tiny.markov_tensors(config, draft_table, confidence, target_hidden=SIZE), IDS)
    draft.draft_sample_method = method
    return target, draft


# ---- greedy


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", None])
@pytest.mark.parametrize("path", ["plain", "static", "batch"])
def test_greedy_text_is_the_targets(head, path):
    """Half of the tokens can be proposed; the text walks through all of them."""
    target = tiny.random_target()
    prompts = [[7, 21, 40], [3, 9], [30, 31, 32, 33]]
    texts = [checks.plain(target, prompt, max_new_tokens=30)[0].tolist() for prompt in prompts]
    table = sum(tiny.text_table(text) for text in texts)
    settings = {"head": head} if head else {"confidence": None}
    config, tensors = tiny.guided_files(table, **settings)
    if head is None:
        config |= {"markov_rank": 0}
        tensors = {name: tensor for name, tensor in tensors.items() if "markov" not in name}
    seen = torch.tensor(sorted({token for text in texts for token in text}))
    ids = seen[::2]
    draft = reduced(config, tensors, ids)
    if path == "plain":
        _, stats = checks.equal_to_plain(target, draft, prompts[0], max_new_tokens=30)
    elif path == "static":
        output, stats = checks.generate(target, draft, prompts[0], max_new_tokens=30, cache_implementation="static")
        assert output[0].tolist() == texts[0]
    else:
        with hf_dspark.record() as stats:
            output = target.generate(
                **checks.batch(prompts), assistant_model=draft, do_sample=False, max_new_tokens=30, pad_token_id=0
            )
        width = max(map(len, prompts))
        assert [row[width:].tolist() for row in output] == [
            text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)
        ]
    assert stats.path == ("plain" if path == "plain" else "ragged")
    drafted = {token for r in stats.rounds for token in r.draft_tokens}
    assert drafted <= set(ids.tolist())
    if head == "vanilla":
        assert 0 < stats.num_accepted < stats.num_verified


def test_both_paths_propose_the_same():
    target = tiny.random_target()
    text = checks.plain(target, [7, 21, 40], max_new_tokens=30)[0].tolist()
    for settings in ({}, {"head": "rnn"}, {"confidence": "hidden"}):
        config, tensors = tiny.guided_files(tiny.text_table(text, scale=3.0), layers=2, **settings)
        draft = reduced(config, tensors, some_ids(40))
        runs = [
            checks.generate(target, draft, [7, 21, 40], max_new_tokens=30, **options)[1]
            for options in ({}, {"cache_implementation": "static"})
        ]
        rounds_of = [[(r.position, r.draft_tokens, r.accepted) for r in stats.rounds] for stats in runs]
        assert rounds_of[0] == rounds_of[1]
        for here, there in zip(*(stats.rounds for stats in runs), strict=True):
            torch.testing.assert_close(torch.tensor(here.confidence), torch.tensor(there.confidence))


@pytest.mark.parametrize("extra", [-2, 2])
def test_vocabularies_that_differ_by_padding(extra):
    """Ids of a reduced vocabulary behind the target's last row are never proposed."""
    size = 400
    target = tiny.table_target(tiny.one_hot_table([*range(1, size), 0]), layers=5, mask=None)
    config = tiny.draft_config(taps=(0, 2), vocab=size + extra, mask=397, confidence=None, rank=4)
    tensors = tiny.draft_tensors(config, target_hidden=size)
    ids = torch.arange(7, size + extra, 3)
    ids = torch.cat((ids, torch.arange(int(ids[-1]) + 1, size + extra)))
    draft = reduced(config, tensors, ids)
    for options in ({}, {"cache_implementation": "static"}):
        new = checks.plain(target, [390], max_new_tokens=20)
        output, stats = checks.generate(target, draft, [390], max_new_tokens=20, **options)
        assert output.tolist() == new.tolist()
        assert all(token < size for r in stats.rounds for token in r.draft_tokens)
        checks.generate(target, draft, [390], do_sample=True, max_new_tokens=20, **options)


# ---- sampling


def plain_counts(target_table, draft_table, tokens=1600, **options):
    names = ("method", "confidence")
    target, draft = markov_pair(target_table, draft_table, **{n: options.pop(n) for n in names if n in options})
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": tokens} | options
    ids, stats = checks.generate(target, draft, [0], **options)
    assert stats.path == "plain"
    return torch.bincount(ids[0, :-1] * SIZE + ids[0, 1:], minlength=SIZE * SIZE).view(SIZE, SIZE), stats


def ragged_counts(target_table, draft_table, tokens=500, **options):
    names = ("method", "confidence")
    target, draft = markov_pair(target_table, draft_table, **{n: options.pop(n) for n in names if n in options})
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": tokens, "pad_token_id": 0} | options
    with hf_dspark.record() as stats:
        ids = target.generate(**checks.batch(ROWS), assistant_model=draft, **options)
    assert stats.path == "ragged"
    new = torch.cat((torch.tensor([[row[-1]] for row in ROWS]), ids[:, 3:]), dim=1)
    pairs = (new[:, :-1] * SIZE + new[:, 1:]).flatten()
    return torch.bincount(pairs, minlength=SIZE * SIZE).view(SIZE, SIZE), stats


COUNTS = {"plain": plain_counts, "ragged": ragged_counts}


@pytest.mark.parametrize("path", COUNTS)
@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
@pytest.mark.parametrize("name", ["plain", "cool", "min-p"])
def test_sampled_text_follows_the_targets_distribution(path, method, name):
    target, drafts = chi.tables()
    counts, stats = COUNTS[path](target, drafts["good"], method=method, **chi.SETTINGS[name])
    assert chi.p_value(counts, chi.warped(target, **chi.SETTINGS[name])) > chi.SURE
    assert 0 < stats.num_accepted < stats.num_verified
    assert {token for r in stats.rounds for token in r.draft_tokens} <= set(IDS.tolist())


@pytest.mark.parametrize("path", COUNTS)
def test_exact_with_a_callers_own_processor_and_a_threshold(path):
    target, drafts = chi.tables()
    confidence = torch.tensor([3.0, -3.0, 3.0, 3.0, -3.0, 3.0, 3.0, 3.0])
    options = {"confidence": confidence, "assistant_confidence_threshold": 0.5, "temperature": 0.8}
    counts, stats = COUNTS[path](
        target, drafts["good"], logits_processor=LogitsProcessorList([chi.Flatten()]), **options
    )
    expected = chi.Flatten()(None, target.clone()) / 0.8
    assert chi.p_value(counts, expected.softmax(-1)) > chi.SURE
    assert len({r.verified for r in stats.rounds}) > 1


def test_q_on_the_wrong_tokens_fails_the_same_test(monkeypatch):
    """The control of the plain path: verified against a q that lies one token beside the one drawn from."""
    chi.change_proposals(monkeypatch, lambda tokens, q: (tokens, q.roll(1, dims=-1)))
    target, drafts = chi.tables()
    counts, _ = plain_counts(target, drafts["good"])
    assert chi.p_value(counts, target.softmax(-1)) < chi.WRONG


def test_tokens_of_another_distribution_fail_the_same_test_on_the_ragged_path(monkeypatch):
    """The control of the ragged path: tokens are the rows of the head, as if there were no offsets."""
    right = rounds.kernels.draw

    def draw(q, noise):
        return right(q[:, IDS], noise)  # numbers of rows, not of tokens

    monkeypatch.setattr(rounds.kernels, "draw", draw)
    target, drafts = chi.tables()
    counts, _ = ragged_counts(target, drafts["good"])
    assert chi.p_value(counts, target.softmax(-1)) < chi.WRONG


def test_q_is_zero_outside_and_sums_to_one():
    target, drafts = chi.tables()
    pair = markov_pair(target, drafts["good"])
    proposer = Proposer(pair[1], pair[1].attach_target(pair[0]).vocabulary)
    q = proposer.on_vocabulary(torch.randn(4, len(IDS)).softmax(-1))
    outside = torch.ones(SIZE, dtype=torch.bool).index_fill(0, IDS, False)
    assert q.shape == (4, SIZE) and (q[:, outside] == 0).all()
    torch.testing.assert_close(q.sum(-1), torch.ones(4))


# ---- the rest of the package


def test_training_is_refused_with_the_reason():
    from hf_dspark.training import forward_blocks, sample_anchors

    config, tensors = tiny.guided_files(tiny.one_hot_table(tiny.NEXT))
    draft = reduced(config, tensors, some_ids())
    ids, mask = torch.randint(1, 60, (1, 12)), torch.ones(1, 12)
    anchors, keep = sample_anchors(mask, 2)
    with pytest.raises(ValueError, match="whole vocabulary"):
        forward_blocks(draft, ids, mask, torch.randn(1, 12, 192), anchors, keep)


def test_moving_and_copying_keeps_the_offsets():
    import copy

    config, tensors = tiny.guided_files(tiny.one_hot_table(tiny.NEXT))
    draft = reduced(config, tensors, some_ids())
    for other in (copy.deepcopy(draft), draft.to(torch.bfloat16), draft.half()):
        assert torch.equal(other.proposable_ids, some_ids())
