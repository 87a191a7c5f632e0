"""Sampling that stays on the device: the warpers of a call, if temperature, top-k, top-p and min-p are all it has."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .. import kernels

ORDER = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


@dataclass(frozen=True)
class Warpers:
    """`temperature` > 0; `top_k` = 0, `top_p` = 1 and `min_p` = 0 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, processors: LogitsProcessorList) -> "Warpers | None":
        """The warpers of a call, or `None` when it has other processors, or these in another order."""
        kinds = [type(processor) for processor in processors]
        if any(kind not in ORDER for kind in kinds):
            return None
        places = [ORDER.index(kind) for kind in kinds]
        if places != sorted(set(places)):
            return None
        values = {}
        for processor in processors:
            if getattr(processor, "filter_value", -float("inf")) != -float("inf"):
                return None
            if getattr(processor, "min_tokens_to_keep", 1) != 1:
                return None
            name = {0: "temperature", 1: "top_k", 2: "top_p", 3: "min_p"}[ORDER.index(type(processor))]
            values[name] = getattr(processor, name)
        return cls(**values)

    @property
    def kind(self) -> tuple[bool, bool, bool]:
        """Which of top-k, top-p and min-p are on; their values may change under a captured graph."""
        return self.top_k > 0, self.top_p < 1, self.min_p > 0


class DeviceWarpers:
    """The values of `Warpers` on the device, one for each of up to `size` rows of logits."""

    def __init__(self, size: int, device: torch.device):
        self.temperature = torch.ones(size, device=device, dtype=torch.float32)
        self.top_k = torch.zeros(size, dtype=torch.int32, device=device)
        self.top_p = torch.ones(size, dtype=torch.float64, device=device)  # the warper's own rounding of 1 - top_p
        self.min_p = torch.zeros(size, device=device, dtype=torch.float32)
        self.kind = (False, False, False)

    def set(self, warpers: Warpers) -> None:
        self.kind = warpers.kind
        for name in ("temperature", "top_k", "top_p", "min_p"):
            getattr(self, name).fill_(getattr(warpers, name))

    def probabilities(self, logits: torch.Tensor, width: int) -> torch.Tensor:
        """Logits [N, V] -> the distribution after all warpers [N, width >= V], float32; 0 where there is no logit."""
        n = logits.shape[0]
        has_k, has_p, has_m = self.kind
        result = kernels.truncated_probabilities(
            logits,
            self.temperature[:n],
            self.top_k[:n] if has_k else None,
            self.top_p[:n] if has_p else None,
            self.min_p[:n] if has_m else None,
        )
        return result if width == logits.shape[-1] else F.pad(result, (0, width - logits.shape[-1]))
