"""The words of a schedule: actions, fused slots, transfers and groups, each with one strict text form.

    F3.7              one action: kind, stage, micro-batch; F is forward, B backward, I and W its parts for
                      the input and for the weights
    (F0.3&B7.1)       a fused slot: the forward of one micro-batch and the backward of another
    [A0.3>1 G5.2<3]   a group, issued as one batch: send the output of F0.3 to rank 1, receive the gradient of
                      B5.2 from rank 3

Everything here is a tuple: immutable, hashable, comparable, and equal to the plain tuple of its fields.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, final

from .plan_error import PlanError

KINDS = ("F", "B", "I", "W")
ACT = "ACT"
"""What a transfer moves: the output of a forward."""
GRAD = "GRAD"
"""What a transfer moves: the gradient of an input."""
SEND = "SEND"
"""The kind of a transfer."""
RECV = "RECV"
"""The kind of a transfer."""
CHANNEL_OF = {ACT: 0, GRAD: 1}


@final
class Action(NamedTuple):
    """One unit of work, with the text `F3.7`.

    Attributes:
        kind: "F" forward, "B" backward, "I" its part for the input, "W" its part for the weights.
        stage: number of the stage.
        micro: number of the micro-batch within its chain, from 0.
    """

    kind: str
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro}"


@final
class Fused(NamedTuple):
    """One compute slot that runs the forward of one micro-batch and the full backward of another; its text is
    `(F0.3&B7.1)`.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward}&{self.backward})"


class Transfer(NamedTuple):
    """One end of a message: `kind` is SEND or RECV, `what` is the ACT (output) or GRAD (gradient of the
    input) that `stage` produced, `peer` the rank at the other end."""

    kind: str
    what: str
    stage: int
    micro: int
    peer: int

    @property
    def channel(self) -> int:
        """Activations travel on channel 0, gradients on channel 1."""
        return CHANNEL_OF[self.what]

    def __str__(self) -> str:
        return f"{self.what[0]}{self.stage}.{self.micro}{'>' if self.kind == SEND else '<'}{self.peer}"


@final
class Group(NamedTuple):
    """Sends and receives (`Transfer`) that a rank issues as one batch; its text is `[A0.3>1 G5.2<3]`."""

    ops: tuple[Transfer, ...]

    def __str__(self) -> str:
        return f"[{' '.join(map(str, self.ops))}]"


Compute = Action | Fused
Item = Action | Fused | Group

_ACTION = re.compile(r"([FBIW])(\d+)\.(\d+)")
_FUSED = re.compile(r"\(F(\d+)\.(\d+)&B(\d+)\.(\d+)\)")
_TRANSFER = re.compile(r"([AG])(\d+)\.(\d+)([<>])(\d+)")
_TOKEN = re.compile(r"\[[^\]]*\]|\S+")


def actions_in(item: Compute) -> tuple[Action, ...]:
    """The one or two actions of a compute slot."""
    return (item.forward, item.backward) if type(item) is Fused else (item,)


def parse_compute(text: str) -> Compute:
    """`F3.7` or `(F0.3&B7.1)`; the whole text must match. Raises PlanError."""
    if match := _ACTION.fullmatch(text):
        return Action(match[1], int(match[2]), int(match[3]))
    if match := _FUSED.fullmatch(text):
        stage0, micro0, stage1, micro1 = map(int, match.groups())
        return Fused(Action("F", stage0, micro0), Action("B", stage1, micro1))
    raise PlanError(
        f"{text!r} is not an action; expected a text like 'F3.7' (kind F, B, I or W) or '(F0.3&B7.1)'"
    )


def parse_transfer(text: str) -> Transfer:
    """`A0.3>1` (send) or `G5.2<3` (receive); the whole text must match. Raises PlanError."""
    match = _TRANSFER.fullmatch(text)
    if not match:
        raise PlanError(
            f"{text!r} is not a transfer; expected a text like 'A0.3>1' (send) or 'G5.2<3' (receive)"
        )
    letter, stage, micro, arrow, peer = match.groups()
    return Transfer(
        SEND if arrow == ">" else RECV, ACT if letter == "A" else GRAD, int(stage), int(micro), int(peer)
    )


def parse_item(text: str) -> Item:
    """An item of a program row: a compute slot, or a group such as `[A0.3>1 G5.2<3]`."""
    if text.startswith("[") and text.endswith("]"):
        return Group(tuple(parse_transfer(op) for op in text[1:-1].split()))
    return parse_compute(text)


def parse_row(text: str) -> tuple[Item, ...]:
    """A whole row: items separated by blanks."""
    return tuple(parse_item(token) for token in _TOKEN.findall(text))


def as_compute(value: Any) -> Compute:
    """A compute slot from its text, from plain tuples, or as it is. Raises PlanError."""
    if isinstance(value, str):
        return parse_compute(value)
    try:
        fields = tuple(value)
    except TypeError:
        fields = ()
    if len(fields) == 2:
        forward, backward = (as_compute(part) for part in fields)
        if type(forward) is Action and type(backward) is Action:
            if (forward.kind, backward.kind) == ("F", "B"):
                return Fused(forward, backward)
    elif len(fields) == 3:
        kind, stage, micro = fields
        if kind in KINDS and _is_index(stage) and _is_index(micro):
            return value if type(value) is Action else Action(kind, int(stage), int(micro))
    raise PlanError(
        f"{value!r} is not an action; expected (kind, stage, micro) with kind F, B, I or W and non-negative "
        "integers, or a pair of an F and a B"
    )


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def as_item(value: Any) -> Item:
    """An item of a program row from its text, a Group, or a compute slot in any form. Raises PlanError."""
    if isinstance(value, str):
        return parse_item(value)
    if type(value) is not Group:
        return as_compute(value)
    return Group(tuple(as_transfer(op) for op in value.ops))


def as_transfer(value: Any) -> Transfer:
    """A transfer from its text, from plain tuples, or as it is. Raises PlanError."""
    if isinstance(value, str):
        return parse_transfer(value)
    if isinstance(value, tuple) and len(value) == 5:
        kind, what, *indices = value
        if kind in (SEND, RECV) and what in CHANNEL_OF and all(map(_is_index, indices)):
            return Transfer(*value)
    raise PlanError(
        f"{value!r} is not a transfer; expected ('SEND' or 'RECV', 'ACT' or 'GRAD', stage, micro, peer)"
    )
