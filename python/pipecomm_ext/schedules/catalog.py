"""Schedules by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from .actions import PlanError
from .bidirectional import dualpipe, dualpipev
from .classic import gpipe, interleaved_1f1b, one_f_one_b, u_shaped
from .plan import Plan
from .zero_bubble import zb_h1, zb_h2, zb_v

GENERATORS: dict[str, Callable[..., Plan]] = {
    generator.__name__: generator
    for generator in (gpipe, one_f_one_b, interleaved_1f1b, zb_h1, zb_h2, zb_v, dualpipe, dualpipev, u_shaped)
}
ALIASES = {
    "1f1b": "one_f_one_b",
    "interleaved": "interleaved_1f1b",
    "zbh1": "zb_h1",
    "zbh2": "zb_h2",
    "zbv": "zb_v",
}


def get_plan(name: str, *args, **kwargs) -> Plan:
    """The plan that the generator `name` makes from the other arguments, e.g. `get_plan("dualpipe", P=4,
    M=10)`.

    Case and "-" for "_" do not matter; "1f1b", "interleaved", "zbh1", "zbh2" and "zbv" are also understood.
    Raises PlanError for an unknown name, TypeError for arguments that the generator does not take.
    """
    if not isinstance(name, str):
        raise TypeError(f"expected the name of a schedule, got {name!r} of type {type(name).__name__}")
    key = name.lower().replace("-", "_")
    generator = GENERATORS.get(ALIASES.get(key, key))
    if generator is None:
        raise PlanError(f"unknown schedule {name!r}; expected one of {', '.join(GENERATORS)}")
    signature = inspect.signature(generator)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{generator.__name__}{signature}: {error}") from None
    return generator(*args, **kwargs)
