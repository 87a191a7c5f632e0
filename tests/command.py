"""The command `hf-dspark`, called in-process."""

import pytest

from hf_dspark.cli import main


def run(arguments, capsys):
    """Exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    captured = capsys.readouterr()
    return end.value.code, captured.out, captured.err


def refused(arguments, capsys) -> str:
    """The one sentence of a call that is wrong usage."""
    code, out, err = run(arguments, capsys)
    lines = [line for line in err.splitlines() if line.startswith("Error: ")]
    assert code == 2 and not out and len(lines) == 1 and "Traceback" not in err
    return lines[0]
