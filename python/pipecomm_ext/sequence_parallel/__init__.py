"""Sequence parallelism: all-to-all, split and gather of any shape, as exchange plans, with autograd."""

from .all_to_all import all_to_all, all_to_all_many
from .context_parallel import (
    gather_forward_split_backward_with_cp,
    packed_data_gather_forward_split_backward_with_cp,
    packed_data_split_forward_gather_backward_with_cp,
    split_forward_gather_backward_with_cp,
)
from .context_parallel_attention import attention_with_cp
from .sizes import cal_split_sizes, cal_split_sizes_multi
from .split_gather import (
    gather_forward_split_backward,
    load_balanced_gather_forward_split_backward,
    load_balanced_split_forward_gather_backward,
    packed_data_gather_forward_split_backward,
    packed_data_split_forward_gather_backward,
    reorder_output,
    split_forward_gather_backward,
)
from .ulysses import ulysses_attention
from .zigzag_attention import zigzag_attention

__all__ = [
    "all_to_all",
    "all_to_all_many",
    "attention_with_cp",
    "cal_split_sizes",
    "cal_split_sizes_multi",
    "gather_forward_split_backward",
    "gather_forward_split_backward_with_cp",
    "load_balanced_gather_forward_split_backward",
    "load_balanced_split_forward_gather_backward",
    "packed_data_gather_forward_split_backward",
    "packed_data_gather_forward_split_backward_with_cp",
    "packed_data_split_forward_gather_backward",
    "packed_data_split_forward_gather_backward_with_cp",
    "reorder_output",
    "split_forward_gather_backward",
    "split_forward_gather_backward_with_cp",
    "ulysses_attention",
    "zigzag_attention",
]
