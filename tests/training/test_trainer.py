"""Runs of the trainer: they learn, they go on after a kill, they refuse what cannot work."""

import json
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file

import hf_dspark
import tiny
from hf_dspark import training
from hf_dspark.training import checkpoint, trainer

STEPS = {"max_steps": 100, "validate_every": 100, "save_every": 100, "learning_rate": 5e-3}
# Fields of a draft that `init_from` brings along, as they are by default.
BROUGHT = {"num_hidden_layers": 2, "block_size": 7, "markov_rank": 256}


def weights(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def records(folder, *without: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in without} for line in lines]


class Killed(BaseException):
    """Like SIGKILL it is caught by nobody."""


def kill_at(monkeypatch, step: int) -> None:
    original = trainer.Run.take_step

    def take_step(run):
        if run.step == step:
            raise Killed
        return original(run)

    monkeypatch.setattr(trainer.Run, "take_step", take_step)


@pytest.mark.parametrize(
    "settings", [{}, {"rank": 0, "confidence": None}, {"head": "rnn"}], ids=["vanilla", "dflash", "rnn"]
)
def test_learns_a_toy_target(config, tmp_path, settings):
    """From a random draft, τ rises from about 1 to more than 2, in validation and when the draft is used."""
    tiny.random_draft(**settings).save_pretrained(tmp_path / "start")
    run = config(init_from=str(tmp_path / "start"), **(STEPS | BROUGHT))
    before = trainer.Run(run).validate()
    assert before.tau < 1.2 and before.tau_greedy < 1.2
    result = training.train(run)
    assert result.step == 100 and result.validation.tau > 2 and result.validation.tau_greedy > 2
    assert used(result.draft) > 2


def test_a_fresh_draft_learns(config):
    """It begins near τ 2 here, as the first draft follows from the anchor's embedding alone."""
    result = training.train(config(**STEPS))
    assert result.validation.tau > 2.5 and result.validation.confidence_error < 0.3
    assert used(result.draft) > 2.5


def used(folder) -> float:
    """τ of a saved draft in generate()."""
    draft = hf_dspark.DSparkForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[5, *tiny.chain(5, 9)]])
    with hf_dspark.record() as stats:
        tiny.perm_target().generate(ids, assistant_model=draft, max_new_tokens=40, do_sample=False)
    return stats.mean_acceptance_length


@pytest.mark.parametrize(
    ("killed", "changes"), [(3, {}), (6, {"gradient_accumulation_steps": 2, "batch_size": 4}), (11, {})]
)
def test_resumed_equals_uninterrupted(config, tmp_path, monkeypatch, killed, changes):
    """Weights, optimiser, schedule and log, bit for bit, wherever the kill falls between two checkpoints."""
    whole = training.train(config(output_dir=str(tmp_path / "whole"), **changes))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, killed)
        training.train(config(**changes))
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "run")][-1:] == (
        [f"checkpoint-{killed // 4 * 4:07d}"] if killed >= 4 else []
    )
    torch.manual_seed(1234)  # the state of the process must not matter
    resumed = training.train(config(resume=True, **changes))
    assert same(weights(whole.draft), weights(resumed.draft))
    ends = [tmp_path / name / "checkpoint-0000012" for name in ("whole", "run")]
    assert same(*(load_file(end / "optimizer.safetensors") for end in ends))
    assert checkpoint.read_state(ends[0]) == checkpoint.read_state(ends[1])
    assert resumed.validation == whole.validation
    logs = [records(tmp_path / name, "train/tokens_per_second") for name in ("whole", "run")]
    assert logs[0] == logs[1]


def test_other_seeds_are_other_runs(config, tmp_path):
    """The control of the test above."""
    runs = [training.train(config(output_dir=str(tmp_path / str(seed)), max_steps=4, seed=seed)) for seed in (0, 1)]
    assert not same(*(weights(run.draft) for run in runs))


def test_checkpoints_are_whole_and_few(config, tmp_path, monkeypatch):
    """A kill while one is written leaves the others; what it left over goes with the next."""
    original = checkpoint.save_file

    def save_file(tensors, path):
        if "0000008" in str(path):
            raise Killed
        original(tensors, path)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checkpoint, "save_file", save_file)
        training.train(config())
    folder = tmp_path / "run"
    assert [path.name for path in checkpoint.checkpoints(folder)] == ["checkpoint-0000004"]
    assert list(folder.glob(".partial-*"))
    training.train(config(resume=True))
    assert [path.name for path in checkpoint.checkpoints(folder)] == ["checkpoint-0000008", "checkpoint-0000012"]
    assert not list(folder.glob(".partial-*"))


def test_a_finished_run_resumes_to_its_end(config):
    first = training.train(config())
    again = training.train(config(resume=True))
    assert again.step == first.step and again.validation == first.validation
    assert same(weights(first.draft), weights(again.draft))


def test_runs_do_not_mix(config):
    training.train(config(max_steps=4))
    with pytest.raises(ValueError, match="resume=True"):
        training.train(config(max_steps=4))
    with pytest.raises(ValueError, match="`learning_rate` was 0.003, is 0.1"):
        training.train(config(max_steps=4, learning_rate=0.1, resume=True))
    training.train(config(max_steps=4, log_every=1, resume=True))  # does not touch the weights


def test_a_run_of_another_version_is_refused(config):
    """Its optimiser has other groups."""
    state = training.train(config(max_steps=4)).draft.parent / "checkpoint-0000004" / checkpoint.STATE
    values = json.loads(state.read_text())
    del values["config"]["markov_learning_rate"]
    state.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="another version of hf_dspark.*`init_from`"):
        training.train(config(max_steps=4, resume=True))


