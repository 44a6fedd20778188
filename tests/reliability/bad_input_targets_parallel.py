"""Functions to call wrongly, for bad_inputs.py: sequence parallelism, pipelines, relays, schedules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from bad_inputs import NONE, TYPE, VALUE, Mistake, ones, target
from operations_pipeline import topology_of

import pipecomm_ext
from pipecomm_ext import Communicator, StageRelay, parallel_state, schedules
from pipecomm_ext.pipeline_parallel import P2PCommunicator

# ---- sequence parallelism ----------------------------------------------------------------------------------


def over_group(name: str, form: str = "collective", /, variant: str = "", **arguments: Any) -> None:
    """A function with `process_group`, or with `parallel_state` if its name ends with _with_cp."""

    def call(comm: Communicator, **kw: Any) -> Any:
        if name.endswith("_with_cp"):
            group = {"parallel_state": parallel_state.ParallelState(ulysses_group=comm)}
        else:
            group = {"process_group": comm}
        return getattr(pipecomm_ext, name)(**group, **kw)

    target(name + variant, form, call, **arguments)


def without_group(name: str, /, **arguments: Any) -> None:
    target(name, "local", lambda comm, **kw: getattr(pipecomm_ext, name)(**kw), **arguments)


over_group(
    "all_to_all",
    input_=(ones(2, 3, 5), "tensor"),
    scatter_dim=(2, "dim", Mistake("the gather dim", lambda good: -2, VALUE, "must differ, both are 1")),
    gather_dim=(1, "dim"),
    scatter_sizes=([3, 2], "sizes"),
    gather_sizes=([3, 3], "sizes"),
)
over_group("all_to_all", variant=" with gather_size", input_=(ones(2, 3, 5), None), gather_size=(6, "length"))
over_group(
    "all_to_all_many",
    inputs=([ones(2, 3, 5), ones(2, 3, 5)], "tensors"),
    scatter_dim=(2, "dim"),
    gather_dim=(1, "dim"),
    scatter_sizes=([[3, 2], [2, 3]], "lists of sizes"),
    gather_sizes=([[3, 3], [3, 3]], "lists of sizes"),
)

FEWER_HEADS = Mistake("fewer heads than k", lambda good: good[:, :, :1], VALUE, "must have 1 to 1")
SHORTER = Mistake("another length", lambda good: good[:, :2], VALUE, "same length along dim 1")
DIM_OF_HEADS = Mistake("the dim of heads", lambda good: 2, VALUE, "must differ")
for name, length, others in [
    ("ulysses_attention", 3, {"chunks": (2, "count")}),
    ("zigzag_attention", 4, {"is_causal": (True, None)}),
    ("attention_with_cp", 3, {"chunks": (2, "count"), "is_causal": (True, None)}),
]:
    is_whole = name != "attention_with_cp"  # it passes the refusals of the others on
    over_group(
        name,
        q=(ones(2, length, 4, 2), "tensor", *[FEWER_HEADS] * is_whole),
        k=(ones(2, length, 2, 2), "tensor"),
        v=(ones(2, length, 2, 2), "tensor", *[SHORTER] * is_whole),
        gather_size=(2 * length, "length"),
        heads_dim=(2, "dim"),
        seq_dim=(1, "dim", *[DIM_OF_HEADS] * is_whole),
        **others,
    )

over_group(
    "gather_forward_split_backward",
    input_=(ones(2, 3), "tensor"),
    dim=(1, "dim"),
    gather_sizes=([3, 3], "sizes"),
    grad_scale=("up", "grad_scale"),
)
over_group(
    "split_forward_gather_backward",
    "local",
    input_=(ones(2, 5), "tensor"),
    dim=(1, "dim"),
    split_sizes=([3, 2], "sizes"),
    grad_scale=("up", "grad_scale"),
)
over_group(
    "load_balanced_gather_forward_split_backward",
    input_=(ones(4, 3), "tensor", Mistake("an odd length", lambda good: ones(3, 3), VALUE, "length 6")),
    dim=(0, "dim"),
)
INDIVISIBLE = Mistake("a length that does not divide", lambda good: ones(6, good.size(1)), VALUE, "length 6")
over_group(
    "load_balanced_split_forward_gather_backward",
    "local",
    input_=(lambda comm: ones(4 * comm.size, 3), "tensor", INDIVISIBLE),
    dim=(0, "dim"),
)
over_group(
    "packed_data_gather_forward_split_backward",
    local_hidden_states=(ones(4, 2), "tensor"),
    all_split_sizes=(torch.tensor([[3, 1], [3, 1]]), "rows"),
    dim=(0, "dim"),
)
over_group(
    "packed_data_split_forward_gather_backward",
    "local",
    hidden_states=(ones(8, 2), "tensor"),
    sequence_lengths=([5, 3], "sequence lengths"),
    dim=(0, "dim"),
)
over_group("split_forward_gather_backward_with_cp", "local", input_=(ones(5, 2), "tensor"), dim=(0, "dim"))
over_group(
    "gather_forward_split_backward_with_cp",
    input_=(ones(3, 2), "tensor"),
    dim=(0, "dim"),
    gather_size=(6, "length"),
)
for name, form, length in [
    ("packed_data_split_forward_gather_backward_with_cp", "local", 8),
    ("packed_data_gather_forward_split_backward_with_cp", "collective", 4),
]:
    over_group(
        name, form, x=(ones(length, 2), "tensor"), dim=(0, "dim"), seq_lens=([5, 3], "sequence lengths")
    )
without_group(
    "reorder_output",
    attn_output=(ones(8, 2), None, NONE, INDIVISIBLE),
    cp_size=(2, "count"),
    dim=(0, "dim"),
    cp_rank=(0, None),
    cp_group=(None, None),
)
without_group(
    "cal_split_sizes",
    dim_size=(
        5,
        None,
        NONE,
        Mistake("a float", lambda good: 5.0, TYPE, "float"),
        Mistake("negative", lambda good: -5, VALUE, "-5"),
    ),
    world_size=(2, "count"),
)
without_group(
    "cal_split_sizes_multi",
    sizes=(
        [5, 3],
        None,
        Mistake("a negative one", lambda good: [5, -3], VALUE, "-3"),
        Mistake("a float", lambda good: [5.5], TYPE, "float"),
    ),
    world_size=(2, "count"),
)

# ---- pipeline ----------------------------------------------------------------------------------------------


def pipeline(method: str, /, **arguments: Any) -> None:
    def call(comm: Communicator, **kw: Any) -> Any:
        config = SimpleNamespace(pipeline_dtype=torch.float32)
        return getattr(P2PCommunicator(comm, config), method)(**kw)

    target(f"P2PCommunicator.{method}", "message", call, **arguments)


TENSOR, SHAPE = (ones(), "pipeline tensor"), ((4, 2), "pipeline shape")
TOO_MANY = Mistake("more shapes than tensors", lambda good: [good, good], VALUE, "1 tensors.*2")
NOT_LAST, NOT_FIRST = {"is_last_stage": (False, None)}, {"is_first_stage": (False, None)}
pipeline("recv_forward", tensor_shapes=SHAPE, **NOT_FIRST)
pipeline("recv_backward", tensor_shapes=SHAPE, **NOT_LAST)
pipeline("send_forward", output_tensors=TENSOR, **NOT_LAST)
pipeline("send_backward", input_tensor_grads=TENSOR, **NOT_FIRST)
pipeline("send_forward_recv_backward", output_tensors=TENSOR, tensor_shapes=(*SHAPE, TOO_MANY), **NOT_LAST)
pipeline("send_backward_recv_forward", input_tensor_grads=TENSOR, tensor_shapes=SHAPE, **NOT_FIRST)
pipeline("send_forward_recv_forward", output_tensor=TENSOR, tensor_shape=SHAPE, recv_prev=(True, None))
pipeline("send_backward_recv_backward", input_tensor_grad=TENSOR, tensor_shape=SHAPE, recv_next=(True, None))
pipeline(
    "send_forward_backward_recv_forward_backward",
    output_tensor=TENSOR,
    input_tensor_grad=TENSOR,
    tensor_shape=SHAPE,
    recv_prev=(True, None),
    recv_next=(True, None),
)

# ---- relay ------------------------------------------------------------------------------------------------


def relay(method: str, form: str, /, **arguments: Any) -> None:
    def call(comm: Communicator, **kw: Any) -> Any:
        return getattr(StageRelay(topology_of(comm), communicator=comm), method)(**kw)

    target(f"StageRelay.{method}", form, call, **arguments)


target(
    "StageRelay",
    "local",
    lambda comm, **kw: StageRelay(topology_of(comm), communicator=comm, **kw),
    algorithm=(
        "auto",
        None,
        Mistake(
            "an unknown one", lambda good: "fast", VALUE, "one of auto, sharded, direct, leader, pip.*fast"
        ),
        Mistake("None", lambda good: None, VALUE, "None"),
    ),
    layout=(
        "replicated",
        None,
        Mistake("an unknown one", lambda good: "halved", VALUE, 'layout must be "replicated".*halved'),
        Mistake(
            "a dim that is a float",
            lambda good: ("sharded", 1.5),
            TYPE,
            "sharded dim must be an int, not float",
        ),
        Mistake(
            "too few entries", lambda good: ["replicated"], VALUE, "one entry for each of the 2 stages, got 1"
        ),
    ),
    grad_reduce=(
        "leader",
        None,
        Mistake("an unknown one", lambda good: "max", VALUE, "one of leader, sum, mean"),
    ),
)
relay("send_forward", "relay", tensor=(ones(), "tensor"))
relay("send_backward", "relay", gradient=(ones(), "tensor"))
for direction in ("forward", "backward"):
    relay(f"recv_{direction}", "relay", shape=((4, 2), "shape"), dtype=(torch.float32, "dtype"))
relay(
    "relay",
    "local",
    tensor=(lambda comm: None if comm.rank == 0 else ones(), None),
    shape=((4, 2), None),
    dtype=(torch.float32, None),
    src_stage=(
        1,
        None,
        Mistake("no stage", lambda good: 2, VALUE, r"2 is not in 0\.\.1"),
        Mistake("the other stage", lambda good: 0, VALUE, "differ"),
    ),
    dst_stage=(0, None, Mistake("no stage", lambda good: -1, VALUE, "-1 is not in")),
)

# ---- schedules ---------------------------------------------------------------------------------------------

for generator in ("gpipe", "one_f_one_b", "zb_h1", "zb_h2", "zb_v", "dualpipe", "dualpipev", "u_shaped"):
    target(
        f"schedules.{generator}",
        "local",
        lambda comm, generator=generator, **kw: getattr(schedules, generator)(**kw),
        P=(4, "plan count"),
        M=(12, "plan count"),
    )
