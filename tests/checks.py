"""What the tests of generate() assert again and again."""

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import hf_dspark
import oracle


def tensor(ids: list[int]) -> torch.Tensor:
    return torch.tensor([ids])


def generate(target, draft, ids, **options):
    """`target.generate` with the draft under `record()`: (output, statistics)."""
    ids = tensor(ids) if isinstance(ids, list) else ids
    options = {"max_new_tokens": 20, "do_sample": False} | options
    if "max_length" in options:
        del options["max_new_tokens"]
    with hf_dspark.record() as stats:
        output = target.generate(ids, assistant_model=draft, **options)
    return output, stats


def plain(target, ids, **options):
    """The same call without a draft."""
    ids = tensor(ids) if isinstance(ids, list) else ids
    options = {"max_new_tokens": 20, "do_sample": False} | options
    if "max_length" in options:
        del options["max_new_tokens"]
    return target.generate(ids, **options)


def sequences(output) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.sequences


def equal_to_plain(target, draft, ids, options=None, **more):
    """Greedy text equals plain generate and the statistics add up. Returns (new tokens, statistics).

    `options` is a function that makes the keyword arguments, called once per run, when they carry state.
    """
    expected = sequences(plain(target, ids, **((options or dict)() | more)))
    output, stats = generate(target, draft, ids, **((options or dict)() | more))
    assert sequences(output).tolist() == expected.tolist()
    prompt = 0 if ids is None else tensor(ids).shape[1] if isinstance(ids, list) else ids.shape[1]
    new = expected[0, prompt:].tolist()
    adds_up(stats, len(new), draft.config.num_draft_tokens)
    return new, stats


def adds_up(stats, num_new: int, gamma: int) -> None:
    """Invariant 9 and the definitions of every counter, for one call of one row on the plain path."""
    rounds = stats.rounds
    committed = [r.accepted + (r.next_token is not None) for r in rounds]
    assert stats.path == "plain"
    assert stats.num_tokens == num_new
    assert sum(committed) == num_new - 1
    assert stats.num_rounds == len(rounds)
    assert stats.num_drafted == gamma * len(rounds)
    assert stats.num_verified == sum(r.verified for r in rounds)
    assert stats.num_accepted == sum(r.accepted for r in rounds)
    for here, tokens in zip(rounds, committed, strict=True):
        assert 0 <= here.accepted <= here.verified <= gamma
        assert tokens >= 1, "a round that commits nothing"
        assert len(here.draft_tokens) == gamma
    for here, there, tokens in zip(rounds, rounds[1:], committed, strict=False):
        assert there.position == here.position + tokens
        assert here.next_token is not None and there.anchor == here.next_token
    assert stats.mean_acceptance_length == (sum(committed) / len(rounds) if rounds else 0.0)
    assert stats.acceptance_rate == (stats.num_accepted / stats.num_verified if stats.num_verified else 0.0)
    assert len(stats.acceptance_by_position) == gamma
    for k, rate in enumerate(stats.acceptance_by_position):
        tried = [r for r in rounds if r.verified > k and r.accepted >= k]
        # A draft behind the token that ended the text was neither accepted nor rejected.
        tried = [r for r in tried if r.accepted > k or r.next_token is not None]
        assert rate == (sum(r.accepted > k for r in tried) / len(tried) if tried else None)


def rounds_match(stats, draft_oracle: oracle.Oracle, target, text: list[int], **forward) -> None:
    """Every round proposed what the oracle proposes from the whole text (context, positions, taps and rollback)."""
    taps = draft_oracle.config["target_layer_ids"]
    with torch.no_grad():
        hidden = target(tensor(text), output_hidden_states=True, **forward).hidden_states
        features = oracle.context_features(hidden, taps)[0].float()
        for here in stats.rounds:
            assert here.anchor == text[here.position]
            block = draft_oracle.propose(here.anchor, features[: here.position])
            sure = before_near_tie(block.logits)
            assert here.draft_tokens[:sure] == block.tokens[:sure].tolist()
            if block.confidence_logits is not None:
                found = torch.tensor([here.confidence, here.survival])[:, : sure + 1]
                expected = torch.stack((block.confidence_logits.sigmoid(), block.survival()))[:, : sure + 1]
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def before_near_tie(logits: torch.Tensor) -> int:
    """Slots of a block [γ, V] before the first whose best two logits are closer than rounding may move them."""
    best = logits.topk(2, dim=-1).values
    return int(((best[:, 0] - best[:, 1]) > 1e-3).long().cumprod(0).sum())


def same_outputs(found, expected):
    """Every field of two generate() outputs is equal in count, nesting, shape and value."""
    assert type(found) is type(expected) and set(expected) <= set(found)
    assert found.sequences.tolist() == expected.sequences.tolist()
    for name in ("scores", "logits", "hidden_states", "attentions"):
        ours, theirs = found.get(name), expected.get(name)
        assert (ours is None) == (theirs is None), name
        if theirs is None:
            continue
        assert len(ours) == len(theirs), name
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            for x, y in zip(*((a, b) if isinstance(b, tuple) else ((a,), (b,))), strict=True):
                assert x.shape == y.shape and x.dtype == y.dtype, (name, step)
                torch.testing.assert_close(x, y, atol=2e-4, rtol=2e-4, msg=lambda m, at=(name, step): f"{at}: {m}")


def refused(target, draft, ids, *words, **options) -> str:
    """One ValueError with these words, before any forward of the target; returns the message."""
    with CallCounter(target) as calls, pytest.raises(ValueError) as error:
        generate(target, draft, ids, **options)
    assert not calls.shapes
    message = str(error.value)
    for word in words:
        assert str(word) in message, message
    return message


