"""Stage relay: boundary tensors between pipeline stages of different sizes."""

from .stage_relay import StageRelay

__all__ = ["StageRelay"]
