"""Sequential temperature scaling, STS: make a_j mean what it says (paper, confidence calibration).

Rounds are recorded with the pair at temperature 1, the distributions that a confidence head is trained on. Then, from
left to right, each T_k is the one whose a_k = Π σ(logit_i / T_i) is calibrated best, earlier ones being fixed.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .. import confidence
from ..evaluation.metrics import auroc, brier, ece
from ..evaluation.slots import reliability_bins
from ..generation.candidate_generator import Proposal
from ..generation.loop import PlainLoop
from ..generation.path import why_target_only
from ..generation.record import CallRecord
from ..modeling_dspark import DSparkForCausalLM
from ..sampling import accept

logger = logging.get_logger(__name__)

# Tried in this order, nearest to 1 first, so that 1 stays where nothing is better.
GRID = sorted((10 ** (i / 100) for i in range(-100, 101)), key=lambda t: max(t, 1 / t))
MIN_ROUNDS, MANY_ROUNDS = 100, 1000


@dataclass(frozen=True)
class Recording:
    """What N rounds of whole blocks showed; all tensors are [N, γ] on the CPU.

    Attributes:
        confidence_logits: before temperatures.
        expected: c*_k = 1 − ½‖p_k − q_k‖₁, the chance that x_k passes if x_1..x_{k-1} did.
        survival: the chance that x_1..x_j all pass, given the drafts before x_j: Π_{k<j} min(1, p(x_k)/q(x_k)) · c*_j.
            Its mean is that of the 0/1 outcome, with less noise; the product of c* alone would not do, as drafts that
            pass are followed by easier ones.
        sampled: 0/1, whether x_1..x_j passed one draw of the acceptance rule.
        prompt: [N] which prompt a round belongs to.
    """

    confidence_logits: torch.Tensor
    expected: torch.Tensor
    survival: torch.Tensor
    sampled: torch.Tensor
    prompt: torch.Tensor

    def __len__(self) -> int:
        return len(self.prompt)

    def select(self, rounds: torch.Tensor) -> "Recording":
        return Recording(*(getattr(self, name)[rounds] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class CalibrationReport:
    """What `calibrate` did. Lists have γ entries; every ECE and AUROC is measured on held-out texts.

    Attributes:
        temperatures: T_k, now in `draft.config.confidence_temperatures`.
        ece_before, ece_after: expected calibration error of a_j without and with them, mean over positions.
        ece_by_position, ece_by_position_before: the same for each j.
        ece_sampled_before, ece_sampled_after: the means against sampled 0/1 outcomes, as a check.
        auroc_c: of c_k against c*_k; temperatures cannot change it.
        auroc_a, auroc_a_before: of a_j. An AUROC is `None` where all outcomes were the same.
        num_rounds: rounds recorded; `num_samples` of them were fitted on, the others held out.
        notes: what was not fitted, and why.
        dataset: name of the prompts, for the file.
        reliability, reliability_before: bins of a_j over all positions: `predicted`, `accepted` and `count`.
    """

    temperatures: list[float]
    ece_before: float
    ece_after: float
    ece_by_position: list[float]
    ece_by_position_before: list[float]
    ece_sampled_before: float
    ece_sampled_after: float
    auroc_c: list[float | None]
    auroc_a: list[float | None]
    auroc_a_before: list[float | None]
    num_rounds: int
    num_samples: int
    notes: list[str]
    dataset: str = ""
    reliability: list[dict[str, float]] = field(default_factory=list)
    reliability_before: list[dict[str, float]] = field(default_factory=list)

    def to_json(self, path: str | Path) -> None:
        """Write every attribute as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def calibrate(
    target: PreTrainedModel,
    draft: DSparkForCausalLM,
    prompts: Sequence[Any],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 256,
    holdout: float = 0.3,
    seed: int = 0,
) -> CalibrationReport:
    """Fit the STS temperatures of a draft on texts that its target writes, and set them in `draft.config`.

    `draft.save_pretrained` then stores them with the checkpoint. Where held-out texts are not calibrated better than
    without temperatures, all T_k stay 1 and the report says so.

    Args:
        prompts: token-id lists, strings, or chats (lists of messages, put through the chat template).
        tokenizer: needed for strings and chats.
        max_new_tokens: length of each text.
        holdout: share of the rounds held out for the report; whole texts, so at least two prompts are needed.
        seed: of the texts and of the split.

    Raises:
        ValueError: a draft without confidence head or with a scheduler, a target that goes without drafts, arguments
            that cannot be used, or too few rounds.
    """
    if draft.confidence_head is None:
        raise ValueError("The draft has no confidence head, so there is nothing to calibrate.")
    if getattr(draft, "scheduler", None) is not None:
        raise ValueError("Calibration verifies whole blocks. Set `draft.scheduler = None` first.")
    if not 0 < holdout < 1:
        raise ValueError(f"`holdout` must be a share between 0 and 1, got {holdout!r}.")
    ids = [_token_ids(prompt, tokenizer) for prompt in prompts]
    if len(ids) < 2:
        raise ValueError(f"Give at least 2 prompts, got {len(ids)}: the held-out rounds need texts of their own.")
    report = fit(record_rounds(target, draft, ids, max_new_tokens=max_new_tokens, seed=seed), holdout, seed)
    draft.config.confidence_temperatures = report.temperatures
    return report


