"""How a rank informs the others that it cannot take part in a collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import PipeCommError


def refuse_for(
    comm: Any, op: str, error: Exception, members: Sequence[int] = (), channel: int | None = None
) -> None:
    """Tells the other ranks that this one takes no part because of `error`; unless it is a failure, which
    reaches them anyway, or a signal handler raised it while the collective was in flight."""
    if not isinstance(error, PipeCommError) and not was_posted(error):
        comm.refuse(op, error, members, channel)


def was_posted(error: BaseException) -> bool:
    """Whether a signal handler raised `error` while the collective was in flight. It says so once, as the
    error may go on through another collective."""
    return error.__dict__.pop("_pipecomm_posted", False)


class RefusedOnError:
    """See `Communicator.collective`. A class, since a generator takes a microsecond; calls of only a few
    microseconds use `refuse_for`."""

    __slots__ = ("_channel", "_comm", "_members", "_op")

    def __init__(self, comm: Any, op: str, members: Sequence[int], channel: int | None):
        self._comm, self._op, self._members, self._channel = comm, op, members, channel

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception):
            refuse_for(self._comm, self._op, error, self._members, self._channel)
