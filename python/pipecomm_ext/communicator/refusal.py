"""What a rank tells the others if it cannot take part in a collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import PipeCommError


class RefusedOnError:
    """See `Communicator.collective`. A class, since each collective enters two of them, and a generator takes
    a microsecond."""

    __slots__ = ("_channel", "_comm", "_members", "_op")

    def __init__(self, comm: Any, op: str, members: Sequence[int], channel: int | None):
        self._comm, self._op, self._members, self._channel = comm, op, members, channel

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None and isinstance(error, Exception) and not isinstance(error, PipeCommError):
            self._comm.refuse(self._op, error, self._members, self._channel)