# ---- fitting: pure functions of recorded rounds


def fit_temperatures(confidence_logits: torch.Tensor, survival: torch.Tensor) -> list[float]:
    """T_1..T_γ by a grid search for each position, from left to right, that minimises the ECE of a_j, up to its noise.

    Args:
        confidence_logits: [N, γ] before temperatures.
        survival: [N, γ] whether x_1..x_j all passed, 0/1 or its probability.

    Returns:
        γ temperatures from 0.1 to 10; 1 where no other is better.
    """
    logits, outcomes = confidence_logits.double(), survival.double()
    temperatures: list[float] = []
    before = torch.ones(len(logits), dtype=torch.float64)  # a_{j-1}, with the temperatures found so far
    for j in range(logits.shape[1]):
        temperatures.append(_best_temperature(before, logits[:, j], outcomes[:, j]))
        before = before * (logits[:, j] / temperatures[-1]).sigmoid()
    return temperatures


def _best_temperature(before: torch.Tensor, logits: torch.Tensor, outcomes: torch.Tensor) -> float:
    """Of the T whose ECE lies within a standard error of the lowest, the one with the lowest Brier score.

    Over T the ECE is flat and, on some thousand rounds, noisy: its lowest point alone may lie anywhere in a wide range.
    """
    predicted = {t: before * (logits / t).sigmoid() for t in GRID}
    errors = {t: ece(a, outcomes) for t, a in predicted.items()}
    best = min(GRID, key=lambda t: errors[t])
    noise = float((outcomes - predicted[best]).std()) / len(outcomes) ** 0.5
    near = [t for t in GRID if errors[t] <= errors[best] + noise]
    return min(near, key=lambda t: brier(predicted[t], outcomes))


