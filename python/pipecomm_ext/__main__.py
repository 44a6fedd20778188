"""Command line: `python -m pipecomm_ext info | draw | check | doctor`."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence

from . import __version__


def run_info(args: argparse.Namespace) -> int:
    from .diagnostics.info import format_info, info

    facts = info()
    print(json.dumps(facts, indent=2) if args.json else format_info(facts))
    return 0


def run_doctor(args: argparse.Namespace) -> int:
    if args.flight is not None:
        from .diagnostics.flight_report import report

        return report(args.flight)

    from .diagnostics.doctor import diagnose, run_rank

    if args.rank is not None:
        with contextlib.redirect_stdout(sys.__stdout__):  # at once: a rank that hangs is killed
            return run_rank(args.rank, args.store, args.deadline)
    return diagnose(args.deadline)


def make_parser() -> argparse.ArgumentParser:
    from .schedules.cli import add_check_parser, add_draw_parser

    parser = argparse.ArgumentParser(prog="python -m pipecomm_ext", description=__doc__)
    parser.add_argument("--version", action="version", version=f"pipecomm_ext {__version__}")
    commands = parser.add_subparsers(dest="command")

    info = commands.add_parser(
        "info", help="what was built, what is usable here, which transport is chosen and why"
    )
    info.add_argument("--json", action="store_true", help="the same as JSON")
    info.set_defaults(run=run_info)

    add_draw_parser(commands)
    add_check_parser(commands)

    doctor = commands.add_parser(
        "doctor",
        help="self-test: two ranks on this machine exchange and compare data; or reads flight records",
    )
    doctor.add_argument(
        "--flight",
        metavar="DIR",
        help="no self-test: say from the flight records of all ranks in DIR who waited for whom, and why; "
        "status 1 if something is wrong, 2 if there is nothing to read",
    )
    doctor.add_argument(
        "--deadline", type=float, default=60.0, metavar="SECONDS", help="give up after this time"
    )
    # Set by doctor for the ranks that it starts.
    doctor.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    doctor.add_argument("--store", help=argparse.SUPPRESS)
    doctor.set_defaults(run=run_doctor)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            return args.run(args)
    finally:
        _show(output.getvalue())


def _show(text: str) -> None:
    """Prints the output of a command after its end, so that a reader who stops early changes no status."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
