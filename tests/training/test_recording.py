"""Recorded steps without a GPU: a replay runs the step again on the recording's own inputs, as a graph does."""

import contextlib

import pytest
import torch

from hf_dspark.training import trainer
from hf_dspark.training.recording import RecordedStep


class NoStream:
    def wait_stream(self, other):
        pass


class Rehearsal:
    """In place of a CUDA graph."""

    step: RecordedStep

    def replay(self):
        inputs, output = next(rest for graph, *rest in self.step._recorded.values() if graph is self)
        for name, value in vars(self.step._run(inputs)).items():
            getattr(output, name).copy_(value)


@pytest.fixture
def recorded(config, monkeypatch):
    """A run that records its steps, two forwards each."""
    for name in ("graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: contextlib.nullcontext())
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, NoStream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Rehearsal)
    run = trainer.Run(config(batch_size=4, gradient_accumulation_steps=2))
    trained = [parameter for parameter in run.draft.parameters() if parameter.requires_grad]
    run.recorded = Rehearsal.step = RecordedStep(run.objective, trained, scale=0.5)
    return run


def inputs_of(run, forward: int, length: int) -> tuple[torch.Tensor, ...]:
    batch = run.batch(forward)
    ids = torch.nn.functional.pad(batch.input_ids, (0, length - batch.input_ids.shape[1]))
    mask = torch.nn.functional.pad(batch.loss_mask, (0, length - batch.loss_mask.shape[1]))
    return run.inputs(trainer.Batch(ids, mask), str(forward))


def gradients(run, lengths: list[int]) -> tuple[list[torch.Tensor], list[float]]:
    run.draft.zero_grad()
    losses = [run._add_gradients(inputs_of(run, i, length)).loss for i, length in enumerate(lengths)]
    return [p.grad.clone() for p in run.draft.parameters() if p.requires_grad], [float(loss) for loss in losses]


LENGTHS = [64, 128, 64, 192, 128]  # the texts themselves are padded to 64, which is recorded first


def plain(run) -> tuple[list[torch.Tensor], list[float]]:
    run.recorded = None
    return gradients(run, LENGTHS)


def test_shapes_that_share_their_room_add_up(recorded):
    found, losses = gradients(recorded, LENGTHS)
    assert len(recorded.recorded) == 3
    expected, expected_losses = plain(recorded)
    assert losses == pytest.approx(expected_losses)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_recording_that_fails_leaves_the_gradients_of_the_forwards_before(recorded, monkeypatch, fails_at):
    """In its first or second warm-up, or while it records, of the second shape; not every error says something."""
    step, runs = recorded.recorded._run, []

    def run(inputs):
        output = step(inputs)
        if inputs[1].shape[1] == 128:
            runs.append(len(inputs))
            if len(runs) == fails_at:
                raise NotImplementedError
        return output

    monkeypatch.setattr(recorded.recorded, "_run", run)
    found, losses = gradients(recorded, LENGTHS)
    assert recorded.recorded is None and len(runs) == fails_at
    expected, expected_losses = plain(recorded)
    assert losses == pytest.approx(expected_losses)
    torch.testing.assert_close(found, expected)
