"""Pipeline and sequence-parallel communication for PyTorch."""

from ._build_check import load_extension as _load_extension

__version__ = "0.1.0"

_C = _load_extension()

from . import distributed, parallel_state  # noqa: E402
from .communicator import Communicator, Recv, Send, Work, get_communicator  # noqa: E402
from .errors import (  # noqa: E402
    PipeCommAborted,
    PipeCommError,
    PipeCommMismatch,
    PipeCommPeerLost,
    PipeCommTimeout,
)
from .info import info  # noqa: E402
from .relay import *  # noqa: E402, F403
from .relay import __all__ as _relay  # noqa: E402
from .sequence_parallel import *  # noqa: E402, F403
from .sequence_parallel import __all__ as _sequence_parallel  # noqa: E402

__all__ = [
    "Communicator",
    "PipeCommAborted",
    "PipeCommError",
    "PipeCommMismatch",
    "PipeCommPeerLost",
    "PipeCommTimeout",
    "Recv",
    "Send",
    "Work",
    "__version__",
    "distributed",
    "get_communicator",
    "info",
    "parallel_state",
    *_relay,
    *_sequence_parallel,
]
