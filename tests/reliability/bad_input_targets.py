"""What may be called wrongly, for bad_inputs.py: Communicator and pipecomm_ext.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bad_inputs import TYPE, VALUE, Mistake, ones, target

import pipecomm_ext
from pipecomm_ext import Communicator, Recv, Send
from pipecomm_ext import distributed as facade

# ---- Communicator ------------------------------------------------------------------------------------------


def message(method: str, tensor_kind: str):
    peer = "src" if "recv" in method else "dst"
    target(
        f"Communicator.{method}",
        "message",
        lambda comm, **kw: getattr(comm, method)(**kw),
        lambda comm: {"tensor": ones(), peer: 1, "channel": 0},
        {"tensor": tensor_kind, peer: "message peer", "channel": "channel"},
    )


message("send", "tensor")
message("isend", "tensor")
message("recv", "target")
message("irecv", "target")

for kind, made in (("Send", Send), ("Recv", Recv)):
    target(
        f"batch_p2p of a {kind}",
        "message",
        lambda comm, made=made, **kw: comm.batch_p2p([made(**kw)]),
        lambda comm: {"tensor": ones(), "peer": 1, "channel": 0},
        {
            "tensor": "tensor" if made is Send else "target",
            "peer": "message peer",
            "channel": "channel",
        },
    )


BOTH_OPS = r"ops\[0\].*ops\[1\]|ops\[1\].*ops\[0\]"


def overlapping(other_kind: type) -> Callable[[Any], Any]:
    def ops(good: Any) -> Any:
        buffer = torch.ones(16)
        return [Recv(buffer[0:6], 1), other_kind(buffer[5:9], 1, 1)]

    return ops


target(
    "Communicator.batch_p2p",
    "message",
    lambda comm, **kw: comm.batch_p2p(**kw),
    lambda comm: {"ops": [Send(ones(), 1), Recv(ones(), 1)]},
    {"ops": "batch"},
    [
        ("ops", Mistake("two receives that overlap", overlapping(Recv), VALUE, BOTH_OPS)),
        ("ops", Mistake("a send that overlaps a receive", overlapping(Send), VALUE, BOTH_OPS)),
    ],
)
target(
    "Work.wait",
    "local",
    lambda comm, **kw: comm.batch_p2p([], async_op=True).wait(**kw),
    lambda comm: {"timeout": 1.0},
    {"timeout": "timeout"},
)
target(
    "Communicator.route",
    "local",
    lambda comm, **kw: comm.route(**kw),
    lambda comm: {"peer": 1},
    {"peer": "peer"},
)
target(
    "Communicator.connect",
    "local",
    lambda comm, peer: comm.connect([0, peer]),
    lambda comm: {"peer": 1},
    {"peer": "peer"},
)
target(
    "Communicator.broadcast",
    "collective",
    lambda comm, **kw: comm.broadcast(**kw),
    lambda comm: {"tensor": ones(), "src": 1},
    {"tensor": "target", "src": "peer"},
)
target(
    "Communicator.all_to_all",
    "collective",
    lambda comm, **kw: comm.all_to_all(**kw),
    lambda comm: {
        "inputs": [ones() for _ in range(comm.size)],
        "outputs": [ones() for _ in range(comm.size)],
    },
    {"inputs": "tensors", "outputs": "targets"},
    [
        (
            "outputs",
            Mistake("one tensor twice", lambda good: [good[0]] * len(good), VALUE, "share|same|overlap"),
        ),
    ],
)


def exchange_arguments(comm: Communicator) -> dict[str, Any]:
    spec = ((4, 2), torch.float32)
    plan = pipecomm_ext._C.plan_all_to_all_list(comm.rank, comm.size, [spec] * comm.size, [spec] * comm.size)
    return {
        "plan": plan,
        "inputs": [ones() for _ in range(comm.size)],
        "outputs": [ones() for _ in range(comm.size)],
    }


target(
    "Communicator.exchange",
    "collective",
    lambda comm, **kw: comm.exchange(**kw),
    exchange_arguments,
    {"inputs": "tensors", "outputs": "targets"},
    [
        ("plan", Mistake("None", lambda good: None, TYPE, "NoneType")),
        ("plan", Mistake("a string", lambda good: "plan", TYPE, "str")),
        (
            "plan",
            Mistake(
                "the plan of another rank",
                lambda good: pipecomm_ext._C.plan_all_to_all_list(1, 2, *[[((4, 2), torch.float32)] * 2] * 2),
                VALUE,
                "rank 1",
            ),
        ),
        (
            "inputs",
            Mistake("another shape", lambda good: [ones(5, 2), *good[1:]], VALUE, r"\[5, 2\]|5"),
        ),
        (
            "outputs",
            Mistake("another dtype", lambda good: [good[0].int(), *good[1:]], VALUE, "int32"),
        ),
    ],
)
target(
    "Communicator.empty",
    "local",
    lambda comm, **kw: comm.empty(**kw),
    lambda comm: {"shape": [2, 3], "dtype": torch.float32},
    {"shape": "shape", "dtype": "dtype"},
)
CONSTRUCTOR = {"device": "cpu", "transport": "c10d", "channels": 2, "timeout": 10.0, "check": "auto"}


def make_and_use(comm: Communicator, **arguments: Any) -> None:
    """The constructor waits for nobody: a rank hears of another one's mistake when it needs that one."""
    with Communicator(comm.group, **arguments) as made:
        made.barrier()


