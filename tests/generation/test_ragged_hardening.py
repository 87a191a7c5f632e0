"""The ragged path in odd but real situations: errors in the middle, changed pairs, threads, long use.

A pair keeps caches, twins and more between calls, so whatever happens to it, the next call must be as the first.
"""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import checks
import hf_dspark
import tiny

ROWS = [[5, 9, 11, 3, 8], [40, 7], [3, 30, 31, 17, 2, 12, 50]]
OTHERS = [[1, 2], [44] * 9, [7], [20, 21, 22]]
SINGLE = {"cache_implementation": "static"}
FORMS = [(ROWS, {}), (ROWS[:1], SINGLE)]


def pair(family: str = "qwen3", seed: int = 0):
    """A target of one's own and a draft that depends on all of its context, right about most of the rows' texts."""
    target = copy.deepcopy(tiny.random_target(family, layers=3, seed=seed))
    table = torch.zeros(tiny.V, tiny.V)
    for row in ROWS:
        text = checks.plain(target, row)[0].tolist()
        own = tiny.text_table(text)
        for token in text[len(row) + 3 :: 4]:
            own[token] = own[token].roll(1)
        table = torch.where(own.any(-1, keepdim=True), own, table)
    return target, tiny.load_draft(*tiny.guided_files(table, taps=(-1, 1)))


def rounds_of(target, draft, rows=ROWS, **options):
    """Text and rounds of a call that equals plain generate."""
    new, stats, _ = checks.batch_equals_plain(target, draft, rows, **{"max_new_tokens": 12} | options)
    return new, [(r.row, r.position, r.draft_tokens, r.verified, r.accepted) for r in stats.rounds]


def as_fresh(target, draft, rows=ROWS, **more) -> None:
    """The pair gives what copies of it, which never ran, give: same text, same proposals, same acceptance."""
    assert rounds_of(target, draft, rows, **more) == rounds_of(
        copy.deepcopy(target), copy.deepcopy(draft), rows, **more
    )


# ---- errors in the middle


class Fails:
    """Raises at its n-th call, whatever it is asked."""

    def __init__(self, error, at: int):
        self.error, self.at, self.calls = error, at, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == self.at:
            raise self.error("in the middle")


class FailingProcessor(Fails, LogitsProcessor):
    def __call__(self, input_ids, scores):
        super().__call__()
        return scores


class FailingCriterion(Fails, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        super().__call__()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("rows,more", FORMS)
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["processor", "draft-safe processor", "criterion"])
def test_errors_of_the_callers_code(place, error, rows, more):
    target, draft = pair()
    for at in (1, 9, 14) if place != "criterion" else (1, 2, 8):
        if place == "criterion":
            given = {"stopping_criteria": StoppingCriteriaList([FailingCriterion(error, at)])}
        else:
            processor = FailingProcessor(error, at)
            processor.draft_safe = place.startswith("draft")
            given = {"logits_processor": LogitsProcessorList([processor])}
        with pytest.raises(error):
            checks.generate(target, draft, None, **checks.batch(rows), pad_token_id=0, **given, **more)
        rounds_of(target, draft, rows, **more)
    as_fresh(target, draft, OTHERS)


@pytest.mark.parametrize("rows,more", FORMS)
@pytest.mark.parametrize("where", ["target layer", "target head", "draft layer", "draft context"])
def test_errors_inside_a_forward(where, rows, more):
    """At each of the first forwards in turn, while the caches hold half of a round."""
    target, draft = pair("qwen3_sliding")
    for at in range(1, 5):
        module = {
            "target layer": target.model.layers[1].mlp, "target head": target.lm_head,
            "draft layer": draft.layers[0].mlp, "draft context": draft.hidden_norm,
        }[where]  # fmt: skip
        error = RuntimeError if at % 2 else KeyboardInterrupt
        failing = Fails(error, at)
        handle = module.register_forward_pre_hook(failing)
        with pytest.raises(error):
            checks.generate(target, draft, None, **checks.batch(rows), pad_token_id=0, **more)
        handle.remove()
        rounds_of(target, draft, rows, **more)
    as_fresh(target, draft, OTHERS)


