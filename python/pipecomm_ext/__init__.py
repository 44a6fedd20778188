"""Pipeline and sequence-parallel communication for PyTorch."""

import importlib

__version__ = "0.2.0"

from .core.extension import _C as _C  # isort: skip  (first: says what is wrong with torch or the build)
from . import distributed, parallel_state, sequence_parallel
from .backend import register as _register_backend
from .communicator import Communicator, Recv, Send, Work, get_communicator
from .diagnostics.info import info
from .errors import PipeCommAborted, PipeCommError, PipeCommMismatch, PipeCommPeerLost, PipeCommTimeout
from .mindspeed.vtp import vtp_recv_backward, vtp_recv_forward, vtp_send_backward, vtp_send_forward
from .relay import StageRelay
from .sequence_parallel import *  # noqa: F403

__all__ = [
    "Communicator",
    "PipeCommAborted",
    "PipeCommError",
    "PipeCommMismatch",
    "PipeCommPeerLost",
    "PipeCommTimeout",
    "Recv",
    "Send",
    "StageRelay",
    "Work",
    "__version__",
    "distributed",
    "get_communicator",
    "info",
    "parallel_state",
    "vtp_recv_backward",
    "vtp_recv_forward",
    "vtp_send_backward",
    "vtp_send_forward",
]
__all__ += sequence_parallel.__all__

_register_backend()


def __getattr__(name):
    """Loads the larger public modules when they are used."""
    if name in ("integrations", "pipeline_parallel", "schedules"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
