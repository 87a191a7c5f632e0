"""The demo: a page that shows where every token of an answer came from. Needs `pip install "hf-dspark[demo]"`.

```python
import hf_dspark
from hf_dspark.demo import launch

launch(*hf_dspark.load_default_pair())
```

`trace`, `html`, `charts` and `poster` turn recorded rounds into what is shown, `generation` runs the models, and `page`
is the only module that knows Gradio. All of it uses public names of hf_dspark alone.
"""

from .launch import launch

__all__ = ["launch"]
