"""Stage relay: boundary tensors between pipeline stages of different sizes."""

from .stage_relay import StageRelay
from .vtp import vtp_recv_backward, vtp_recv_forward, vtp_send_backward, vtp_send_forward

__all__ = [
    "StageRelay",
    "vtp_recv_backward",
    "vtp_recv_forward",
    "vtp_send_backward",
    "vtp_send_forward",
]
