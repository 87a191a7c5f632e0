"""DSpark speculative decoding, native to transformers.

```python
import hf_dspark
from transformers import AutoModel, AutoModelForCausalLM

draft = AutoModel.from_pretrained("deepseek-ai/dspark_qwen3_8b_block7")
target = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", dtype="auto", device_map="auto")
output = target.generate(**inputs, assistant_model=draft, max_new_tokens=256)
```

A batch, or `cache_implementation="static"`, takes the fast path: see `warmup`, `release` and `FastPath`.

Importing the package claims DSpark checkpoints for the Auto classes and installs one hook in generate().
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import auto
from .configuration_dspark import DSparkConfig
from .context import ContextWindow
from .default_pair import load_default_pair
from .generation import hook
from .generation.candidate_generator import DSparkCandidateGenerator
from .generation.engine import FastPath
from .generation.engines import release
from .generation.logits_process import MarkovLogitsProcessor
from .generation.record import Round, SpeculationStats, record
from .generation.warmup import warmup
from .modeling_dspark import DSparkForCausalLM, Gemma4DSparkModel, Qwen3DSparkModel
from .proposal import DraftBlock
from .scheduling.cost_model import CostModel
from .scheduling.scheduler import PrefixScheduler
from .session import Session
from .target import context_features

if TYPE_CHECKING:
    from .scheduling.calibration import calibrate

__version__ = "0.1.0"
__all__ = [
    "ContextWindow",
    "CostModel",
    "DSparkCandidateGenerator",
    "DSparkConfig",
    "DSparkForCausalLM",
    "DraftBlock",
    "FastPath",
    "Gemma4DSparkModel",
    "MarkovLogitsProcessor",
    "PrefixScheduler",
    "Qwen3DSparkModel",
    "Round",
    "Session",
    "SpeculationStats",
    "calibrate",
    "context_features",
    "load_default_pair",
    "record",
    "release",
    "warmup",
]

auto.register()
hook.install()


def __getattr__(name: str) -> Any:
    # Calibration and training sit on top of the names above.
    if name == "calibrate":
        from .scheduling.calibration import calibrate

        return calibrate
    if name == "training":
        return importlib.import_module(".training", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
