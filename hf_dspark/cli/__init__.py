"""The command `hf-dspark`: one thin module per verb, flags are the Python keyword names.

Exit codes: 0 success, 1 a check or a download failed, 2 wrong usage.
"""

import sys

import typer

from ..default_pair import SetupError
from . import (
    bench,
    calibrate,
    card,
    check,
    console,
    demo,
    eval,
    export,
    generate,
    inspect,
    profile,
    setup_demo,
    synthesize,
    train,
)

app = typer.Typer(
    name="hf-dspark",
    help="Exact speculative decoding with DSpark drafts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("setup-demo")(setup_demo.setup_demo)
app.command("generate")(generate.generate)
app.command("demo")(demo.demo)
app.command("inspect")(inspect.inspect)
app.command("check")(check.check)
app.command("synthesize")(synthesize.synthesize)
app.command("train")(train.train)
app.command("eval")(eval.eval)
app.command("bench")(bench.bench)
app.command("calibrate")(calibrate.calibrate)
app.command("profile")(profile.profile)
app.command("card")(card.card)
app.command("export")(export.export)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a user's mistake is one sentence on stderr instead of a traceback."""
    try:
        app(args=arguments, prog_name="hf-dspark")
    except (ValueError, OSError) as error:
        console.error(error)
        sys.exit(2)
    except SetupError as error:
        console.error(error)
        sys.exit(1)