def test_an_error_while_streaming():
    target, draft = pair()

    class GoesAway(checks.ListStreamer):
        def put(self, value):
            super().put(value)
            if len(self.puts) == 6:
                raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        checks.generate(target, draft, ROWS[0], streamer=GoesAway(), **SINGLE)
    as_fresh(target, draft, ROWS[:1], **SINGLE)


# ---- long use


def test_an_engine_that_is_built_anew_leaves_nothing_at_the_target():
    target, draft = pair()
    target, watchers = copy.deepcopy(target), []
    for recent in (4, 5, 6, 7):  # another window is another engine
        draft.context_window = hf_dspark.ContextWindow(recent=recent)
        checks.generate(target, draft, ROWS[0], **SINGLE)
        gc.collect()
        watchers.append(weakref.getweakrefcount(target))
    draft.context_window = None
    assert watchers[1:] == watchers[:-1]


def live_bytes() -> int:
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter) and not thing.is_meta:
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(found.values())


def test_many_calls_of_changing_shape_do_not_grow_memory():
    """200 calls; one call of each largest size first, so that buffers have grown as far as they will."""
    target, draft = copy.deepcopy(tiny.perm_target(layers=2)), tiny.perm_draft(taps=(0, 1))
    options = {"do_sample": False, "pad_token_id": 0, "assistant_model": draft}

    def call(i: int) -> None:
        rows = [tiny.chain(1 + (i * 7 + r) % 60, 1 + (i * 5 + 3 * r) % 17) for r in range(1 + i % 5)]
        more = SINGLE if len(rows) == 1 else {}
        ids = target.generate(**checks.batch(rows), max_new_tokens=1 + i % 9, **options, **more)
        assert ids[0, -1] == tiny.chain(rows[0][-1], 1 + i % 9)[-1]

    target.generate(**checks.batch([[3] * 20] * 5), max_new_tokens=12, **options)
    for i in range(10):
        call(i)
    before, objects = live_bytes(), len(gc.get_objects())
    for i in range(200):
        call(i)
    assert live_bytes() <= before + 2**16
    assert len(gc.get_objects()) <= objects + 2000
    hf_dspark.release(target)


def test_pairs_that_are_forgotten_are_freed():
    """A loop over targets and drafts, as evaluations do, keeps nothing of the earlier pairs."""
    target, draft = pair()
    references, sizes = [], []
    for _ in range(3):
        other_target, other_draft = copy.deepcopy(target), copy.deepcopy(draft)
        checks.batch_equals_plain(other_target, draft, ROWS)
        checks.batch_equals_plain(target, other_draft, ROWS)
        checks.batch_equals_plain(other_target, other_draft, ROWS)
        references += [weakref.ref(other_target), weakref.ref(other_draft)]
        del other_target, other_draft
        sizes.append(live_bytes())
    assert all(reference() is None for reference in references)
    assert sizes[-1] <= sizes[0] + 2**16, sizes


# ---- threads, several pairs


