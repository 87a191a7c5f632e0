"""Publishing: model cards from measured JSON, hub folders, folders that vLLM and SGLang serve.

```python
from hf_dspark import hub

hub.write_card("run/draft", ["eval.json", "sts.json", "train.json"], target="Qwen/Qwen3-8B", license="apache-2.0")
draft.push_to_hub("user/my-draft")
exported = hub.export(draft, "served", format="deepspec", target="Qwen/Qwen3-8B")
```
"""

from .card import write_card
from .export import Exported, export
from .publish import push

__all__ = ["Exported", "export", "push", "write_card"]
