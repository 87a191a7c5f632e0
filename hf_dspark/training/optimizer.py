"""The optimiser of a draft: what is trained, and how fast."""

import torch
from torch import nn

from ..modeling_dspark import DSparkForCausalLM
from .config import TrainingConfig


def make_optimizer(draft: DSparkForCausalLM, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW on everything but the shared embeddings and head; norms and biases do not decay.

    Raises:
        ValueError: a rate for the Markov head of a draft that has none.
    """
    frozen = ("embed_tokens.", "lm_head.")
    groups: dict[str, list[nn.Parameter]] = {"matrices": [], "vectors": [], "tables": []}
    for name, parameter in draft.named_parameters():
        if name.startswith(frozen):
            parameter.requires_grad_(False)
        elif name.startswith(("markov_head.markov_w1.", "markov_head.markov_w2.")):
            groups["tables"].append(parameter)
        else:
            groups["matrices" if parameter.dim() > 1 else "vectors"].append(parameter)
    if config.markov_learning_rate is not None and not groups["tables"]:
        raise ValueError("`markov_learning_rate` has no effect, the draft has no Markov head. Leave it out.")
    rate = 4 * config.learning_rate if config.markov_learning_rate is None else config.markov_learning_rate
    more: dict[str, dict[str, float]] = {"matrices": {}, "vectors": {"weight_decay": 0.0}, "tables": {"lr": rate}}
    return torch.optim.AdamW(
        [{"params": found} | more[kind] for kind, found in groups.items() if found],
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        betas=(config.adam_beta1, config.adam_beta2),
        fused=draft.device.type == "cuda",
    )
