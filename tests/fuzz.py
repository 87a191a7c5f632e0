"""Random cases without end: `make fuzz N=2000`, or one of them again.

    python tests/fuzz.py --cases 2000                       # seeds from a random start, which is printed
    python tests/fuzz.py --kind batch --seed 123 --cases 1  # what a failure says to run

Kinds: `plain` (one sequence), `batch` (the ragged path) and `session` (turns over one history). Every text is compared
with plain generate(). Exit code 1 if a case fails.
"""

import argparse
import random
import sys
import traceback
import warnings

import test_fuzz
import test_fuzz_batch
import test_fuzz_sessions
import torch
from tqdm import tqdm
from transformers.utils import logging

KINDS = {"plain": test_fuzz.run_case, "batch": test_fuzz_batch.run_case, "session": test_fuzz_sessions.run_case}
MOST_SHOWN = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, help="of the first case; the others follow")
    parser.add_argument("--kind", choices=KINDS, help="by default all in turn")
    arguments = parser.parse_args()
    start = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(f"{arguments.cases} cases from seed {start}", flush=True)
    failed = []
    for i in tqdm(range(arguments.cases), mininterval=5):
        kind, seed = arguments.kind or list(KINDS)[i % len(KINDS)], start + i
        note: dict = {}
        try:
            KINDS[kind](seed, note)
        except Exception:
            failed.append((kind, seed))
            if len(failed) <= MOST_SHOWN:
                print(f"\n{kind} case {seed} failed: {note}\n{traceback.format_exc(limit=-4)}")
                print(f"Again: python tests/fuzz.py --kind {kind} --seed {seed} --cases 1", flush=True)
    print(f"{len(failed)} of {arguments.cases} cases failed" + (f": {failed}" if failed else ""))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
