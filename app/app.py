"""The demo as a Hugging Face Space: `hf-dspark demo` with the address that a Space expects.

    python app/app.py

The page itself is `hf_dspark.demo`. Flags of the command may be given here, or in the variable `DEMO_ARGUMENTS` of a
Space: `--target Qwen/Qwen3-8B --draft deepseek-ai/dspark_qwen3_8b_block7`.
"""

import os
import shlex
import sys

from hf_dspark.cli import main

if __name__ == "__main__":
    address = ["--server-name", os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1")]
    main(["demo", *address, *shlex.split(os.environ.get("DEMO_ARGUMENTS", "")), *sys.argv[1:]])
