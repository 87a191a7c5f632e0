"""`PrefixScheduler`: how many drafts of each row are worth verifying (paper, hardware-aware prefix scheduler).

A round that verifies ℓ_r drafts of each of R rows is expected to commit τ = R + Σ_r Σ_{j ≤ ℓ_r} a_{r,j} tokens, and it
costs one step over B = Σ_r (1 + ℓ_r) tokens. The lengths should maximise Θ = τ · SPS(B), tokens per second.

No decision to verify x_k may depend on x_k or what was drafted after it, or the text would be biased (paper, Appendix
A). Two orders of work keep to that. *Exact*: drafts are admitted by falling survival while Θ rises, so what was drafted
after x_k is read only when x_k is in. *Lagged*: the number of drafts comes from two rounds ago, and current survivals
only decide who gets them; such a number may be the best of all, also past a step of the cost at which the scan would
stop.
"""

import inspect
import math
from collections import deque
from numbers import Integral
from typing import Any, Protocol

import numpy as np
import torch

from .cost_model import CostModel

# Parking: rounds over which drafting is judged, and rounds without drafts after it lost (they double up to the limit).
PROBE_ROUNDS = 8
PARKED_ROUNDS, MOST_PARKED_ROUNDS = 16, 256
# By how much a_j may rise along a row: a device may multiply c_1 · … · c_j in another order for each j.
ROUNDING = 1e-3


class Costs(Protocol):
    """What a scheduler asks of a cost model; `CostModel` is one.

    `steps_per_second` is asked for each B in R..R(1+γ) once and its answers are kept. A parameter `num_rows`, where it
    has one, is given R. A method `plain_steps_per_second(num_rows)`, where there is one, is the speed without any
    draft; it lets the scheduler see that drafting costs more than it brings.
    """

    def steps_per_second(self, batch_tokens: int, /) -> float: ...


class PrefixScheduler:
    """Chooses verify lengths for all rows of a round together.

    ```python
    scheduler = PrefixScheduler(cost_model)            # or lagged=True
    if scheduler.should_draft():                       # at the start of a round; False: one plain token for each row
        lengths = scheduler.schedule(survival)         # [R, γ] -> R lengths
        scheduler.update(survival)                     # lagged only, after the round
    ```

    Its history belongs to one text or batch: use `fresh()` for each.

    Args:
        cost_model: anything with `steps_per_second`, see `Costs`.
        lagged: whether the number of drafts comes from the survivals of two rounds ago.
        min_gain: verify fewer drafts, and in lagged mode another number than before, only where that promises at least
            this relative gain of Θ; 0.05 ignores 5 %. Costs are measured, so small gains may be noise. Lagged
            schedulers start from whole blocks.

    Raises:
        ValueError: for arguments that cannot be used.
    """

    def __init__(self, cost_model: Any, *, lagged: bool = False, min_gain: float = 0.0):
        if not callable(getattr(cost_model, "steps_per_second", None)):
            raise ValueError(f"`cost_model` must have a method `steps_per_second`, got {cost_model!r}.")
        if isinstance(min_gain, bool) or not isinstance(min_gain, (int, float)) or not 0 <= min_gain < 1:
            raise ValueError(f"`min_gain` must be a number in [0, 1), got {min_gain!r}. Use 0.05 for 5 %.")
        self.cost_model = cost_model
        self.lagged = bool(lagged)
        self.min_gain = float(min_gain)
        self._with_rows = "num_rows" in inspect.signature(cost_model.steps_per_second).parameters
        self._speeds: dict[tuple[int, int], np.ndarray] = {}
        self._budgets: deque[int] = deque(maxlen=2)  # of the last two updates, the older first
        self._per_row: float | None = None  # drafts for each row that the last budget meant
        self._gains: list[float] = []
        self._parked, self._next_parking = 0, PARKED_ROUNDS

    def fresh(self) -> "PrefixScheduler":
        """A scheduler with the same settings and costs and no history, for one generate() call."""
        new = PrefixScheduler(self.cost_model, lagged=self.lagged, min_gain=self.min_gain)
        new._speeds = self._speeds
        return new

    def should_draft(self) -> bool:
        """Whether the coming round is worth a draft. Ask once at the start of each round.

        After `PROBE_ROUNDS` rounds whose drafts promised on average no gain over plain decoding, the scheduler parks:
        the answer is False for `PARKED_ROUNDS` rounds, then drafting is tried for as many rounds as before. Each
        failure doubles the pause, up to `MOST_PARKED_ROUNDS`; a success ends it.
        """
        if self._parked:
            self._parked -= 1
            return False
        return True

    def schedule(self, survival: Any, budget: int | None = None) -> list[int]:
        """Verify lengths ℓ_r in 0..γ.

        Args:
            survival: [R, γ] a_j of the current drafts; a tensor, array or nested list.
            budget: total number of drafts, given to those most likely to survive. `None`: in lagged mode `budget()`,
                in its first two rounds all; else Algorithm 1, which stops at the first draft that does not raise Θ.

        Raises:
            ValueError: survivals that are not probabilities or rise along a row, or a negative budget.
        """
        a = _survival(survival)
        num_rows = len(a)
        if num_rows == 0:
            return []
        if budget is None and self.lagged:
            told = self.budget()
            budget = a.size if told is None else told
        elif budget is not None and (isinstance(budget, bool) or not isinstance(budget, (int, Integral)) or budget < 0):
            raise ValueError(f"`budget` must be a whole number of drafts, 0 or more, got {budget!r}.")
        if budget is None:
            theta = self._theta(a)
            budget = _early_stop(theta, self.min_gain)
            self._judge(float(theta[budget]), float(theta[0]), num_rows)
        if budget >= a.size:
            return [a.shape[1]] * num_rows
        return _allocate(a, int(budget))

    def update(self, survival: Any) -> None:
        """Lagged mode: take the survivals [R, γ] of a round that is over. Rows need not be those of other rounds.

        Raises:
            ValueError: as `schedule`, or the scheduler is not lagged.
        """
        self._check_lagged("update")
        a = _survival(survival)
        num_rows, gamma = a.shape
        if num_rows == 0:
            return
        theta = self._theta(a)
        best = int(theta.argmax())  # the fewest drafts, where several numbers are equally good
        before = num_rows * gamma if self._per_row is None else min(num_rows * gamma, round(num_rows * self._per_row))
        budget = best if theta[best] >= theta[before] * (1 + self.min_gain) else before
        self._per_row = budget / num_rows
        self._budgets.append(budget)
        self._judge(float(theta[budget]), float(theta[0]), num_rows)

    def budget(self, pending: int = 0) -> int | None:
        """Lagged mode: drafts to verify in the coming round, over all rows; the best number for two rounds ago.

        `None` in the first two rounds. Where rows have ended since, it may be more than they have drafts.

        Args:
            pending: 1 if the last round has not been told to `update` yet, else 0.

        Raises:
            ValueError: the scheduler is not lagged, or more rounds are pending.
        """
        self._check_lagged("budget")
        if pending not in (0, 1):
            raise ValueError(f"`pending` must be 0 or 1, got {pending!r}. Call `update` after each round.")
        back = 2 - pending
        return self._budgets[-back] if len(self._budgets) >= back else None

    def _check_lagged(self, method: str) -> None:
        if not self.lagged:
            raise ValueError(f"`{method}()` belongs to the lagged mode. Make the scheduler with `lagged=True`.")

    def _theta(self, a: np.ndarray) -> np.ndarray:
        """Θ [Rγ + 1] of verifying the 0, 1, … drafts most likely to survive."""
        num_rows, gamma = a.shape
        tau = np.full(a.size + 1, float(num_rows))
        tau[1:] += np.sort(a, axis=None)[::-1].cumsum()
        key = num_rows, gamma
        if key not in self._speeds:
            self._speeds[key] = self._ask(range(num_rows, num_rows * (1 + gamma) + 1), num_rows)
        return tau * self._speeds[key]

    def _ask(self, batch_tokens: range, num_rows: int) -> np.ndarray:
        """SPS(B) of every B."""
        own = getattr(self.cost_model.steps_per_second, "__func__", None)
        if own is CostModel.steps_per_second:  # a subclass may answer differently
            return self.cost_model.speeds(batch_tokens, num_rows)
        extra = {"num_rows": num_rows} if self._with_rows else {}
        return np.array([_checked_speed(self.cost_model.steps_per_second(b, **extra), b) for b in batch_tokens])

    def _judge(self, theta: float, without: float, num_rows: int) -> None:
        """Note what a round promised against plain decoding, and park when the last few did not win."""
        plain = getattr(self.cost_model, "plain_steps_per_second", None)
        if plain is not None:
            without = num_rows * _checked_speed(plain(num_rows), num_rows)
        self._gains.append(theta / without)
        if len(self._gains) < PROBE_ROUNDS:
            return
        if sum(self._gains) > len(self._gains):
            self._next_parking = PARKED_ROUNDS
        else:
            self._parked = self._next_parking
            self._next_parking = min(2 * self._next_parking, MOST_PARKED_ROUNDS)
        self._gains.clear()


