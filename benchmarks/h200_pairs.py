"""Pairs for the benchmarks: shapes of published models with random weights, a script for τ."""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_dspark import DSparkConfig, DSparkForCausalLM
from hf_dspark.generation.rounds import Rounds

V, RANK = 151936, 256


@dataclass(frozen=True)
class Shape:
    """Qwen3 target and its five-layer draft."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    taps: tuple[int, ...]
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = V


SHAPES = {
    "tiny": Shape(128, 256, 4, 4, (0, 2), 2, 32, 512),
    "4b": Shape(2560, 9728, 36, 32, (1, 9, 17, 25, 33)),
    "8b": Shape(4096, 12288, 36, 32, (1, 9, 17, 25, 33)),
    "14b": Shape(5120, 17408, 40, 40, (1, 10, 19, 28, 37)),
}


def target_of(shape: Shape, device: str, dtype: torch.dtype) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, max_position_embeddings=40960, tie_word_embeddings=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return filled(Qwen3ForCausalLM, config, device, dtype)


def draft_of(shape: Shape, device: str, dtype: torch.dtype, block_size: int = 7) -> DSparkForCausalLM:
    config = DSparkConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=5, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, block_size=block_size, target_layer_ids=list(shape.taps),
        mask_token_id=shape.vocabulary - 1, markov_rank=RANK, target_hidden_size=shape.hidden,
        num_target_layers=shape.layers,
    )  # fmt: skip
    return filled(DSparkForCausalLM, config, device, dtype)


def filled(kind, config, device: str, dtype: torch.dtype):
    """A model of normal weights, std 0.02, built on the device."""
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = kind(config)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
    return model.eval().requires_grad_(False)


def script(tau: float, length: int = 100) -> list[int]:
    """Accepted drafts of successive rounds; the mean of any stretch is τ − 1 to within one draft."""
    return [int((i + 1) * (tau - 1) + 1e-9) - int(i * (tau - 1) + 1e-9) for i in range(length)]


@contextmanager
def scripted(device: str):
    """Rounds inside accept as many drafts as a script says; the target's verdict is computed all the same.

    Yields a function that sets τ, also under rounds that are recorded already.
    """
    counts = torch.zeros(100, dtype=torch.long, device=device)
    turn = torch.zeros(1, dtype=torch.long, device=device)
    accept = Rounds.accept

    def accept_by_script(self, verified, drafts, q, lengths, options):
        accepted, own = accept(self, verified, drafts, q, lengths, options)
        rows = torch.arange(len(accepted), device=device)
        count = counts[(turn + 31 * rows) % len(counts)]
        turn.add_(1)
        return torch.minimum(count, lengths.clamp(min=0)) + 0 * accepted, own

    def set_tau(tau: float) -> None:
        counts.copy_(torch.tensor(script(tau, len(counts))))
        turn.zero_()

    Rounds.accept = accept_by_script
    try:
        yield set_tau
    finally:
        Rounds.accept = accept
