"""Environment variables named PIPECOMM_*: grammar, default, meaning. Nothing else reads them.

Arguments come first: a variable is the default of an argument, or sets something that no argument sets. All
are read together whenever a communicator is made, so a wrong value is found whether or not it would have
mattered. Values that both ends of a message must share are compared between the ranks (`Variable.on_wire`).
"""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
    former: Mapping[str, str] = field(default_factory=dict)  # names that are still accepted -> today's

    @property
    def text(self) -> str:
        return f"one of {', '.join(self.words)}"

    def parse(self, value: str) -> str | None:
        value = self.former.get(value, value)
        return value if value in self.words else None


# Relative paths mean the same after a change of the working directory.
try:
    _START_FOLDER = os.getcwd()
except OSError:  # it has been deleted
    _START_FOLDER = ""


@dataclass(frozen=True)
class Folder:
    """The path of a folder, which need not exist."""

    text: str = "the path of a folder"

    def parse(self, value: str) -> str | None:
        return os.path.join(_START_FOLDER, value) if value else None


@dataclass(frozen=True)
class Secret:
    """Any text; it is never shown, see `secret`."""

    text: str = "a text that is not empty"

    def parse(self, value: str) -> str | None:
        return HIDDEN if value else None


HIDDEN = "(hidden)"


@dataclass(frozen=True)
class Variable:
    """One variable that is read at run time.

    Its grammar's `text` completes "NAME must be ..."; `parse` returns None for a wrong value. `default` is
    the value if it is not set, None if `meaning` says what happens then. `on_wire`: all ranks of a
    communicator must have the same value. `argument` names the argument whose default it is; the ranks then
    compare that argument instead.
    """

    name: str
    grammar: Number | Choice | Folder | Secret
    meaning: str
    default: Any = None
    on_wire: bool = True
    argument: str | None = None


CHECKS = ("auto", "full", "off")

# By name; each transport declares those that concern it alone.
VARIABLES: list[Variable] = []


def declare(*variables: Variable) -> None:
    """Adds variables to the table; each is declared once."""
    VARIABLES.extend(variables)
    VARIABLES.sort(key=lambda variable: variable.name)


declare(
    Variable("PIPECOMM_CHECK", Choice(CHECKS), 'what `check="auto"` takes', "auto", argument="check"),
    Variable(
        "PIPECOMM_FLIGHT_DIR",
        Folder(),
        "where flight records are written on an error or on SIGUSR1; else nowhere",
        on_wire=False,
    ),
)

# Read by setup.py and CMake.
BUILD_VARIABLES = ("PIPECOMM_CUDA", "PIPECOMM_FAULTS", "PIPECOMM_LINEINFO")
# Read by the test suite and the soak runs.
TEST_PREFIX = "PIPECOMM_TEST_"

_warned_of: set[str] = set()


def read(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Returns the value of each variable, set or default, by name. ValueError for one outside its grammar."""
    environ = os.environ if environ is None else environ
    return {variable.name: value_of(variable, environ.get(variable.name)) for variable in VARIABLES}


def value_of(variable: Variable, text: str | None) -> Any:
    """The value of a variable that is set to `text` (None: not set). ValueError as in `read`."""
    if text is None:
        return variable.default
    value = variable.grammar.parse(text)
    if value is None:
        raise ValueError(f"{variable.name} must be {variable.grammar.text}, not {text!r}")
    return value


def secret(variable: Variable) -> bytes:
    """Returns the value of a variable whose grammar is `Secret`; empty if it is not set."""
    return os.fsencode(os.environ.get(variable.name, ""))


def on_wire(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `settings` that must be equal on all ranks and are not the default of an argument."""
    names = [variable.name for variable in VARIABLES if variable.on_wire and variable.argument is None]
    return {name: settings[name] for name in names}


def unknown(environ: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Returns unknown names that begin with PIPECOMM_, each with the most similar known name."""
    environ = os.environ if environ is None else environ
    known = [*(variable.name for variable in VARIABLES), *BUILD_VARIABLES]
    ours = sorted(name for name in environ if name.startswith("PIPECOMM_"))
    names = [name for name in ours if name not in known and not name.startswith(TEST_PREFIX)]
    return {name: next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.8)), None) for name in names}


def warn_of_unknown(stacklevel: int = 2) -> None:
    """Warns of each unknown name, once per process (RuntimeWarning)."""
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