# ---- batches on the ragged path


def batch(rows: list[list[int]], pad: int = 0) -> dict[str, torch.Tensor]:
    """Left-padded ids and their mask, as arguments of generate()."""
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


def batch_equals_plain(target, draft, rows: list[list[int]], options=None, *, lengths=None, **more):
    """Greedy text of a batch (or of one row with a static cache) equals that of plain generate with a dynamic cache.

    `options` makes the keyword arguments, called once per run. `lengths` are new tokens of each row where another
    condition than an end-of-text id ends it. Returns (new tokens of each row, statistics, output).
    """

    def arguments():
        given = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0} | more | (options or dict)()
        return given | batch(rows, given["pad_token_id"])

    plain_arguments = arguments()
    plain_arguments.pop("cache_implementation", None)
    for name in ("num_assistant_tokens", "assistant_confidence_threshold"):
        plain_arguments.pop(name, None)
    expected = sequences(target.generate(**plain_arguments))
    with hf_dspark.record() as stats:
        output = target.generate(assistant_model=draft, **arguments())
    assert sequences(output).tolist() == expected.tolist()
    width = max(map(len, rows))
    new = expected[:, width:].tolist()
    eos = plain_arguments.get("eos_token_id", [])  # may be 0
    eos = {eos} if isinstance(eos, int) else set(eos)
    if lengths is None:
        lengths = [next((i + 1 for i, token in enumerate(row) if token in eos), len(row)) for row in new]
    new = [row[:length] for row, length in zip(new, lengths, strict=True)]
    rows_add_up(stats, rows, new, draft.config.num_draft_tokens)
    return new, stats, output


def rows_add_up(stats, prompts: list[list[int]], new: list[list[int]], gamma: int) -> None:
    """Invariant 9 row by row: the rounds of each row spell its text after the first token, and counters are sums."""
    rounds = stats.rounds
    assert (stats.path, stats.captured) == ("ragged", torch.cuda.is_available() and stats.captured)
    assert stats.reason
    for index, (prompt, tokens) in enumerate(zip(prompts, new, strict=True)):
        text, position = [*prompt, *tokens], len(prompt)
        for here in (r for r in rounds if r.row == index):
            assert (here.position, here.anchor) == (position, text[position])
            assert len(here.draft_tokens) == gamma and 0 <= here.accepted <= here.verified <= gamma
            committed = [*here.draft_tokens[: here.accepted], *([] if here.next_token is None else [here.next_token])]
            assert committed and text[position + 1 : position + 1 + len(committed)] == committed
            position += len(committed)
            assert here.next_token is not None or position == len(text) - 1, "only the last round may lack it"
        assert position == len(text) - 1, "rounds and first token make the whole row"
    assert {r.row for r in rounds} <= set(range(len(prompts)))
    assert stats.num_tokens == sum(map(len, new))
    assert stats.num_rounds == len(rounds) and stats.num_drafted == gamma * len(rounds)
    assert stats.num_verified == sum(r.verified for r in rounds)
    assert stats.num_accepted == sum(r.accepted for r in rounds)
    committed = stats.num_tokens - len(new)
    assert stats.mean_acceptance_length == (committed / len(rounds) if rounds else 0.0)
    assert len(stats.acceptance_by_position) == gamma


class ListStreamer(BaseStreamer):
    """Keeps every `put` as a list and counts `end`."""

    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        assert self.ends == 0, "put after end"
        self.puts.append(value.tolist())

    def end(self):
        self.ends += 1


class StopAt(StoppingCriteria):
    """Stops once the text has `length` tokens; keeps the length of every text it was shown."""

    def __init__(self, length: int):
        self.length, self.seen = length, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids[0].tolist())
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


class LeaveAlone(LogitsProcessor):
    """A caller's processor that only counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores


class CallCounter:
    """Counts forwards of a module and keeps the shape of each call's ids."""

    def __init__(self, module: torch.nn.Module):
        self.shapes = []
        self.handle = module.register_forward_pre_hook(self._hook, with_kwargs=True)

    def _hook(self, module, args, kwargs):
        ids = kwargs.get("input_ids", args[0] if args else None)
        self.shapes.append(None if ids is None else tuple(ids.shape))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.handle.remove()


class Interrupt(StoppingCriteria):
    """A user who gives up after `calls` tokens."""

    def __init__(self, calls: int):
        self.calls = calls

    def __call__(self, input_ids, scores, **kwargs):
        self.calls -= 1
        if self.calls < 0:
            raise KeyboardInterrupt
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def run_cases(run_case, seeds) -> dict[int, dict]:
    """What `run_case(seed, note)` returns for each seed; a failure says which case it was, and its note."""
    results = {}
    for seed in seeds:
        note: dict = {}
        try:
            results[seed] = run_case(seed, note)
        except Exception as error:
            raise AssertionError(f"case {seed}: {note}: {error}") from error
    return results


def same_proposals(one, other, temperature: float = 0.0, *, num_tokens: int) -> None:
    """Two drafts propose the same bit for bit, behind a context of random features (three taps of width 64)."""
    anchors, features = torch.tensor([5, 40]), torch.randn(2, num_tokens, 192)
    first, second = (
        model.propose(anchors, features, temperature=temperature, generator=torch.Generator().manual_seed(1))
        for model in (one, other)
    )
    for name in ("tokens", "logits", "base_logits", "hidden_states", "confidence_logits", "survival"):
        left, right = getattr(first, name), getattr(second, name)
        assert (left is None and right is None) or torch.equal(left, right), name
