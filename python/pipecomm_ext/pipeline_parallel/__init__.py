"""Drop-in layer for Megatron-style training loops: messages between stages, schedules, layouts."""

from .config import PipelineConfig
from .counting import (
    convert_schedule_table_to_order,
    get_pp_rank_microbatches,
    get_schedule_table,
    get_tensor_shapes,
)
from .embedding import clear_embedding_activation_buffer, finish_embedding_wgrad_compute
from .forward_backward import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
)
from .layerwise import recv_backward_with_reqs, recv_forward_with_reqs, send_backward, send_forward
from .layout import PipelineParallelLayerLayout
from .layout_language import LayerType, LayoutError
from .p2p_communicator import P2PCommunicator
from .steps import (
    backward_step,
    check_first_val_step,
    custom_backward,
    deallocate_output_tensor,
    forward_step,
    forward_step_calc_loss,
    set_current_microbatch,
)

__all__ = [
    "LayerType",
    "LayoutError",
    "P2PCommunicator",
    "PipelineConfig",
    "PipelineParallelLayerLayout",
    "backward_step",
    "check_first_val_step",
    "clear_embedding_activation_buffer",
    "convert_schedule_table_to_order",
    "custom_backward",
    "deallocate_output_tensor",
    "finish_embedding_wgrad_compute",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "forward_step",
    "forward_step_calc_loss",
    "get_forward_backward_func",
    "get_pp_rank_microbatches",
    "get_schedule_table",
    "get_tensor_shapes",
    "recv_backward_with_reqs",
    "recv_forward_with_reqs",
    "send_backward",
    "send_forward",
    "set_current_microbatch",
]