def fit(recording: Recording, holdout: float = 0.3, seed: int = 0) -> CalibrationReport:
    """Split the rounds by prompt, fit on one part, report on the other.

    Raises:
        ValueError: too few rounds.
    """
    if len(recording) < MIN_ROUNDS:
        raise ValueError(
            f"Calibration needs at least {MIN_ROUNDS} rounds of whole blocks, got {len(recording)}. "
            "Give more prompts or a larger `max_new_tokens`."
        )
    if len(recording) < MANY_ROUNDS:
        logger.warning(f"hf_dspark: {len(recording)} rounds calibrate roughly; {MANY_ROUNDS} or more are better.")
    held_out = _held_out(recording.prompt, holdout, seed)
    fitted_on, test = recording.select(~held_out), recording.select(held_out)
    temperatures = fit_temperatures(fitted_on.confidence_logits, fitted_on.survival)
    gamma = len(temperatures)
    identity = [1.0] * gamma
    notes = [f"T_{k + 1} stays 1: no other is better at position {k + 1}" for k in range(gamma) if temperatures[k] == 1]
    notes += [
        f"T_{k + 1} is at the edge of the search" for k in range(gamma) if temperatures[k] in (min(GRID), max(GRID))
    ]
    before, after = (_eces(test, t, test.survival) for t in (identity, temperatures))
    if sum(after) >= sum(before):
        notes = [f"all T_k stay 1: fitted ones gave an ECE of {_mean(after):.4f} on held-out texts, not below "
                 f"{_mean(before):.4f} without"]  # fmt: skip
        temperatures, after = identity, before
    for note in notes:
        logger.warning(f"hf_dspark: {note}.")
    return CalibrationReport(
        temperatures=temperatures,
        ece_before=_mean(before),
        ece_after=_mean(after),
        ece_by_position=after,
        ece_by_position_before=before,
        ece_sampled_before=_mean(_eces(test, identity, test.sampled)),
        ece_sampled_after=_mean(_eces(test, temperatures, test.sampled)),
        auroc_c=[auroc(test.confidence_logits[:, k], test.expected[:, k]) for k in range(gamma)],
        auroc_a=_aurocs(test, temperatures),
        auroc_a_before=_aurocs(test, identity),
        num_rounds=len(recording),
        num_samples=len(fitted_on),
        notes=notes,
        reliability=_reliability(test, temperatures),
        reliability_before=_reliability(test, identity),
    )


def _survival(recording: Recording, temperatures: list[float]) -> torch.Tensor:
    scale = torch.tensor(temperatures, dtype=torch.float64)
    return confidence.survival(confidence.conditional(recording.confidence_logits.double(), scale))


def _eces(recording: Recording, temperatures: list[float], outcomes: torch.Tensor) -> list[float]:
    a = _survival(recording, temperatures)
    return [ece(a[:, j], outcomes[:, j]) for j in range(a.shape[1])]


def _aurocs(recording: Recording, temperatures: list[float]) -> list[float | None]:
    a = _survival(recording, temperatures)
    return [auroc(a[:, j], recording.survival[:, j]) for j in range(a.shape[1])]


def _reliability(recording: Recording, temperatures: list[float]) -> list[dict[str, float]]:
    a = _survival(recording, temperatures)
    return reliability_bins(zip(a.flatten().tolist(), recording.survival.flatten().tolist(), strict=True))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _held_out(prompt: torch.Tensor, holdout: float, seed: int) -> torch.Tensor:
    """[N] bool: rounds of prompts drawn until their share reaches `holdout`; at least one prompt stays on each side.

    Raises:
        ValueError: all rounds belong to one prompt.
    """
    counts = {int(p): int((prompt == p).sum()) for p in prompt.unique()}
    if len(counts) < 2:
        raise ValueError("All rounds belong to one text, but held-out rounds need texts of their own. Add prompts.")
    order = list(counts)
    random.Random(seed).shuffle(order)
    drawn: list[int] = []
    for p in order[:-1]:
        if drawn and sum(counts[d] for d in drawn) >= holdout * len(prompt):
            break
        drawn.append(p)
    return torch.isin(prompt, torch.tensor(drawn))


# ---- recording


class RecordingLoop(PlainLoop):
    """The plain path, keeping labels and logits of every round that verifies a whole block."""

    def __init__(self, *args: Any, rows: list[tuple[torch.Tensor, ...]]):
        super().__init__(*args)
        self._rows = rows
        self._proposal: Proposal | None = None

    def _propose(self, ids: torch.Tensor, limit: int | None) -> Proposal | None:
        self._proposal = super()._propose(ids, limit)
        return self._proposal

    def _keep_outputs(self, outputs: Any, committed: int, drafts: int) -> None:
        super()._keep_outputs(outputs, committed, drafts)
        if self._proposal is not None and drafts == self.draft.config.num_draft_tokens:
            self._rows.append(labels(self._proposal, outputs.logits[0, -drafts - 1 : -1]))


