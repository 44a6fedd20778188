"""Drop-in layer for Megatron-style training loops: messages between stages, schedules, layouts."""

from .config import PipelineConfig
from .p2p_communicator import P2PCommunicator

__all__ = [
    "P2PCommunicator",
    "PipelineConfig",
]
