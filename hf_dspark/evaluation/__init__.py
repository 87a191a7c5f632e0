"""Measuring a pair: prompt sets, metrics, runner.

```python
from hf_dspark import load_default_pair
from hf_dspark.evaluation import ChatFormat, Settings, dspark_methods, evaluate, load_prompts, plain_methods

target, draft, tokenizer = load_default_pair()
methods = [*plain_methods(compiled=False), *dspark_methods({"dspark": draft})]
report = evaluate(target, ChatFormat(tokenizer), methods, load_prompts("prompts.jsonl"), Settings(max_new_tokens=64))
print(report["overall"]["methods"]["dspark"]["mean_acceptance_length"])
```
"""

from .chat import ChatFormat
from .methods import Method, dspark_methods, other_methods, plain_methods
from .plots import plot
from .prompts import Prompt, load_prompt_sets, load_prompts
from .run import evaluate
from .runner import Settings
from .speed import measure_speed

__all__ = [
    "ChatFormat",
    "Method",
    "Prompt",
    "Settings",
    "dspark_methods",
    "evaluate",
    "load_prompt_sets",
    "load_prompts",
    "measure_speed",
    "other_methods",
    "plain_methods",
    "plot",
]