def _allocate(a: np.ndarray, budget: int) -> list[int]:
    """Verify lengths [R] that give `budget` drafts to those most likely to survive.

    Ties go to the lower row, and in a row to the earlier slot.
    """
    kept = np.argsort(-a, axis=None, kind="stable")[:budget]
    return np.bincount(kept // a.shape[1], minlength=len(a)).tolist()


def _survival(survival: Any) -> np.ndarray:
    """[R, γ] float64, checked. NumPy, because a round waits for this: torch takes several times as long."""
    if survival is None:
        raise ValueError("`survival` is None: the draft has no confidence head, so there is nothing to schedule by.")
    try:
        a = np.asarray(survival.detach().double().cpu() if isinstance(survival, torch.Tensor) else survival, np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"`survival` must be an [R, γ] array of numbers: {error}") from error
    if a.ndim != 2 or a.shape[1] == 0:
        raise ValueError(f"`survival` must be [R, γ], got shape {a.shape}.")
    if not ((a >= 0) & (a <= 1)).all():
        raise ValueError("`survival` must hold probabilities in [0, 1], without NaN.")
    falling = np.minimum.accumulate(a, axis=1)
    if (a - falling > ROUNDING).any():
        raise ValueError("`survival` must not rise along a row: give a_j = c_1 · … · c_j, not c_k.")
    return falling


def _early_stop(theta: np.ndarray, min_gain: float) -> int:
    """Drafts before the first that does not bring Θ above the best so far, less the share `min_gain`.

    Never the best number in hindsight: that would look at drafts behind the ones it cuts.
    """
    best = np.maximum.accumulate(theta)
    stops = theta[1:] <= best[:-1] * (1 - min_gain)
    return int(stops.argmax()) if stops.any() else len(theta) - 1


def _checked_speed(speed: Any, count: int) -> float:
    value = float(speed)
    if not 0 < value < math.inf:
        raise ValueError(f"The cost model must give a finite speed above 0, got {speed!r} for {count}.")
    return value
