"""What may be called wrongly, for bad_inputs.py: sequence parallelism, pipelines, relays, schedules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from bad_inputs import EITHER, NONE, TYPE, VALUE, Mistake, ones, target
from operations_pipeline import topology_of

import pipecomm_ext
from pipecomm_ext import Communicator, StageRelay, parallel_state, schedules
from pipecomm_ext.pipeline_parallel import P2PCommunicator

# ---- sequence parallelism ----------------------------------------------------------------------------------

target(
    "all_to_all",
    "collective",
    lambda comm, **kw: pipecomm_ext.all_to_all(process_group=comm, **kw),
    lambda comm: {
        "input_": ones(2, 3, 5),
        "scatter_dim": 2,
        "gather_dim": 1,
        "scatter_sizes": [3, 2],
        "gather_sizes": [3, 3],
    },
    {
        "input_": "tensor",
        "scatter_dim": "dim",
        "gather_dim": "dim",
        "scatter_sizes": "sizes",
        "gather_sizes": "sizes",
    },
    [("scatter_dim", Mistake("the gather dim", lambda good: 1, VALUE, "1"))],
)
target(
    "all_to_all with gather_size",
    "collective",
    lambda comm, **kw: pipecomm_ext.all_to_all(process_group=comm, **kw),
    lambda comm: {"input_": ones(2, 3, 5), "gather_size": 6},
    {"gather_size": "length"},
)
target(
    "all_to_all_many",
    "collective",
    lambda comm, **kw: pipecomm_ext.all_to_all_many(process_group=comm, **kw),
    lambda comm: {
        "inputs": [ones(2, 3, 5), ones(2, 3, 5)],
        "scatter_dim": 2,
        "gather_dim": 1,
        "scatter_sizes": [[3, 2], [2, 3]],
        "gather_sizes": [[3, 3], [3, 3]],
    },
    {
        "inputs": "tensors",
        "scatter_dim": "dim",
        "gather_dim": "dim",
        "scatter_sizes": "lists of sizes",
        "gather_sizes": "lists of sizes",
    },
)
target(
    "ulysses_attention",
    "collective",
    lambda comm, **kw: pipecomm_ext.ulysses_attention(process_group=comm, **kw),
    lambda comm: {
        "q": ones(2, 3, 4, 2),
        "k": ones(2, 3, 2, 2),
        "v": ones(2, 3, 2, 2),
        "chunks": 2,
        "gather_size": 6,
        "heads_dim": 2,
        "seq_dim": 1,
    },
    {
        "q": "tensor",
        "k": "tensor",
        "v": "tensor",
        "chunks": "count",
        "gather_size": "length",
        "heads_dim": "dim",
        "seq_dim": "dim",
    },
    [
        ("q", Mistake("fewer heads than k", lambda good: good[:, :, :1], VALUE, "must have 1 to 1")),
        ("v", Mistake("another length", lambda good: good[:, :2], VALUE, "same length along dim 1")),
        ("seq_dim", Mistake("the dim of heads", lambda good: 2, VALUE, "must differ")),
    ],
)
target(
    "zigzag_attention",
    "collective",
    lambda comm, **kw: pipecomm_ext.zigzag_attention(process_group=comm, is_causal=True, **kw),
    lambda comm: {
        "q": ones(2, 4, 4, 2),
        "k": ones(2, 4, 2, 2),
        "v": ones(2, 4, 2, 2),
        "gather_size": 8,
        "heads_dim": 2,
        "seq_dim": 1,
    },
    {
        "q": "tensor",
        "k": "tensor",
        "v": "tensor",
        "gather_size": "length",
        "heads_dim": "dim",
        "seq_dim": "dim",
    },
    [
        ("q", Mistake("fewer heads than k", lambda good: good[:, :, :1], VALUE, "must have 1 to 1")),
        ("v", Mistake("another length", lambda good: good[:, :2], VALUE, "same length along dim 1")),
        ("seq_dim", Mistake("the dim of heads", lambda good: 2, VALUE, "must differ")),
    ],
)
target(
    "gather_forward_split_backward",
    "collective",
    lambda comm, **kw: pipecomm_ext.gather_forward_split_backward(process_group=comm, **kw),
    lambda comm: {"input_": ones(2, 3), "dim": 1, "gather_sizes": [3, 3], "grad_scale": "up"},
    {"input_": "tensor", "dim": "dim", "gather_sizes": "sizes", "grad_scale": "grad_scale"},
)
target(
    "split_forward_gather_backward",
    "local",
    lambda comm, **kw: pipecomm_ext.split_forward_gather_backward(process_group=comm, **kw),
    lambda comm: {"input_": ones(2, 5), "dim": 1, "split_sizes": [3, 2], "grad_scale": "up"},
    {"input_": "tensor", "dim": "dim", "split_sizes": "sizes", "grad_scale": "grad_scale"},
)
target(
    "load_balanced_gather_forward_split_backward",
    "collective",
    lambda comm, **kw: pipecomm_ext.load_balanced_gather_forward_split_backward(process_group=comm, **kw),
    lambda comm: {"input_": ones(4, 3), "dim": 0},
    {"input_": "tensor", "dim": "dim"},
    [("input_", Mistake("an odd length", lambda good: ones(3, 3), VALUE, "length 6"))],
)
target(
    "load_balanced_split_forward_gather_backward",
    "local",
    lambda comm, **kw: pipecomm_ext.load_balanced_split_forward_gather_backward(process_group=comm, **kw),
    lambda comm: {"input_": ones(4 * comm.size, 3), "dim": 0},
    {"input_": "tensor", "dim": "dim"},
    [("input_", Mistake("a length that does not divide", lambda good: ones(6, 3), VALUE, "6"))],
)
target(
    "packed_data_gather_forward_split_backward",
    "collective",
    lambda comm, **kw: pipecomm_ext.packed_data_gather_forward_split_backward(process_group=comm, **kw),
    lambda comm: {
        "local_hidden_states": ones(4, 2),
        "all_split_sizes": torch.tensor([[3, 1], [3, 1]]),
        "dim": 0,
    },
    {"local_hidden_states": "tensor", "all_split_sizes": "rows", "dim": "dim"},
)
target(
    "packed_data_split_forward_gather_backward",
    "local",
    lambda comm, **kw: pipecomm_ext.packed_data_split_forward_gather_backward(process_group=comm, **kw),
    lambda comm: {"hidden_states": ones(8, 2), "sequence_lengths": [5, 3], "dim": 0},
    {"hidden_states": "tensor", "sequence_lengths": "sequence lengths", "dim": "dim"},
)


def over_ulysses(comm: Communicator) -> parallel_state.ParallelState:
    return parallel_state.ParallelState(ulysses_group=comm)


target(
    "attention_with_cp",
    "collective",
    lambda comm, **kw: pipecomm_ext.attention_with_cp(
        is_causal=True, parallel_state=over_ulysses(comm), **kw
    ),
    lambda comm: {
        "q": ones(2, 3, 4, 2),
        "k": ones(2, 3, 2, 2),
        "v": ones(2, 3, 2, 2),
        "chunks": 2,
        "gather_size": 6,
        "heads_dim": 2,
        "seq_dim": 1,
    },
    {
        "q": "tensor",
        "k": "tensor",
        "v": "tensor",
        "chunks": "count",
        "gather_size": "length",
        "heads_dim": "dim",
        "seq_dim": "dim",
    },
)
target(
    "split_forward_gather_backward_with_cp",
    "local",
    lambda comm, **kw: pipecomm_ext.split_forward_gather_backward_with_cp(
        parallel_state=over_ulysses(comm), **kw
    ),
    lambda comm: {"input_": ones(5, 2), "dim": 0},
    {"input_": "tensor", "dim": "dim"},
)
target(
    "gather_forward_split_backward_with_cp",
    "collective",
    lambda comm, **kw: pipecomm_ext.gather_forward_split_backward_with_cp(
        parallel_state=over_ulysses(comm), **kw
    ),
    lambda comm: {"input_": ones(3, 2), "dim": 0, "gather_size": 6},
    {"input_": "tensor", "dim": "dim", "gather_size": "length"},
)
target(
    "packed_data_split_forward_gather_backward_with_cp",
    "local",
    lambda comm, **kw: pipecomm_ext.packed_data_split_forward_gather_backward_with_cp(
        parallel_state=over_ulysses(comm), **kw
    ),
    lambda comm: {"x": ones(8, 2), "dim": 0, "seq_lens": [5, 3]},
    {"x": "tensor", "dim": "dim", "seq_lens": "sequence lengths"},
)
target(
    "packed_data_gather_forward_split_backward_with_cp",
    "collective",
    lambda comm, **kw: pipecomm_ext.packed_data_gather_forward_split_backward_with_cp(
        parallel_state=over_ulysses(comm), **kw
    ),
    lambda comm: {"x": ones(4, 2), "dim": 0, "seq_lens": [5, 3]},
    {"x": "tensor", "dim": "dim", "seq_lens": "sequence lengths"},
)
target(
    "reorder_output",
    "local",
    lambda comm, **kw: pipecomm_ext.reorder_output(cp_rank=0, cp_group=None, **kw),
    lambda comm: {"attn_output": ones(8, 2), "cp_size": 2, "dim": 0},
    {"cp_size": "count", "dim": "dim"},
    [
        ("attn_output", NONE),
        ("attn_output", Mistake("a length that does not divide", lambda good: ones(6, 2), VALUE, "6")),
    ],
)
target(
    "cal_split_sizes",
    "local",
    lambda comm, **kw: pipecomm_ext.cal_split_sizes(**kw),
    lambda comm: {"dim_size": 5, "world_size": 2},
    {"world_size": "count"},
    [
        ("dim_size", NONE),
        ("dim_size", Mistake("a float", lambda good: 5.0, TYPE, "float")),
        ("dim_size", Mistake("negative", lambda good: -5, VALUE, "-5")),
    ],
)
target(
    "cal_split_sizes_multi",
    "local",
    lambda comm, **kw: pipecomm_ext.cal_split_sizes_multi(**kw),
    lambda comm: {"sizes": [5, 3], "world_size": 2},
    {"world_size": "count"},
    [
        ("sizes", Mistake("a negative one", lambda good: [5, -3], VALUE, "-3")),
        ("sizes", Mistake("a float", lambda good: [5.5], TYPE, "float")),
    ],
)

# ---- pipeline ----------------------------------------------------------------------------------------------


def pipeline(method: str, good, kinds: dict[str, str], more=()) -> None:
    def call(comm: Communicator, **kw: Any) -> Any:
        config = SimpleNamespace(pipeline_dtype=torch.float32)
        return getattr(P2PCommunicator(comm, config), method)(**kw)

    target(f"P2PCommunicator.{method}", "message", call, good, kinds, more)


pipeline(
    "recv_forward",
    lambda comm: {"tensor_shapes": (2, 3), "is_first_stage": False},
    {"tensor_shapes": "pipeline shape"},
)
pipeline(
    "recv_backward",
    lambda comm: {"tensor_shapes": (2, 3), "is_last_stage": False},
    {"tensor_shapes": "pipeline shape"},
)
pipeline(
    "send_forward",
    lambda comm: {"output_tensors": ones(), "is_last_stage": False},
    {"output_tensors": "pipeline tensor"},
)
pipeline(
    "send_backward",
    lambda comm: {"input_tensor_grads": ones(), "is_first_stage": False},
    {"input_tensor_grads": "pipeline tensor"},
)
pipeline(
    "send_forward_recv_backward",
    lambda comm: {"output_tensors": ones(), "tensor_shapes": (4, 2), "is_last_stage": False},
    {"output_tensors": "pipeline tensor", "tensor_shapes": "pipeline shape"},
    [
        (
            "tensor_shapes",
            Mistake("more shapes than tensors", lambda good: [good, good], VALUE, "1 tensors.*2"),
        )
    ],
)
pipeline(
    "send_backward_recv_forward",
    lambda comm: {"input_tensor_grads": ones(), "tensor_shapes": (4, 2), "is_first_stage": False},
    {"input_tensor_grads": "pipeline tensor", "tensor_shapes": "pipeline shape"},
)
pipeline(
    "send_forward_recv_forward",
    lambda comm: {"output_tensor": ones(), "recv_prev": True, "tensor_shape": (4, 2)},
    {"output_tensor": "pipeline tensor", "tensor_shape": "pipeline shape"},
)
pipeline(
    "send_backward_recv_backward",
    lambda comm: {"input_tensor_grad": ones(), "recv_next": True, "tensor_shape": (4, 2)},
    {"input_tensor_grad": "pipeline tensor", "tensor_shape": "pipeline shape"},
)
pipeline(
    "send_forward_backward_recv_forward_backward",
    lambda comm: {
        "output_tensor": ones(),
        "input_tensor_grad": ones(),
        "recv_prev": True,
        "recv_next": True,
        "tensor_shape": (4, 2),
    },
    {
        "output_tensor": "pipeline tensor",
        "input_tensor_grad": "pipeline tensor",
        "tensor_shape": "pipeline shape",
    },
)

# ---- relay ------------------------------------------------------------------------------------------------


def relay(method: str, good, kinds: dict[str, str], form: str, more=()) -> None:
    def call(comm: Communicator, **kw: Any) -> Any:
        return getattr(StageRelay(topology_of(comm), communicator=comm), method)(**kw)

    target(f"StageRelay.{method}", form, call, good, kinds, more)


target(
    "StageRelay",
    "local",
    lambda comm, **kw: StageRelay(topology_of(comm), communicator=comm, **kw),
    lambda comm: {"algorithm": "auto", "layout": "replicated", "grad_reduce": "leader"},
    {},
    [
        ("algorithm", Mistake("an unknown one", lambda good: "fast", VALUE, "fast")),
        ("algorithm", Mistake("None", lambda good: None, VALUE, "None")),
        ("layout", Mistake("an unknown one", lambda good: "halved", VALUE, "halved")),
        ("layout", Mistake("a dim that is a float", lambda good: ("sharded", 1.5), EITHER, "1.5|float")),
        ("layout", Mistake("too few entries", lambda good: ["replicated"], VALUE, "1")),
        ("grad_reduce", Mistake("an unknown one", lambda good: "max", VALUE, "max")),
    ],
)
for direction in ("forward", "backward"):
    relay(
        f"send_{direction}",
        lambda comm, argument="tensor" if direction == "forward" else "gradient": {argument: ones()},
        {"tensor" if direction == "forward" else "gradient": "tensor"},
        "relay",
    )
    relay(
        f"recv_{direction}",
        lambda comm: {"shape": (4, 2), "dtype": torch.float32},
        {"shape": "shape", "dtype": "dtype"},
        "relay",
    )
RELAYED = {"tensor": None, "shape": (4, 2), "dtype": torch.float32, "src_stage": 1, "dst_stage": 0}
relay(
    "relay",
    lambda comm: dict(RELAYED) if comm.rank == 0 else {**RELAYED, "tensor": ones()},
    {},
    "local",
    [
        ("src_stage", Mistake("no stage", lambda good: 2, VALUE, r"2 is not in 0\.\.1")),
        ("dst_stage", Mistake("no stage", lambda good: -1, VALUE, "-1 is not in")),
        ("src_stage", Mistake("the other stage", lambda good: 0, VALUE, "differ")),
    ],
)

# ---- schedules ---------------------------------------------------------------------------------------------

for generator in ("gpipe", "one_f_one_b", "zb_h1", "zb_h2", "zb_v", "dualpipe", "dualpipev", "u_shaped"):
    target(
        f"schedules.{generator}",
        "local",
        lambda comm, generator=generator, **kw: getattr(schedules, generator)(**kw),
        lambda comm: {"P": 4, "M": 12},
        {"P": "plan count", "M": "plan count"},
    )
