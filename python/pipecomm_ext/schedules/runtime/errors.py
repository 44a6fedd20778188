"""What a failing stage raises."""

from __future__ import annotations

from ...errors import PipeCommError
from ..actions import Item


class StageError(PipeCommError):
    """Code of a stage, or a loss function, raised; its exception is the `__cause__`.

    Attributes beside those of PipeCommError: `position` in the program of the rank, `action` there.
    """

    position: int | None = None
    action: Item | None = None
