"""Wrong arguments: every mistake of a kind, for every parameter of that kind, of every public function.

A `Target` is a function with good arguments and the kind of each; `MISTAKES` holds, for each kind, wrong
values and what the error must state. The matrix is their product. One rank makes the wrong call. If it is a
collective, the others make the right one, and learn of the mistake.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from operations import NUM_CHANNELS

from pipecomm_ext import Communicator, schedules

VALUE = (ValueError,)
TYPE = (TypeError,)
EITHER = (ValueError, TypeError)
RANGE = (ValueError, IndexError)
PLAN = (schedules.PlanError,)
HUGE = 2**63 - 1


class Mistake(NamedTuple):
    name: str
    value: Callable[[Any], Any]  # from the good value
    raises: tuple[type, ...]
    says: str  # a pattern in the error text


NO_INT = "must be an int, (not|got .* of type) "


def ints(*others: Mistake) -> list[Mistake]:
    """Mistakes for arguments that must be whole numbers."""
    return [
        Mistake("a float", lambda good: 1.5, TYPE, NO_INT + "float"),
        Mistake("a string", lambda good: "1", TYPE, NO_INT + "str"),
        Mistake("a list", lambda good: [1], TYPE, NO_INT + "list"),
        *others,
    ]


NONE = Mistake("None", lambda good: None, TYPE, "None")
NOT_GIVEN = Mistake("None", lambda good: None, VALUE, "must name a rank")

TENSORS = [
    NONE,
    Mistake("a list", lambda good: [1.0, 2.0], TYPE, "list"),
    Mistake("an ndarray", lambda good: np.ones(3), TYPE, "ndarray"),
    Mistake("a string", lambda good: "tensor", TYPE, "str"),
    Mistake("sparse", lambda good: good.to_sparse(), VALUE, "(?i)sparse"),
    Mistake("sparse csr", lambda good: good.to_sparse_csr(), VALUE, "(?i)sparse"),
    Mistake("mkldnn", lambda good: good.to_mkldnn(), VALUE, "(?i)mkldnn"),
    Mistake(
        "quantized",
        lambda good: torch.quantize_per_tensor(good, 1.0, 0, torch.quint8),
        VALUE,
        "(?i)quint8|quantized",
    ),
    Mistake(
        "nested",
        lambda good: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        VALUE,
        "(?i)nested",
    ),
    Mistake("meta", lambda good: torch.empty_like(good, device="meta"), VALUE, "meta"),
]
# Mistakes of tensors that a function writes to.
TARGETS_ONLY = [
    Mistake("expanded", lambda good: good[:1].expand_as(good), VALUE, "overlap|expand|share memory"),
    Mistake(
        "overlapping strides",
        lambda good: torch.ones(good.numel() + 8).as_strided(good.shape, (1,) * good.dim()),
        VALUE,
        "overlap|expand|share memory",
    ),
]
LEAF = [
    Mistake("a leaf that requires grad", lambda good: good.clone().requires_grad_(), VALUE, "requires.grad"),
]


def in_list(mistakes: list[Mistake]) -> list[Mistake]:
    """The last tensor of a list is wrong, or the list itself."""
    return [
        Mistake("None instead of a list", lambda good: None, TYPE, "None"),
        Mistake("a tensor instead of a list", lambda good: good[0], EITHER, "Tensor|shape"),
        Mistake("a list that is too short", lambda good: good[:-1], VALUE, r"\b[12]\b"),
        Mistake("a list that is too long", lambda good: [*good, good[0]], VALUE, r"\b[234]\b"),
        *(
            mistake._replace(
                name=f"{mistake.name} in the list",
                value=lambda good, mistake=mistake: [*good[:-1], mistake.value(good[-1])],
            )
            for mistake in mistakes
        ),
    ]


NO_LIST = r"must be a list of (one length per rank|ints), not "
SIZES = [
    Mistake(
        "a list that is too long", lambda good: [*good, 0], VALUE, r"each of the [23] ranks, got [34]: \["
    ),
    Mistake(
        "a list that is too short", lambda good: good[:-1], VALUE, r"each of the [23] ranks, got [12]: \["
    ),
    Mistake(
        "another sum", lambda good: [good[0] + 1, *good[1:]], VALUE, r"is \d, but the tensor has length \d"
    ),
    Mistake(
        "a negative size",
        lambda good: [good[0] + good[1] + 1, -1, *good[2:]],
        VALUE,
        r"must not be negative, got \[\d, -1",
    ),
    Mistake("a float", lambda good: [float(good[0]), *good[1:]], TYPE, r"\[0\] must be an int, not float"),
    Mistake("an int instead of a list", lambda good: 3, EITHER, NO_LIST + "int"),
    Mistake("a string", lambda good: "1, 2", EITHER, NO_LIST + "str"),
    Mistake("too large a size", lambda good: [HUGE, *good[1:]], VALUE, r"\d"),
    Mistake("a size beyond 64 bits", lambda good: [2**70, *good[1:]], (*EITHER, OverflowError), ""),
]
NO_LENGTHS = r"sequence lengths must be a list or a 1-d tensor, not "
LENGTHS = [
    Mistake("none at all", lambda good: [], VALUE, "there must be at least one sequence length"),
    Mistake(
        "another sum",
        lambda good: [good[0] + 1, *good[1:]],
        VALUE,
        r"is 9, but the tensor has length 8|means a length of \d along dim 0, not \d",
    ),
    Mistake("a negative length", lambda good: [sum(good) + 1, -1], VALUE, "cannot divide a length of -1"),
    Mistake("a float", lambda good: [float(good[0]), *good[1:]], TYPE, "length must be an int, not float"),
    Mistake("floats", lambda good: torch.tensor(good).float(), TYPE, "length must be an int, not float"),
    Mistake("an int", lambda good: 6, VALUE, NO_LENGTHS + "int"),
    Mistake("a string", lambda good: "12", VALUE, NO_LENGTHS + "str"),
]

PEERS = ints(
    Mistake("True", lambda good: True, TYPE, "bool"),
    Mistake("the number of ranks", lambda good: 2, VALUE, r"\b2\b.*0\.\.1"),
    Mistake("-1", lambda good: -1, VALUE, r"-1\b.*0\.\.1"),
    Mistake("beyond 32 bits", lambda good: 2**40, VALUE, str(2**40)),
)
MESSAGE_PEERS = [*PEERS, Mistake("oneself", lambda good: 0, VALUE, "itself|oneself|own|self")]

MISTAKES: dict[str, list[Mistake]] = {
    "tensor": TENSORS,
    # A list of numbers is a list whose elements are not tensors.
    "tensor or list": [
        mistake._replace(says="float") if mistake.name == "a list" else mistake for mistake in TENSORS
    ],
    "target": TENSORS + TARGETS_ONLY + LEAF,
    "facade target": TENSORS + TARGETS_ONLY,  # as in torch, buffers may require grad
    "tensors": in_list(TENSORS),
    "targets": in_list(TENSORS + TARGETS_ONLY + LEAF),
    "facade targets": in_list(TENSORS + TARGETS_ONLY),
    "peer": [NONE, *PEERS],
    "message peer": [NONE, *MESSAGE_PEERS],
    "facade peer": [NOT_GIVEN, *PEERS],
    "facade message peer": [NOT_GIVEN, *MESSAGE_PEERS],
    "channel": ints(
        NONE,
        Mistake("the number of channels", lambda good: NUM_CHANNELS, VALUE, f"{NUM_CHANNELS}"),
        Mistake("-1", lambda good: -1, VALUE, "-1"),
        Mistake("beyond 32 bits", lambda good: 2**40, VALUE, str(2**40)),
    ),
    "dim": ints(
        NONE,
        Mistake("too large", lambda good: 7, RANGE, r"dim 7 is out of range for a tensor of \d dims"),
        Mistake("too far back", lambda good: -8, RANGE, r"dim -8 is out of range for a tensor of \d dims"),
        Mistake("beyond 64 bits", lambda good: 2**70, (*RANGE, OverflowError), ""),
    ),
    "length": ints(
        Mistake("another length", lambda good: good + 1, VALUE, r"\d"),
        Mistake("negative", lambda good: -4, VALUE, "-"),
        Mistake("too large", lambda good: HUGE, VALUE, r"\d"),
    ),
    "sizes": SIZES,
    "lists of sizes": [
        Mistake("an int", lambda good: 3, EITHER, "3|int"),
        Mistake("one list too few", lambda good: good[:-1], VALUE, r"\b1\b"),
        *(
            mistake._replace(value=lambda good, mistake=mistake: [good[0], mistake.value(good[1])])
            for mistake in SIZES
        ),
    ],
    "rows": [
        Mistake("None", lambda good: None, VALUE, r"must be a tensor \[ranks, sequences\], not NoneType"),
        Mistake("a row too few", lambda good: good[:-1], VALUE, "one entry for each of the 2 ranks, got 1"),
        Mistake(
            "another sum", lambda good: good + 1, VALUE, r"of the split sizes \[4, 2\] is 6, but .* length 4"
        ),
        Mistake(
            "negative", lambda good: good + torch.tensor([2, -2]), VALUE, r"not be negative, got \[\(5, -1\)"
        ),
        Mistake("floats", lambda good: good.float(), TYPE, r"sizes\[0\]\[0\] must be an int, not float"),
        Mistake(
            "a list of ints", lambda good: [1, 2], VALUE, r"sizes\[0\] must be a list of one .*, not int"
        ),
    ],
    "sequence lengths": LENGTHS,
    "grad_scale": [
        Mistake("another word", lambda good: "Up", VALUE, 'must be "up", "down" or None, not .Up'),
        Mistake("a number", lambda good: 2.0, VALUE, 'must be "up", "down" or None, not 2.0'),
        Mistake("True", lambda good: True, VALUE, 'must be "up", "down" or None, not True'),
    ],
    "timeout": [
        Mistake("0", lambda good: 0, VALUE, "timeout.*0"),
        Mistake("negative", lambda good: -1.0, VALUE, "timeout.*-1"),
        Mistake("NaN", lambda good: math.nan, VALUE, "timeout.*nan"),
        Mistake("1e300", lambda good: 1e300, VALUE, r"timeout.*1e\+?300"),
        Mistake("no time", lambda good: timedelta(0), VALUE, "timeout.*0"),
        Mistake("a string", lambda good: "5", TYPE, "timeout.*str"),
        Mistake("True", lambda good: True, TYPE, "timeout.*bool"),
    ],
    "batch": [
        NONE,
        Mistake("an element instead of a list", lambda good: good[0], TYPE, ""),
        Mistake("a tuple as an element", lambda good: [*good, ("send", torch.ones(2), 1)], TYPE, "tuple"),
        Mistake("a tensor as an element", lambda good: [*good, torch.ones(2)], TYPE, "Tensor"),
        Mistake("None as an element", lambda good: [*good, None], TYPE, "None"),
    ],
    "shape": [
        NONE,
        Mistake("a string", lambda good: "2, 3", TYPE, "str"),
        Mistake("floats", lambda good: [2.0, 3.0], TYPE, "float|2.0"),
        Mistake("negative", lambda good: [-1, 3], VALUE, "-1|>= 0"),
    ],
    "dtype": [
        NONE,
        Mistake("a string", lambda good: "float32", TYPE, "str"),
        Mistake("a type of Python", lambda good: float, TYPE, "type|float"),
    ],
    "group": [
        Mistake("a string", lambda good: "world", EITHER, "str"),
        Mistake("a number", lambda good: 3, EITHER, "int"),
    ],
    "count": ints(
        NONE,
        Mistake("zero", lambda good: 0, VALUE, r"\b0\b"),
        Mistake("negative", lambda good: -2, VALUE, "-[24]"),
    ),
    "pipeline shape": [
        Mistake("a string", lambda good: "2, 3", TYPE, "str"),
        Mistake("an int", lambda good: 3, TYPE, "int"),
        Mistake("floats", lambda good: [2.0, 3.0], TYPE, "2.0|float"),
        Mistake("negative", lambda good: [-1, 3], VALUE, "-1"),
        Mistake("None", lambda good: None, (RuntimeError,), "shape must be given"),
    ],
    "pipeline tensor": [mistake for mistake in TENSORS if mistake.name not in ("None", "a list")]
    + [
        Mistake("a list with a string", lambda good: [good, "x"], TYPE, "str"),
    ],
    "plan count": ints(
        NONE,
        Mistake("zero", lambda good: 0, PLAN, r"\b0\b"),
        Mistake("negative", lambda good: -2, PLAN, "-2"),
    ),
}


class Argument(NamedTuple):
    good: Any  # a value, or a function that makes one of the communicator
    kind: str | None = None  # of MISTAKES
    more: tuple[Mistake, ...] = ()


class Target(NamedTuple):
    name: str
    # "collective": the others make the good call. "message": they do nothing. "local": no other rank matters.
    # "relay": the other stage makes the opposite call.
    form: str
    function: Callable[..., Any]  # of the communicator and the arguments
    arguments: dict[str, Argument]

    def good(self, comm: Communicator) -> dict[str, Any]:
        """New good arguments for a call."""
        return {
            name: good(comm) if callable(good) else copy.deepcopy(good)
            for name, (good, *_) in self.arguments.items()
        }


TARGETS: dict[str, Target] = {}


def target(name: str, form: str, function: Callable[..., Any], /, **arguments: tuple) -> None:
    """Adds a function to the table. Each argument has its good value, its kind and further mistakes."""
    arguments = {key: Argument(*value[:2], value[2:]) for key, value in arguments.items()}
    TARGETS[name] = Target(name, form, function, arguments)


def matrix(chosen: Target) -> Iterator[tuple[str, Mistake]]:
    """Pairs of an argument and what is wrong with it."""
    for name, argument in chosen.arguments.items():
        for mistake in (*MISTAKES.get(argument.kind, ()), *argument.more):
            yield name, mistake


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape or (4, 2))
