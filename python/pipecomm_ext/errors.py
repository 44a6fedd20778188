"""Errors of communication. Wrong arguments raise `ValueError` or `TypeError` before anything is sent."""

from __future__ import annotations

from typing import Any


class PipeCommError(RuntimeError):
    """A communication failed. Attributes that do not apply are None.

    Attributes:
        op: name of the operation.
        rank, peer: the rank that reports the error, and the other end (ranks of the group).
        channel, seq: channel of the message, and its number there in this direction, from 0.
        dtype, shape: of the tensor; the name without "torch.", and a tuple.
        origin_rank: the rank on which the cause arose.
    """

    def __init__(
        self,
        message: str,
        *,
        op: str | None = None,
        rank: int | None = None,
        peer: int | None = None,
        channel: int | None = None,
        seq: int | None = None,
        dtype: str | None = None,
        shape: tuple[int, ...] | None = None,
        origin_rank: int | None = None,
    ) -> None:
        super().__init__(message)
        self.op = op or None
        self.rank = rank
        self.peer = peer
        self.channel = channel
        self.seq = seq
        self.dtype = dtype or None
        self.shape = shape if shape or self.dtype else None
        self.origin_rank = origin_rank

    def __reduce__(self):
        return _rebuild, (type(self), str(self), dict(self.__dict__))


class PipeCommTimeout(PipeCommError):
    """A wait took longer than its limit."""


class PipeCommPeerLost(PipeCommError):
    """A rank died, was cut off, or closed its communicator while a message to or from it was pending."""


class MessageDescription(dict[str, Any]):
    """How one end of a message describes it: a dict, whose entries are attributes as well.

    Attributes:
        op: name of the operation.
        dtype, shape: of the tensor that the rank passed in, as those of `PipeCommError`; at most 8 dims.
        num_bytes: of this message.
    """

    op: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"a description of a message has no {name!r}")
        return self[name]


class PipeCommMismatch(PipeCommError):
    """Two ranks disagree about an operation, or a rank refused to take part in a collective.

    Attributes:
        ours, theirs: if two ends disagree about a message, the description of the end that found it, and the
            other one's; else None.

    Example:
        ```python
        other = 1 - comm.rank
        try:
            comm.batch_p2p([Send(torch.ones(2), other), Recv(torch.empty(3), other)])
        except PipeCommMismatch as error:
            print(error.ours.shape, error.theirs.shape)
        ```
    """

    ours: MessageDescription | None = None
    theirs: MessageDescription | None = None


class PipeCommAborted(PipeCommError):
    """The communicator was aborted, here or on another rank, or is closed."""


class StageError(PipeCommError):
    """The code of a stage, or a loss function, raised; its exception is the `__cause__`.

    Attributes:
        position: place in the program of the rank.
        action: the action there.
    """

    position: int | None = None
    action: Any = None


def summary_of(error: BaseException) -> str:
    """Class and text of any exception, as text that can be sent."""
    try:
        text = str(error)
    except Exception as wrong:
        text = f"its text cannot be made ({type(wrong).__name__})"
    return f"{type(error).__name__}: {text}".encode("utf-8", "backslashreplace").decode()


def _rebuild(cls, message, fields):
    error = cls(message)
    error.__dict__.update(fields)
    return error
