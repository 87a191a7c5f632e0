"""`TrainingConfig`: everything that decides a training run."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ..configuration_dspark import MARKOV_HEAD_TYPES

# What may differ between a run and its continuation: none of these touches the weights.
FREE_TO_CHANGE = (
    "output_dir", "log_every", "validate_every", "save_every", "keep_checkpoints", "resume", "dtype", "tensorboard",
)  # fmt: skip


@dataclass(frozen=True)
class TrainingConfig:
    """Arguments of `train`. Defaults are the paper's objective and a draft of 2 layers.

    > Texts

    Args:
        data (`list[str]`): JSONL files with `input_ids` and `loss_mask`, as `hf-dspark synthesize` writes them.
        output_dir (`str`): where checkpoints, `metrics.jsonl` and at the end `draft/` go.
        validation_data (`list[str]`): files to measure on; without any, `num_validation_texts` of `data` are held back.
        num_validation_texts (`int`): 0 for no validation.
        max_length (`int`): texts are cut to this many tokens.

    > Draft

        target (`str`, *optional*): folder or hub id of the target; `None` for the embedded one.
        init_from (`str`, *optional*): a draft to go on from; its own shape counts and the fields of this group below
            must be left alone.
        num_hidden_layers, block_size, markov_rank (`int`), markov_head_type (`str`), enable_confidence_head (`bool`):
            as in `DSparkConfig`; rank 0 for a draft without Markov head (DFlash).
        target_layer_ids (`list[int]`, *optional*): taps; by default 5, spread evenly from layer 1 to depth − 3.
        mask_token_id (`int`, *optional*): by default a row of the vocabulary that stands for no text.
        from_target (`bool`): begin with the target's last layers where they fit, not with random weights.

    > Objective

        ce, tv, confidence, decay (`float`): see `dspark_loss`.
        num_anchors (`int`): blocks a text and step.

    > Optimisation

        max_steps (`int`, *optional*): optimiser steps; `None` for `num_epochs` passes over the data.
        batch_size (`int`): texts a device and forward. gradient_accumulation_steps (`int`): forwards a step.
        learning_rate (`float`): at the end of the warm-up, from where a cosine leads to 0. markov_learning_rate
            (`float`, *optional*): of the Markov head's tables W1 and W2, of which a step sees few rows; by default
            4 · `learning_rate`. warmup_ratio (`float`): of the steps. weight_decay, adam_beta1, adam_beta2,
            max_grad_norm (`float`): AdamW and clipping.
        mixed_precision (`str`): `"bf16"`, `"no"`, or `"auto"` for bf16 on CUDA. Weights and optimiser are float32.
        compile (`bool`, *optional*): compile the target's layers and record the steps of one GPU in CUDA graphs, which
            takes a minute once; by default on CUDA.
        seed (`int`): of the weights, the order of the texts and the anchors.

    > Run

        log_every, validate_every, save_every (`int`): in steps; validation and checkpoint come at the end too.
        keep_checkpoints (`int`): older ones are removed.
        resume (`bool`): go on from the newest checkpoint in `output_dir`, if there is one.
        dtype (`str`): of the target and of the finished draft.
        tensorboard (`bool`, *optional*): `None` if it is installed.

    Raises:
        ValueError: for values that cannot work; the message names the value and the fix.
    """

    data: list[str]
    output_dir: str
    validation_data: list[str] = field(default_factory=list)
    num_validation_texts: int = 64
    max_length: int = 1024

    target: str | None = None
    init_from: str | None = None
    num_hidden_layers: int = 2
    block_size: int = 7
    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    from_target: bool = True

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    num_anchors: int = 48

    max_steps: int | None = None
    num_epochs: int = 1
    batch_size: int = 32
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-3
    markov_learning_rate: float | None = None
    warmup_ratio: float = 0.04
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    max_grad_norm: float = 1.0
    mixed_precision: str = "auto"
    compile: bool | None = None
    seed: int = 0

    log_every: int = 10
    validate_every: int = 500
    save_every: int = 500
    keep_checkpoints: int = 2
    resume: bool = False
    dtype: str = "bfloat16"
    tensorboard: bool | None = None

    def __post_init__(self):
        if not self.data:
            raise ValueError("`data` is empty. Give JSONL files that `hf-dspark synthesize` has written.")
        positive = (
            "max_length", "num_anchors", "num_epochs", "batch_size", "gradient_accumulation_steps", "log_every",
            "validate_every", "save_every", "keep_checkpoints", "learning_rate", "max_grad_norm", "decay",
        )  # fmt: skip
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be > 0, got {getattr(self, name)}.")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"`max_steps` must be at least 1, got {self.max_steps}. Use None for whole epochs.")
        if self.markov_learning_rate is not None and not self.markov_learning_rate > 0:
            raise ValueError(f"`markov_learning_rate` must be > 0, got {self.markov_learning_rate}.")
        if not 0 <= self.warmup_ratio < 1:
            raise ValueError(f"`warmup_ratio` must be in [0, 1), got {self.warmup_ratio}.")
        for name, known in {
            "mixed_precision": ("auto", "no", "bf16"),
            "dtype": ("bfloat16", "float32", "float16"),
            "markov_head_type": MARKOV_HEAD_TYPES,
        }.items():
            if getattr(self, name) not in known:
                raise ValueError(f"`{name}` must be one of {', '.join(known)}, got {getattr(self, name)!r}.")
        self._check_init_from()

    def _check_init_from(self) -> None:
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        shape = (
            "num_hidden_layers", "block_size", "target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type",
            "enable_confidence_head", "from_target",
        )  # fmt: skip
        changed = [f"`{name}`" for name in shape if getattr(self, name) != defaults[name]]
        if self.init_from is not None and changed:
            raise ValueError(f"`init_from` brings its own {', '.join(changed)}: leave them out.")

    def fingerprint(self) -> dict[str, Any]:
        """What a continuation must have in common with the run it continues."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in FREE_TO_CHANGE}
