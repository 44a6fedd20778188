"""`python -m pipecomm_ext draw` and `check`: schedules by name or from a CSV file, on the command line.

Each `add_*_parser` adds one sub-command whose parsed arguments carry `run`: a function of the arguments that
returns the exit status.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
from collections.abc import Callable

from .check import check
from .costs import Costs
from .drawing.draw import draw
from .generators.registry import ALIASES, GENERATORS, find_generator, get_plan
from .plan import Plan
from .simulate import simulate

# The parameters of generators, and the options that give them.
_OPTIONS = {"P": "--ranks", "M": "--microbatches", "V": "--virtual-stages", "group_size": "--group-size"}


def add_draw_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "draw",
        help="draw the simulated timeline of a schedule",
        description="Draw the simulated timeline of a schedule as .svg, .html (hover shows details) or .png.",
    )
    _add_plan_arguments(parser)
    parser.add_argument("-o", "--output", required=True, metavar="PATH", help="ends with .svg, .html or .png")
    parser.add_argument("--width", type=int, default=1200, metavar="PIXELS", help="default: 1200")
    _add_cost_arguments(parser)
    parser.set_defaults(run=functools.partial(_reporting_errors, "draw", _draw))
    return parser


def add_check_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "check",
        help="prove that a schedule is complete and cannot deadlock",
        description="Prove that a schedule is complete, that its messages match in order and that it cannot "
        "deadlock; then print its simulated numbers. Exit status 1 and the reason if it is refused.",
    )
    _add_plan_arguments(parser)
    parser.add_argument("--max-activations", type=int, metavar="N", help="refuse a higher peak on any rank")
    parser.add_argument("--print", action="store_true", dest="print_rows", help="print the plan's rows too")
    _add_cost_arguments(parser)
    parser.set_defaults(run=functools.partial(_reporting_errors, "check", _check))
    return parser


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(sorted({*GENERATORS, *ALIASES}))
    parser.add_argument("plan", metavar="NAME|PLANFILE", help=f"a file ending with .csv, or one of {names}")
    parser.add_argument("--ranks", type=int, metavar="P", help="number of ranks")
    parser.add_argument("--microbatches", type=int, metavar="M", help="number of micro-batches")
    parser.add_argument("--virtual-stages", type=int, metavar="V", help="chunks per rank (interleaved_1f1b)")
    parser.add_argument("--group-size", type=int, metavar="N", help="micro-batches per turn of a chunk")


def _add_cost_arguments(parser: argparse.ArgumentParser) -> None:
    costs = parser.add_argument_group("costs", "durations in any unit, for all stages")
    costs.add_argument("--F", type=float, default=1, help="forward (default: 1)")
    costs.add_argument("--I", type=float, default=1, help="backward for input (default: 1)")
    costs.add_argument("--W", type=float, default=1, help="backward for weight (default: 1)")
    costs.add_argument("--FB", type=float, help="fused forward and backward (default: F+I+W)")
    costs.add_argument("--comm", type=float, default=0, help="a message (default: 0)")


def plan_from_arguments(arguments: argparse.Namespace) -> Plan:
    """The plan that the command line names. Raises ValueError, TypeError or OSError."""
    values = {name: getattr(arguments, option[2:].replace("-", "_")) for name, option in _OPTIONS.items()}
    given = {name: value for name, value in values.items() if value is not None}
    if arguments.plan.lower().endswith(".csv"):
        if given:
            raise ValueError(f"{arguments.plan} holds a whole plan; give no sizes with it")
        return Plan.from_csv(arguments.plan)
    taken = inspect.signature(find_generator(arguments.plan)).parameters
    needed = [name for name, parameter in taken.items() if parameter.default is parameter.empty]
    if missing := [_OPTIONS[name] for name in needed if name not in given]:
        raise ValueError(f"the schedule {arguments.plan!r} needs {' and '.join(missing)}")
    if unknown := [_OPTIONS[name] for name in given if name not in taken]:
        raise ValueError(f"the schedule {arguments.plan!r} does not take {' or '.join(unknown)}")
    return get_plan(arguments.plan, **given)


def costs_from_arguments(arguments: argparse.Namespace) -> Costs:
    return Costs(F=arguments.F, I=arguments.I, W=arguments.W, FB=arguments.FB, comm=arguments.comm)


def _draw(arguments: argparse.Namespace) -> None:
    plan = plan_from_arguments(arguments)
    draw(plan, arguments.output, costs=costs_from_arguments(arguments), width=arguments.width)
    print(f"{arguments.output}: {plan.name}, {plan.P} ranks, {plan.M} micro-batches")


def _check(arguments: argparse.Namespace) -> None:
    plan = plan_from_arguments(arguments)
    if arguments.print_rows:
        print(plan)
    check(plan, max_activations=arguments.max_activations)
    print(simulate(plan, costs_from_arguments(arguments)))
    print("check passed")


def _reporting_errors(
    command: str, action: Callable[[argparse.Namespace], None], arguments: argparse.Namespace
) -> int:
    try:
        action(arguments)
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"pipecomm_ext {command}: {error}", file=sys.stderr)
        return 1
    return 0