def labels(proposal: Proposal, target_logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Confidence logits, c*, survival and 0/1 outcome [γ] of one block; `target_logits` [γ, V] of its drafts' slots."""
    assert proposal.q is not None and proposal.block.confidence_logits is not None
    p = target_logits.float().softmax(dim=-1)
    q = proposal.q.to(p.device)
    width = min(p.shape[-1], q.shape[-1])  # padding rows of a vocabulary hold no mass in common
    expected = torch.minimum(p[:, :width], q[:, :width]).sum(dim=-1).clamp(max=1)
    index = proposal.tokens.to(p.device)[:, None]
    passed = (p.gather(-1, index) / q.gather(-1, index)).squeeze(-1).clamp(max=1)
    survival = torch.cat((passed.new_ones(1), passed[:-1].cumprod(0))) * expected
    count = accept(index.T, q[None, :, :width], p[None, :, :width], torch.rand(index.T.shape, device=p.device))
    sampled = torch.arange(len(passed), device=p.device) < count
    return tuple(t.float().cpu() for t in (proposal.block.confidence_logits[0], expected, survival, sampled))


def record_rounds(
    target: PreTrainedModel,
    draft: DSparkForCausalLM,
    prompts: list[list[int]],
    *,
    max_new_tokens: int = 256,
    seed: int = 0,
) -> Recording:
    """Let the pair write a text for each prompt at temperature 1 and record its rounds. torch's own draws stay as they
    were."""
    draft.attach_target(target)
    gamma = draft.config.num_draft_tokens
    devices = [target.device] if target.device.type == "cuda" else []
    rows: list[tuple[torch.Tensor, ...]] = []
    numbers: list[int] = []

    def decode(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        limits = input_ids.shape[1], generation_config.max_length
        if why_not := why_target_only(model, (), False, kwargs, *limits):
            raise ValueError(f"This target goes without drafts, so there is nothing to calibrate: {why_not}.")
        # Without processors p is the target's own distribution, whatever its generation config says.
        record = CallRecord("plain", "calibration", gamma)
        rest = LogitsProcessorList(), stopping_criteria, generation_config, None, kwargs, record
        return RecordingLoop(model, draft, input_ids, *rest, rows=rows).run()

    options = {
        "num_assistant_tokens": gamma, "assistant_confidence_threshold": 0.0, "max_new_tokens": max_new_tokens,
        "do_sample": True, "num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False,
        "use_cache": True,
    }  # fmt: skip
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        for number, ids in enumerate(logging.tqdm(prompts, desc="calibrate")):
            prompt = torch.tensor([ids], device=target.device)
            mask = torch.ones_like(prompt)  # a prompt may hold the padding token
            target.generate(prompt, attention_mask=mask, custom_generate=decode, **options)
            numbers += [number] * (len(rows) - len(numbers))
    empty = torch.zeros(0, gamma)
    logits, expected, survival, sampled = (torch.stack(c) for c in zip(*rows, strict=True)) if rows else (empty,) * 4
    return Recording(logits, expected, survival, sampled, torch.tensor(numbers, dtype=torch.long))


def _token_ids(prompt: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Token ids of one prompt in any of its forms."""
    is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)
    if not is_chat and not isinstance(prompt, str):
        ids = [int(token) for token in prompt]
    elif tokenizer is None:
        raise ValueError("Prompts that are strings or chats need `tokenizer`. Pass it, or give token ids.")
    elif is_chat:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
    else:
        ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise ValueError(f"A prompt is empty: {prompt!r}. Every text needs at least one token to start from.")
    return ids
