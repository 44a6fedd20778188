"""Errors of communication. Wrong arguments are `ValueError` / `TypeError`, raised before anything is sent."""

from __future__ import annotations


class PipeCommError(RuntimeError):
    """A communication failed.

    Attributes (None where they do not apply): `op` (name of the operation), `rank` (who reports, group rank),
    `peer` (the other end), `channel`, `seq` (number of the message within peer, channel and direction, from
    0), `dtype` (name without "torch."), `shape` (tuple), `origin_rank` (where the trouble began).
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


class PipeCommMismatch(PipeCommError):
    """Two ranks disagree about an operation, or a rank refused to take part in a collective."""


class PipeCommAborted(PipeCommError):
    """The communicator was aborted, here or on another rank, or is closed."""


def _rebuild(cls, message, fields):
    error = cls(message)
    error.__dict__.update(fields)
    return error
