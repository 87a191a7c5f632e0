"""Every difference between the supported transformers versions, with the version at which each can go."""

import transformers
from packaging.version import Version

SUPPORTED = "transformers>=5.18,<6"
VERSION = Version(transformers.__version__)

if not Version("5.18") <= VERSION < Version("6"):
    raise ImportError(
        f"hf_dspark needs {SUPPORTED}, found {transformers.__version__}. Run `pip install '{SUPPORTED}'`."
    )

# The cache keyword of forward, generate and the outputs. Remove at a minimum of 5.24.
CACHE_KEY = "cache" if VERSION >= Version("5.24") else "past_key_values"

# From 5.23 `output_hidden_states=[j, ...]` selects entries of `hidden_states`; before, a list meant layer numbers and
# had no entry for the embeddings, so all are taken. Remove at a minimum of 5.23.
SELECTS_HIDDEN_STATES = VERSION >= Version("5.23")

# Before 5.21 a prompt that goes by chunks begins anew behind the tokens that a cache holds. Remove at a minimum of
# 5.21.
CHUNKS_BEHIND_TOKENS = VERSION >= Version("5.21")
NO_CHUNKS = f"transformers {VERSION} goes by chunks into an empty cache only, so the rest of the prompt is one forward"


def hidden_states_request(target_layer_ids: list[int]) -> list[int] | bool:
    """Value of `output_hidden_states` for which a forward returns the taps; id i is `hidden_states[i + 1]`."""
    return [i + 1 for i in target_layer_ids] if SELECTS_HIDDEN_STATES else True
