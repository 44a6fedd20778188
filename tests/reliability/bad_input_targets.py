"""Functions to call wrongly, for bad_inputs.py: Communicator and pipecomm_ext.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bad_inputs import TYPE, VALUE, Mistake, ones, target

import pipecomm_ext
from pipecomm_ext import Communicator, Recv, Send
from pipecomm_ext import distributed as facade


def one_each(comm: Communicator) -> list[torch.Tensor]:
    return [ones() for _ in range(comm.size)]


# ---- Communicator ------------------------------------------------------------------------------------------


def method(name: str, form: str, /, **arguments: Any) -> None:
    target(f"Communicator.{name}", form, lambda comm, **kw: getattr(comm, name)(**kw), **arguments)


for name, peer, kind in [
    ("send", "dst", "tensor"),
    ("isend", "dst", "tensor"),
    ("recv", "src", "target"),
    ("irecv", "src", "target"),
]:
    ends = {peer: (1, "message peer"), "channel": (0, "channel")}
    method(name, "message", tensor=(ones(), kind), **ends)

    facade_ends = {
        peer: (1, "facade message peer"),
        "tag": (0, "channel"),
        f"group_{peer}": (None, None, Mistake("two ways to say it", lambda good: 1, VALUE, "not both")),
    }
    target(
        f"distributed.{name}",
        "message",
        lambda comm, name=name, **kw: getattr(facade, name)(group=comm, **kw),
        tensor=(ones(), "facade target" if kind == "target" else kind),
        **facade_ends,
    )

for kind, made in (("tensor", Send), ("target", Recv)):
    target(
        f"batch_p2p of a {made.__name__}",
        "message",
        lambda comm, made=made, **kw: comm.batch_p2p([made(**kw)]),
        tensor=(ones(), kind),
        peer=(1, "message peer"),
        channel=(0, "channel"),
    )

BOTH_OPS = r"ops\[0\].*ops\[1\]|ops\[1\].*ops\[0\]"


def overlapping(other_kind: type, shape: tuple[int, ...] = (16,)) -> Callable[[Any], Any]:
    def ops(good: Any) -> Any:
        buffer = torch.ones(shape)
        return [Recv(buffer[..., 0:6], 1), other_kind(buffer[..., 5:9], 1, 1)]

    return ops


method(
    "batch_p2p",
    "message",
    ops=(
        lambda comm: [Send(ones(), 1), Recv(ones(), 1)],
        "batch",
        Mistake("two receives that overlap", overlapping(Recv), VALUE, BOTH_OPS),
        Mistake("a send that overlaps a receive", overlapping(Send), VALUE, BOTH_OPS),
        Mistake("columns of receives that overlap", overlapping(Recv, (3, 16)), VALUE, BOTH_OPS),
        Mistake("columns of a send that overlap a receive", overlapping(Send, (3, 16)), VALUE, BOTH_OPS),
    ),
)
target(
    "Work.wait",
    "local",
    lambda comm, **kw: comm.batch_p2p([], async_op=True).wait(**kw),
    timeout=(1.0, "timeout"),
)
method("route", "local", peer=(1, "peer"))
target("Communicator.connect", "local", lambda comm, peer: comm.connect([0, peer]), peer=(1, "peer"))
BARRIER: dict[str, tuple] = {
    "timeout": (10.0, "timeout"),
    "async_op": (False, None, Mistake("a timeout for a handle", lambda good: True, VALUE, "wait")),
}
method("barrier", "collective", **BARRIER)
method("broadcast", "collective", tensor=(ones(), "target"), src=(1, "peer"))
method(
    "all_to_all",
    "collective",
    inputs=(one_each, "tensors"),
    outputs=(
        one_each,
        "targets",
        Mistake("one tensor twice", lambda good: [good[0]] * len(good), VALUE, "share|same|overlap"),
    ),
)
PIECES = [((4, 2), torch.float32)] * 2


def plan_of_rank(rank: int) -> Any:
    return pipecomm_ext._C.plan_all_to_all_list(rank, 2, PIECES, PIECES)


method(
    "exchange",
    "collective",
    plan=(
        lambda comm: plan_of_rank(comm.rank),
        None,
        Mistake("None", lambda good: None, TYPE, "NoneType"),
        Mistake("a string", lambda good: "plan", TYPE, "str"),
        Mistake("the plan of another rank", lambda good: plan_of_rank(1), VALUE, "rank 1"),
    ),
    inputs=(
        one_each,
        "tensors",
        Mistake("another shape", lambda good: [ones(5, 2), *good[1:]], VALUE, r"\[5, 2\]|5"),
    ),
    outputs=(
        one_each,
        "targets",
        Mistake("another dtype", lambda good: [good[0].int(), *good[1:]], VALUE, "int32"),
    ),
)
method("empty", "local", shape=([2, 3], "shape"), dtype=(torch.float32, "dtype"))


def make_and_use(comm: Communicator, **arguments: Any) -> None:
    """The constructor does not wait: a rank learns of another one's mistake when it needs that one."""
    with Communicator(comm.group, **arguments) as made:
        made.barrier()


