"""Training of DSpark drafts: the objective, the trainer and the text it needs."""

from .anchors import sample_anchors
from .blocks import BlockOutput, forward_blocks
from .config import TrainingConfig
from .estimate import Estimate, estimate
from .losses import LossOutput, dspark_loss
from .metrics import Validation
from .new_draft import default_taps, new_draft, unused_token
from .rows import LogitRows
from .synthesis import SynthesisConfig, SynthesisResult, synthesize
from .trainer import TrainingResult, train

__all__ = [
    "BlockOutput",
    "Estimate",
    "LogitRows",
    "LossOutput",
    "SynthesisConfig",
    "SynthesisResult",
    "TrainingConfig",
    "TrainingResult",
    "Validation",
    "default_taps",
    "dspark_loss",
    "estimate",
    "forward_blocks",
    "new_draft",
    "sample_anchors",
    "synthesize",
    "train",
    "unused_token",
]
