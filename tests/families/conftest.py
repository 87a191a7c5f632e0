"""Makes `targets`, `survey` and `write_targets`, which lie beside this file, importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