target(
    "Communicator",
    "collective",
    make_and_use,
    device=(
        "cpu",
        None,
        Mistake("an unknown one", lambda good: "tpu", (ValueError, RuntimeError), "tpu"),
        Mistake("meta", lambda good: "meta", VALUE, "meta"),
    ),
    transport=(
        "tcp",
        None,
        Mistake("an unknown one", lambda good: "pigeon", VALUE, "pigeon"),
        Mistake("None", lambda good: None, VALUE, "None"),
    ),
    channels=(
        2,
        None,
        Mistake("zero", lambda good: 0, VALUE, "channels.*0"),
        Mistake("too many", lambda good: 16, VALUE, "channels.*16"),
        Mistake("a float", lambda good: 2.0, TYPE, "channels.*float"),
        Mistake("True", lambda good: True, TYPE, "bool"),
    ),
    timeout=(10.0, "timeout"),
    check=(
        "auto",
        None,
        Mistake("an unknown one", lambda good: "sometimes", VALUE, "check.*sometimes"),
        Mistake("True", lambda good: True, VALUE, "True"),
    ),
)

# ---- distributed -------------------------------------------------------------------------------------------


def collective(name: str, /, **arguments: Any) -> None:
    def call(comm: Communicator, **kw: Any) -> Any:
        return getattr(facade, name)(group=comm, **kw)

    target(f"distributed.{name}", "collective", call, **arguments)


target(
    "distributed.P2POp",
    "message",
    lambda comm, **kw: facade.batch_isend_irecv([facade.P2POp(group=comm, **kw)]),
    op=(
        lambda comm: facade.isend,
        None,
        Mistake("another function", lambda good: facade.send, VALUE, "send"),
    ),
    tensor=(ones(), "tensor"),
    peer=(1, "facade message peer"),
    tag=(0, "channel"),
)
target(
    "distributed.batch_isend_irecv",
    "message",
    lambda comm, **kw: facade.batch_isend_irecv(**kw),
    p2p_op_list=(lambda comm: [facade.P2POp(facade.isend, ones(), 1, comm)], "batch"),
)
collective("broadcast", tensor=(ones(), "facade target"), src=(1, "facade peer"))
collective("barrier", **BARRIER)


def split_sizes(comm: Communicator) -> list[int]:
    return [3, 2] if comm.rank == 0 else [2, 3]


collective(
    "all_to_all_single",
    output=(
        ones(5, 2),
        "facade target",
        Mistake("another dtype", lambda good: good.double(), VALUE, "float64|double"),
    ),
    input=(ones(5, 2), "tensor"),
    output_split_sizes=(split_sizes, "sizes"),
    input_split_sizes=(split_sizes, "sizes"),
)
collective(
    "all_to_all", output_tensor_list=(one_each, "facade targets"), input_tensor_list=(one_each, "tensors")
)
collective("all_gather", tensor_list=(one_each, "facade targets"), tensor=(ones(), "tensor"))
collective(
    "all_gather_into_tensor",
    output_tensor=(
        lambda comm: ones(4 * comm.size, 2),
        "facade target",
        Mistake("another length", lambda good: ones(9, 2), VALUE, r"\[9, 2\]"),
        Mistake("another dtype", lambda good: good.int(), VALUE, "int32"),
    ),
    input_tensor=(ones(), "tensor"),
)


# ---- reductions --------------------------------------------------------------------------------------------

OPERATOR = (
    lambda comm: torch.distributed.ReduceOp.SUM,
    None,
    Mistake("a string", lambda good: "sum", TYPE, "ReduceOp.*sum"),
    Mistake("None", lambda good: None, TYPE, "ReduceOp.*None"),
    Mistake("bits of floats", lambda good: torch.distributed.ReduceOp.BAND, VALUE, "BAND is for integers"),
)
ANOTHER_LENGTH = Mistake("another length", lambda good: ones(3), VALUE, r"\[3\]")
ANOTHER_DTYPE = Mistake("another dtype", lambda good: good.int(), VALUE, "int32")

method("all_reduce", "collective", tensor=(ones(), "target"), op=OPERATOR)
method(
    "reduce_scatter",
    "collective",
    output=(ones(2, 2), "target", ANOTHER_DTYPE),
    input=(lambda comm: ones(2 * comm.size, 2), "tensor or list", ANOTHER_LENGTH),
    op=OPERATOR,
)
method(
    "all_gather",
    "collective",
    output=(lambda comm: ones(2 * comm.size, 2), "target", ANOTHER_LENGTH, ANOTHER_DTYPE),
    input=(ones(2, 2), "tensor"),
)
collective("all_reduce", tensor=(ones(), "facade target"), op=OPERATOR)
collective(
    "reduce_scatter",
    output=(ones(), "facade target", ANOTHER_DTYPE),
    input_list=(one_each, "tensors"),
    op=OPERATOR,
)
collective(
    "reduce_scatter_tensor",
    output=(ones(2, 2), "facade target", ANOTHER_DTYPE),
    input=(lambda comm: ones(2 * comm.size, 2), "tensor or list", ANOTHER_LENGTH),
    op=OPERATOR,
)