@pytest.mark.parametrize("form", ["one pair", "one target", "one draft"])
def test_threads(form):
    """Batches, single prompts and plain calls at once: each as if it ran alone."""
    target, draft = pair()
    drafts = [draft] * 4 if form != "one target" else [draft, *(copy.deepcopy(draft) for _ in range(3))]
    targets = [target] * 4 if form != "one draft" else [target, *(pair(seed=s)[0] for s in (3, 4, 5))]
    calls = [(ROWS, {}), (OTHERS, {}), (ROWS[:1], SINGLE), (ROWS[1:], {})]
    expected = [rounds_of(t, d, *c[:1], **c[1]) for t, d, c in zip(targets, drafts, calls, strict=True)]
    found: list[list] = [[] for _ in calls]
    errors = []

    def work(i: int) -> None:
        try:
            for _ in range(3):
                found[i].append(rounds_of(targets[i], drafts[i], calls[i][0], **calls[i][1]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert found == [[one] * 3 for one in expected]


def test_two_drafts_on_one_target_and_two_targets_on_one_draft():
    target, draft = pair()
    other_target, other_draft = pair(seed=5)
    pairs = [(target, draft), (other_target, draft), (target, other_draft), (other_target, other_draft)]
    expected = [rounds_of(copy.deepcopy(t), copy.deepcopy(d)) for t, d in pairs]
    for _ in range(2):
        assert [rounds_of(t, d) for t, d in pairs] == expected
    hf_dspark.release(target)
    assert [rounds_of(t, d) for t, d in reversed(pairs)] == expected[::-1]


class Nested(LogitsProcessor):
    """Runs another call with the same pair in the middle of one."""

    def __init__(self, run):
        self.run, self.calls, self.results = run, 0, []

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 7:
            self.results.append(self.run())
        return scores


@pytest.mark.parametrize("rows,more", FORMS)
def test_a_generation_inside_a_generation(rows, more):
    """The inner call leaves the ragged path, says why, and neither text suffers."""
    target, draft = pair()
    expected, inner = rounds_of(target, draft, rows, **more)[0], rounds_of(target, draft, OTHERS)[0]
    options = {"pad_token_id": 0, "max_new_tokens": 12}
    nested = Nested(lambda: checks.generate(target, draft, None, **checks.batch(OTHERS), **options))
    given = {"logits_processor": LogitsProcessorList([nested])} | options
    output, _ = checks.generate(target, draft, None, **checks.batch(rows), **given, **more)
    assert output[:, -12:].tolist() == expected
    ((text, stats),) = nested.results
    assert text[:, -12:].tolist() == inner
    assert stats.path == "target_only" and "this very thread" in stats.reason
    as_fresh(target, draft, rows, **more)


# ---- changed between calls


class Adapter(nn.Module):
    """As adapters wrap a linear layer."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.delta = nn.Parameter(0.3 * torch.randn_like(base.weight))

    def forward(self, x):
        return self.base(x) + nn.functional.linear(x, self.delta)


def train_a_step(model, loss) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def change_target(target, how: str):
    layer = target.model.layers[1]
    if how == "load_state_dict":
        target.load_state_dict(tiny.random_target("qwen3", layers=3, seed=7).state_dict())
    elif how == "load_state_dict, assign":
        target.load_state_dict(copy.deepcopy(tiny.random_target("qwen3", layers=3, seed=7).state_dict()), assign=True)
    elif how == "in place":
        with torch.no_grad():
            for module in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.mlp.up_proj, target.lm_head):
                module.weight.add_(0.5 * torch.randn_like(module.weight))
    elif how == "data":
        for module in (layer.self_attn.k_proj, layer.mlp.gate_proj):
            module.weight.data = module.weight.data + 0.5 * torch.randn_like(module.weight)
    elif how == "optimizer":
        ids = torch.tensor([ROWS[0]])
        train_a_step(target, target(ids, labels=ids).loss)
    elif how == "adapter":
        layer.self_attn.q_proj, layer.mlp.down_proj = Adapter(layer.self_attn.q_proj), Adapter(layer.mlp.down_proj)
    elif how == "new layer":
        target.model.layers[2] = copy.deepcopy(tiny.random_target("qwen3", layers=3, seed=7).model.layers[2])
    elif how == "head":
        target.lm_head = copy.deepcopy(tiny.random_target("qwen3", layers=3, seed=7).lm_head)
    elif how == "hook":
        layer.mlp.register_forward_hook(lambda module, args, output: 2 * output)
    elif how == "double":
        target.double()
    elif how == "there and back":
        target.to(torch.bfloat16).to(torch.float32)


TARGET_CHANGES = ("load_state_dict", "load_state_dict, assign", "in place", "data", "optimizer", "adapter", "new layer",
                  "head", "hook", "double", "there and back")  # fmt: skip


@pytest.mark.parametrize("how", TARGET_CHANGES)
def test_a_changed_target_gives_its_own_text_in_the_next_call(how):
    target, draft = pair()
    before = [rounds_of(target, draft, rows, **more)[0] for rows, more in FORMS]
    change_target(target, how)
    after = [rounds_of(target, draft, rows, **more)[0] for rows, more in FORMS]
    assert (after != before) or how in ("double", "there and back", "optimizer")
    with torch.no_grad():
        target.model.layers[0].self_attn.k_proj.weight.mul_(-1.5)
    for rows, more in FORMS:
        as_fresh(target, draft, rows, **more)


@pytest.mark.parametrize("how", ["load_state_dict", "load_state_dict, assign", "in place", "data", "optimizer",
                                 "adapter", "bfloat16", "temperatures"])  # fmt: skip
def test_a_changed_draft_proposes_with_its_new_weights(how):
    target, draft = pair()
    rounds_of(target, draft)
    other = tiny.load_draft(*tiny.guided_files(tiny.text_table(ROWS[2] * 3), taps=(-1, 1), seed=77))
    attention = draft.layers[0].self_attn
    if how.startswith("load"):
        draft.load_state_dict(copy.deepcopy(other.state_dict()), assign="assign" in how)
    elif how == "in place":
        with torch.no_grad():
            for weight in (attention.k_proj.weight, attention.q_proj.weight, draft.layers[0].mlp.up_proj.weight):
                weight.add_(torch.randn_like(weight))
            draft.markov_head.markov_w2.weight.mul_(0.5)
    elif how == "data":
        attention.v_proj.weight.data = torch.randn_like(attention.v_proj.weight)
    elif how == "optimizer":
        train_a_step(draft, sum(p.sum() for p in draft.parameters()))
    elif how == "adapter":
        attention.k_proj, attention.o_proj = Adapter(attention.k_proj), Adapter(attention.o_proj)
    elif how == "bfloat16":
        draft.to(torch.bfloat16)
    else:
        draft.config.confidence_temperatures = [0.5, 2.0, 2.0, 2.0]
    for rows, more in FORMS:
        as_fresh(target, draft, rows, **more)
    # Alone and over transformers' own cache the same drafts are proposed.
    _, stats, _ = checks.batch_equals_plain(target, draft, ROWS[:1], **SINGLE)
    _, plain = checks.equal_to_plain(target, draft, ROWS[0])
    if how != "bfloat16":
        assert [(r.draft_tokens, r.accepted) for r in stats.rounds] == [
            (r.draft_tokens, r.accepted) for r in plain.rounds
        ]


def test_weights_stay_ordinary_parameters():
    """After use, and after release, both models can be saved, trained, moved and compared as before."""
    target, draft = pair()
    saved = [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model in (target, draft)]
    for rows, more in FORMS:
        rounds_of(target, draft, rows, **more)
    for _ in range(2):
        for model, values in zip((target, draft), saved, strict=True):
            state = model.state_dict()
            assert list(state) == list(values)
            assert all(torch.equal(state[name], values[name]) for name in values)
            assert all(p.is_leaf and p.requires_grad and not p.is_inference() for p in model.parameters())
        hf_dspark.release()
    target(torch.tensor([ROWS[0]])).logits.sum().backward()
    assert all(p.grad is not None for p in target.parameters())


def test_a_draft_without_its_own_head_follows_the_target_at_hand():
    config, tensors = tiny.guided_files(tiny.one_hot_table(tiny.NEXT, 40.0))
    slim = {name: tensor for name, tensor in tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    draft = tiny.load_draft(config, slim)
    targets = [copy.deepcopy(tiny.random_target(seed=seed)) for seed in (0, 5)]
    expected = [rounds_of(target, tiny.load_draft(config, slim)) for target in targets]
    for i in (0, 1, 0, 1):
        assert rounds_of(targets[i], draft) == expected[i]
    targets[0].resize_token_embeddings(80)
    targets[0].resize_token_embeddings(64)
    rounds_of(targets[0], draft)
