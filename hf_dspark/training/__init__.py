"""Training of DSpark drafts: the objective, the trainer and the text it needs."""

from .anchors import sample_anchors
from .blocks import BlockOutput, forward_blocks
from .losses import LossOutput, dspark_loss
from .rows import LogitRows

__all__ = ["BlockOutput", "LogitRows", "LossOutput", "dspark_loss", "forward_blocks", "sample_anchors"]