target(
    "Communicator",
    "collective",
    make_and_use,
    lambda comm: dict(CONSTRUCTOR),
    {"timeout": "timeout"},
    [
        ("device", Mistake("an unknown one", lambda good: "tpu", (ValueError, RuntimeError), "tpu")),
        ("device", Mistake("meta", lambda good: "meta", VALUE, "meta")),
        ("transport", Mistake("an unknown one", lambda good: "pigeon", VALUE, "pigeon")),
        ("transport", Mistake("None", lambda good: None, VALUE, "None")),
        ("channels", Mistake("zero", lambda good: 0, VALUE, "channels.*0")),
        ("channels", Mistake("too many", lambda good: 16, VALUE, "channels.*16")),
        ("channels", Mistake("a float", lambda good: 2.0, TYPE, "channels.*float")),
        ("channels", Mistake("True", lambda good: True, TYPE, "bool")),
        ("check", Mistake("an unknown one", lambda good: "sometimes", VALUE, "check.*sometimes")),
        ("check", Mistake("True", lambda good: True, VALUE, "True")),
    ],
)

# ---- distributed -------------------------------------------------------------------------------------------


def facade_message(name: str, tensor_kind: str):
    peer = "src" if "recv" in name else "dst"
    target(
        f"distributed.{name}",
        "message",
        lambda comm, **kw: getattr(facade, name)(group=comm, **kw),
        lambda comm: {"tensor": ones(), peer: 1, "tag": 0, "group_" + peer: None},
        {"tensor": tensor_kind, peer: "facade message peer", "tag": "channel"},
        [("group_" + peer, Mistake("two ways to say it", lambda good: 1, VALUE, "not both"))],
    )


facade_message("send", "tensor")
facade_message("isend", "tensor")
facade_message("recv", "facade target")
facade_message("irecv", "facade target")
target(
    "distributed.P2POp",
    "message",
    lambda comm, **kw: facade.batch_isend_irecv([facade.P2POp(group=comm, **kw)]),
    lambda comm: {"op": facade.isend, "tensor": ones(), "peer": 1, "tag": 0},
    {"tensor": "tensor", "peer": "facade message peer", "tag": "channel"},
    [("op", Mistake("another function", lambda good: facade.send, VALUE, "send"))],
)
target(
    "distributed.batch_isend_irecv",
    "message",
    lambda comm, **kw: facade.batch_isend_irecv(**kw),
    lambda comm: {"p2p_op_list": [facade.P2POp(facade.isend, ones(), 1, comm)]},
    {"p2p_op_list": "batch"},
)
target(
    "distributed.broadcast",
    "collective",
    lambda comm, **kw: facade.broadcast(group=comm, **kw),
    lambda comm: {"tensor": ones(), "src": 1},
    {"tensor": "facade target", "src": "facade peer"},
)
target(
    "distributed.barrier",
    "local",
    lambda comm, **kw: facade.barrier(comm, **kw),
    lambda comm: {"async_op": True, "timeout": None},
    {},
    [("timeout", Mistake("one for a handle", lambda good: 3.0, VALUE, "wait"))],
)
target(
    "distributed.all_to_all_single",
    "collective",
    lambda comm, **kw: facade.all_to_all_single(group=comm, **kw),
    lambda comm: {
        "output": ones(5, 2),
        "input": ones(5, 2),
        "output_split_sizes": [3, 2] if comm.rank == 0 else [2, 3],
        "input_split_sizes": [3, 2] if comm.rank == 0 else [2, 3],
    },
    {
        "output": "facade target",
        "input": "tensor",
        "output_split_sizes": "sizes",
        "input_split_sizes": "sizes",
    },
    [
        ("output", Mistake("another dtype", lambda good: good.double(), VALUE, "float64|double")),
    ],
)
target(
    "distributed.all_to_all",
    "collective",
    lambda comm, **kw: facade.all_to_all(group=comm, **kw),
    lambda comm: {
        "output_tensor_list": [ones() for _ in range(comm.size)],
        "input_tensor_list": [ones() for _ in range(comm.size)],
    },
    {"output_tensor_list": "facade targets", "input_tensor_list": "tensors"},
)
target(
    "distributed.all_gather",
    "collective",
    lambda comm, **kw: facade.all_gather(group=comm, **kw),
    lambda comm: {"tensor_list": [ones() for _ in range(comm.size)], "tensor": ones()},
    {"tensor_list": "facade targets", "tensor": "tensor"},
)
target(
    "distributed.all_gather_into_tensor",
    "collective",
    lambda comm, **kw: facade.all_gather_into_tensor(group=comm, **kw),
    lambda comm: {"output_tensor": ones(4 * comm.size, 2), "input_tensor": ones()},
    {"output_tensor": "facade target", "input_tensor": "tensor"},
    [
        ("output_tensor", Mistake("another length", lambda good: ones(9, 2), VALUE, r"\[9, 2\]")),
        ("output_tensor", Mistake("another dtype", lambda good: good.int(), VALUE, "int32")),
    ],
)
