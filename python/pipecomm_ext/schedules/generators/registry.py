"""`@generator` registers a schedule under its name; `get_plan` makes the plan of a name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from ..gc_pause import gc_paused
from ..plan import Plan
from ..plan_error import PlanError

Parameters = ParamSpec("Parameters")

GENERATORS: dict[str, Callable[..., Plan]] = {}
"""The functions that make plans, by name."""
ALIASES: dict[str, str] = {}  # alias -> name


def generator(*aliases: str) -> Callable[[Callable[Parameters, Plan]], Callable[Parameters, Plan]]:
    """Decorator of a function that makes a plan: registers it under its own name and under `aliases`.

    Names and aliases are in lower case with underscores, and unique.
    """

    def register(make: Callable[Parameters, Plan]) -> Callable[Parameters, Plan]:
        name = make.__name__
        for key in (name, *aliases):
            if key in GENERATORS or key in ALIASES:
                raise ValueError(f"there is already a schedule named {key!r}; choose another name")
        GENERATORS[name] = gc_paused()(make)
        ALIASES.update(dict.fromkeys(aliases, name))
        return GENERATORS[name]

    return register


def find_generator(name: str) -> Callable[..., Plan]:
    """The generator of a name or an alias, whatever its case, with "-" or "_". Raises as `get_plan` does."""
    if not isinstance(name, str):
        raise TypeError(f"expected the name of a schedule, got {name!r} of type {type(name).__name__}")
    key = name.lower().replace("-", "_")
    make = GENERATORS.get(ALIASES.get(key, key))
    if make is None:
        raise PlanError(f"unknown schedule {name!r}; expected one of {', '.join(sorted(GENERATORS))}")
    return make


def get_plan(name: str, *args: Any, **kwargs: Any) -> Plan:
    """The plan that the generator `name` makes from the other arguments: `get_plan("dualpipe", P=4, M=10)`.

    Case does not matter, nor does "-" in place of "_"; the names in `ALIASES`, such as "1f1b", are accepted.
    Raises PlanError for an unknown name, TypeError for arguments that the generator does not take.

    Example:
        ```python
        plan = get_plan("zb_v", P=4, M=8)
        print(plan.num_stages, plan.stages_of(0))  # 8 stages, of which rank 0 has the first and the last
        ```
    """
    make = find_generator(name)
    signature = inspect.signature(make)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{make.__name__}{signature}: {error}") from None
    return make(*args, **kwargs)
