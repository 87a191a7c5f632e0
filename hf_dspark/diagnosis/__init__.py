"""What is wrong with a pair: the doctor behind `hf-dspark check`.

```python
from hf_dspark import load_default_pair
from hf_dspark.diagnosis import diagnose

target, draft, tokenizer = load_default_pair()
diagnosis = diagnose(target, draft, tokenizer)
print(diagnosis.verdict, *diagnosis.next_steps, sep="\\n")
```
"""

from .doctor import diagnose
from .findings import Diagnosis, Finding
from .pairing import check_configs

__all__ = ["Diagnosis", "Finding", "check_configs", "diagnose"]
