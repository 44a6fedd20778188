"""The communicator, and the communicators that this process keeps."""

from ..core.process_groups import device_of, own_group
from . import operators  # noqa: F401  (registers them)
from .communicator import Communicator, Recv, Send, Work, communicator_for
from .construction import DEFAULT_TIMEOUT_S, MAX_CHANNELS
from .registry import get_communicator, kept_communicator

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "MAX_CHANNELS",
    "Communicator",
    "Recv",
    "Send",
    "Work",
    "communicator_for",
    "device_of",
    "get_communicator",
    "kept_communicator",
    "own_group",
]
