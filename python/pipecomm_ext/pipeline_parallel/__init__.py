"""Drop-in layer for Megatron-style training loops: messages between stages, schedules, layouts."""

from ..mindspeed.layerwise import recv_backward_with_reqs, recv_forward_with_reqs, send_backward, send_forward
from . import communication_utils, schedules
from . import p2p_communication as p2p_communication
from . import utils as utils
from .communication_utils import *  # noqa: F403
from .config import PipelineConfig
from .layout import PipelineParallelLayerLayout
from .layout_language import LayerType, LayoutError
from .schedules import *  # noqa: F403

__all__ = [
    "LayerType",
    "LayoutError",
    "PipelineConfig",
    "PipelineParallelLayerLayout",
    "recv_backward_with_reqs",
    "recv_forward_with_reqs",
    "send_backward",
    "send_forward",
]
__all__ += communication_utils.__all__
__all__ += schedules.__all__
