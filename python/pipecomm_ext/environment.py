"""Every environment variable named PIPECOMM_*: grammar, default, meaning. Nothing else reads them.

Arguments come first: a variable sets a default, or what no argument sets. All are read together whenever a
communicator is made, so a wrong value is found whether or not it would have mattered. What both ends of a
message must have alike is compared between the ranks (`Variable.on_wire`).
"""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Grammar(Protocol):
    """What a value may look like: `text` completes "NAME must be ..."; `parse` gives None for all else."""

    @property
    def text(self) -> str: ...
    def parse(self, value: str) -> Any: ...


@dataclass(frozen=True)
class Number:
    """Decimal digits in a closed range."""

    low: int
    high: int
    unit: str = ""

    @property
    def text(self) -> str:
        return f"a number{f' of {self.unit}' if self.unit else ''} from {self.low} to {self.high}"

    def parse(self, value: str) -> int | None:
        is_number = re.fullmatch(r"[0-9]{1,12}", value) is not None
        return int(value) if is_number and self.low <= int(value) <= self.high else None


@dataclass(frozen=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"one of {', '.join(self.words)}"

    def parse(self, value: str) -> str | None:
        return value if value in self.words else None


@dataclass(frozen=True)
class Folder:
    """The path of a folder, which need not exist."""

    text: str = "the path of a folder"

    def parse(self, value: str) -> str | None:
        return value or None


@dataclass(frozen=True)
class Variable:
    """One variable that is read at run time.

    `default` is the value if it is not set; None: whatever `meaning` says. `on_wire`: the ranks of a
    communicator must have the same. `argument`: what it is the default of, where ranks compare that instead.
    """

    name: str
    grammar: Grammar
    default: Any
    meaning: str
    on_wire: bool
    argument: str | None = None


TRANSPORTS = ("auto", "c10d", "nccl", "shm")
CHECKS = ("auto", "full", "off")

VARIABLES: tuple[Variable, ...] = (
    Variable(
        "PIPECOMM_TRANSPORT",
        Choice(TRANSPORTS),
        "auto",
        'what `transport="auto"` takes',
        on_wire=True,
        argument="transport",
    ),
    Variable(
        "PIPECOMM_CHECK",
        Choice(CHECKS),
        "auto",
        'what `check="auto"` takes',
        on_wire=True,
        argument="check",
    ),
    Variable(
        "PIPECOMM_SHM_RING_BYTES",
        Number(64 << 10, 1 << 30, "bytes"),
        1 << 20,
        "size of a ring of `shm` (one direction, one channel, one pair)",
        on_wire=True,
    ),
    Variable(
        "PIPECOMM_NCCL_MIN_CTAS",
        Number(1, 64),
        None,
        "least thread blocks of one NCCL operation; else NCCL's choice",
        on_wire=True,
    ),
    Variable(
        "PIPECOMM_NCCL_MAX_CTAS",
        Number(1, 64),
        None,
        "most thread blocks of one NCCL operation; else NCCL's choice",
        on_wire=True,
    ),
    Variable(
        "PIPECOMM_NCCL_CHANNELS_PER_NET_PEER",
        Number(1, 64),
        None,
        "NCCL channels to a rank of another host; else NCCL's choice",
        on_wire=True,
    ),
    Variable(
        "PIPECOMM_NCCL_TRAFFIC_CLASS",
        Number(0, 255),
        None,
        "network traffic class; else NCCL's choice",
        on_wire=True,
    ),
    Variable(
        "PIPECOMM_NCCL_MAX_OPS_PER_GROUP",
        Number(2, 1024),
        64,
        "sends and receives in one NCCL group",
        on_wire=True,
    ),
    Variable(
        "PIPECOMM_PACK_SMS",
        Number(1, 1024),
        None,
        "multiprocessors that pack and unpack kernels may occupy; else all",
        on_wire=False,
    ),
    Variable(
        "PIPECOMM_FLIGHT_DIR",
        Folder(),
        None,
        "where flight records are written on an error or on SIGUSR1; else nowhere",
        on_wire=False,
    ),
)

# Read by setup.py and CMake.
BUILD_VARIABLES = ("PIPECOMM_CUDA", "PIPECOMM_FAULTS", "PIPECOMM_NCCL_INCLUDE", "PIPECOMM_NVCC")
# Of the test suite and the soak runs.
TEST_PREFIX = "PIPECOMM_TEST_"

_by_name = {variable.name: variable for variable in VARIABLES}
_warned_of: set[str] = set()


def read(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The value of each variable, set or default, by name. ValueError for a value outside its grammar."""
    environ = os.environ if environ is None else environ
    return {name: value_of(variable, environ.get(name)) for name, variable in _by_name.items()}


def value_of(variable: Variable, text: str | None) -> Any:
    """The value that `text` gives to a variable, None being not set. ValueError as in `read`."""
    if text is None:
        return variable.default
    value = variable.grammar.parse(text)
    if value is None:
        raise ValueError(f"{variable.name} must be {variable.grammar.text}, not {text!r}")
    return value


def on_wire(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `settings` that must be equal on all ranks, as far as no argument stands for it."""
    return {
        variable.name: settings[variable.name]
        for variable in VARIABLES
        if variable.on_wire and variable.argument is None
    }


def unknown(environ: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Names that begin with PIPECOMM_ and mean nothing, each with the known name that is most like it."""
    environ = os.environ if environ is None else environ
    known = [*_by_name, *BUILD_VARIABLES]
    names = sorted(
        name
        for name in environ
        if name.startswith("PIPECOMM_") and name not in known and not name.startswith(TEST_PREFIX)
    )
    return {name: next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.8)), None) for name in names}


def warn_of_unknown(stacklevel: int = 2) -> None:
    """A RuntimeWarning for each unknown name, once in the life of the process."""
    for name, similar in unknown().items():
        if name in _warned_of:
            continue
        _warned_of.add(name)
        hint = f"did you mean {similar}?" if similar else "`python -m pipecomm_ext info` lists what there is"
        warnings.warn(
            f"the environment variable {name} means nothing to pipecomm_ext; {hint}",
            RuntimeWarning,
            stacklevel=stacklevel + 1,
        )


def table() -> str:
    """The rows of the documentation's table, in Markdown."""
    rows = ["| Variable | Value | Default | On all ranks | Meaning |", "|---|---|---|---|---|"]
    for variable in VARIABLES:
        default = "" if variable.default is None else f"`{variable.default}`"
        alike = "the same" if variable.on_wire else ""
        rows.append(
            f"| `{variable.name}` | {variable.grammar.text} | {default} | {alike} | {variable.meaning} |"
        )
    return "\n".join(rows)