def test_accumulation_adds_up(config, tmp_path):
    """Two forwards of 4 texts make the step of their mean gradient; another number of texts is another step."""
    run = trainer.Run(config(batch_size=4, gradient_accumulation_steps=2, max_grad_norm=1e9))
    expected = []
    for forward in range(2):
        run.objective(*run.inputs(run.batch(forward), str(forward))).loss.backward()
        expected.append(run.draft.fc.weight.grad.clone())
        run.draft.zero_grad()
    seen = []
    run.optimizer.optimizer.register_step_pre_hook(lambda *_: seen.append(run.draft.fc.weight.grad.clone()))
    run.take_step()
    torch.testing.assert_close(seen[0], sum(expected) / 2)
    assert len(seen) == 1


def test_init_from_goes_on(config, tmp_path):
    first = training.train(config(max_steps=60, save_every=60, validate_every=60, output_dir=str(tmp_path / "first")))
    second = trainer.Run(config(init_from=str(first.draft), **BROUGHT))
    assert second.draft.config.num_draft_tokens == 4 and second.draft.config.markov_rank == 16
    assert second.validate().tau == pytest.approx(first.validation.tau, abs=1e-5)
    with pytest.raises(ValueError, match="`markov_rank`"):
        config(init_from=str(first.draft), **(BROUGHT | {"markov_rank": 8}))


def test_a_draft_with_its_own_vocabulary_keeps_it(config, tmp_path):
    """Embeddings and head of a file are frozen: they come out as they went in."""
    draft = tiny.random_draft()
    draft.save_pretrained(tmp_path / "draft")
    result = training.train(config(init_from=str(tmp_path / "draft"), max_steps=4, **BROUGHT))
    before, after = weights(tmp_path / "draft"), weights(result.draft)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == before.keys() - {"embed_tokens.weight", "lm_head.weight"}


def test_the_target_is_not_touched(config):
    run = trainer.Run(config())
    before = {name: tensor.clone() for name, tensor in run.teacher.target.state_dict().items()}
    for _ in range(3):
        run.take_step()
    assert same(before, run.teacher.target.state_dict())
    assert all(p.grad is None and not p.requires_grad for p in run.teacher.target.parameters())


def test_a_loss_that_is_not_finite_ends_the_run(config, monkeypatch):
    monkeypatch.setattr(
        training.teacher.Teacher, "_logits", lambda self, hidden: torch.full((len(hidden), 64), torch.nan)
    )
    monkeypatch.setattr(training.teacher.Teacher, "_check_head", lambda self: None)
    with pytest.raises(FloatingPointError, match="learning_rate"):
        training.train(config(num_validation_texts=0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": []}, "`data` is empty"),
        ({"batch_size": 0}, "`batch_size` must be > 0"),
        ({"max_steps": 0}, "`max_steps`"),
        ({"warmup_ratio": 1.0}, "`warmup_ratio`"),
        ({"markov_learning_rate": 0.0}, "`markov_learning_rate` must be > 0"),
        ({"mixed_precision": "fp8"}, "`mixed_precision` must be one of"),
        ({"markov_head_type": "lstm"}, "`markov_head_type`"),
    ],
)
def test_wrong_arguments(config, changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_a_rate_for_a_markov_head_that_is_not_there(config):
    with pytest.raises(ValueError, match="the draft has no Markov head"):
        trainer.Run(config(markov_rank=0, enable_confidence_head=False, markov_learning_rate=1e-3))


def test_tensorboard_is_asked_for_only_where_it_is(config, monkeypatch):
    monkeypatch.setattr(trainer, "is_tensorboard_available", lambda: False)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        trainer.make_accelerator(config(tensorboard=True))
    assert trainer.make_accelerator(config(tensorboard=None)).log_with == []


def test_bfloat16(config):
    """Weights and checkpoints stay float32, the finished draft is bfloat16."""
    result = training.train(config(mixed_precision="bf16", dtype="bfloat16", max_steps=40, save_every=40))
    assert result.validation.tau > 2.2
    assert {tensor.dtype for tensor in weights(result.draft).values()} == {torch.bfloat16}
    checkpoints = checkpoint.checkpoints(result.draft.parent)
    assert {tensor.dtype for tensor in weights(checkpoints[-1] / "draft").values()} == {torch.float32}


def test_target_errors_come_before_the_work(config, tmp_path):
    with pytest.raises(ValueError, match="`target_layer_ids`"):
        training.train(config(target_layer_ids=[0, 9]))
    with pytest.raises(ValueError, match="mask_token_id"):
        training.train(config(mask_token_id=64))
    assert not (tmp_path / "run").exists()


def test_estimate(config, tmp_path):
    found = training.estimate(config())
    assert found.steps == 12 and found.num_texts == 112 and found.num_tokens == 112 * 32
    assert found.tokens_per_step == 8 * 64 and 0 < found.positions_per_step <= 8 * 6 * 4
    assert all(value > 0 for value in asdict(found).values())
    assert found.hours == pytest.approx(found.seconds_per_step * 12 / 3600)
    assert not (tmp_path / "run").exists()


def test_warm_up_and_cosine(config):
    run = trainer.Run(config(max_steps=20, warmup_ratio=0.2))
    rates = []
    for _ in range(20):
        rates.append(run.scheduler.get_last_lr()[0])
        run.take_step()
        run.step += 1
    assert rates[0] == 0 and rates[4] == max(rates) == 3e-3 and rates[12] == pytest.approx(1.5e-3)
    assert run.scheduler.get_last_lr()[0] == pytest.approx(0, abs=1e-9)
