"""The names of megatron.core.pipeline_parallel.schedules, for code that imports that module."""

from .embedding import clear_embedding_activation_buffer, finish_embedding_wgrad_compute
from .forward_backward import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
)
from .microbatch_order import (
    convert_schedule_table_to_order,
    get_pp_rank_microbatches,
    get_schedule_table,
)
from .p2p_communicator import P2PCommunicator
from .shapes import get_tensor_shapes
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
    "P2PCommunicator",
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
    "set_current_microbatch",
]
