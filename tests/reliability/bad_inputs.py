"""Wrong arguments: every mistake of a kind, for every parameter of that kind, of every public function.

A `Target` is a function with good arguments and the kind of each; `MISTAKES` holds, for each kind, what may
be given instead and what must be said of it. The matrix is their product. One rank makes the wrong call. If
it is a collective, the others make the right one, and are told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from operations import NUM_CHANNELS
from operations_pipeline import topology_of

import pipecomm_ext
from pipecomm_ext import Communicator, Recv, Send, StageRelay, parallel_state, schedules
from pipecomm_ext import distributed as facade
from pipecomm_ext.pipeline_parallel import P2PCommunicator

VALUE = (ValueError,)
TYPE = (TypeError,)
EITHER = (ValueError, TypeError)
RANGE = (ValueError, IndexError)
PLAN = (schedules.PlanError,)
HUGE = 2**63 - 1


class Mistake(NamedTuple):
    name: str
    value: Callable[[Any], Any]  # from the good value
    raises: tuple[type, ...]
    says: str  # a pattern, of what came


def ints(*others: Mistake) -> list[Mistake]:
    """For whatever must be a whole number."""
    return [
        Mistake("a float", lambda good: 1.5, TYPE, "float"),
        Mistake("a string", lambda good: "1", TYPE, "str"),
        Mistake("a list", lambda good: [1], TYPE, "list"),
        *others,
    ]


NONE = Mistake("None", lambda good: None, TYPE, "None")
NOT_GIVEN = Mistake("None", lambda good: None, VALUE, "must name a rank")

TENSORS = [
    NONE,
    Mistake("a list", lambda good: [1.0, 2.0], TYPE, "list"),
    Mistake("an ndarray", lambda good: np.ones(3), TYPE, "ndarray"),
    Mistake("a string", lambda good: "tensor", TYPE, "str"),
    Mistake("sparse", lambda good: good.to_sparse(), VALUE, "(?i)sparse"),
    Mistake("sparse csr", lambda good: good.to_sparse_csr(), VALUE, "(?i)sparse"),
    Mistake("mkldnn", lambda good: good.to_mkldnn(), VALUE, "(?i)mkldnn"),
    Mistake(
        "quantized",
        lambda good: torch.quantize_per_tensor(good, 1.0, 0, torch.quint8),
        VALUE,
        "(?i)quint8|quantized",
    ),
    Mistake(
        "nested",
        lambda good: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        VALUE,
        "(?i)nested",
    ),
    Mistake("meta", lambda good: torch.empty_like(good, device="meta"), VALUE, "meta"),
]
# Of tensors that a function writes to.
TARGETS_ONLY = [
    Mistake("expanded", lambda good: good[:1].expand_as(good), VALUE, "overlap|expand|share memory"),
    Mistake(
        "overlapping strides",
        lambda good: torch.ones(good.numel() + 8).as_strided(good.shape, (1,) * good.dim()),
        VALUE,
        "overlap|expand|share memory",
    ),
]
LEAF = [
    Mistake("a leaf that requires grad", lambda good: good.clone().requires_grad_(), VALUE, "requires.grad"),
]


def in_list(mistakes: list[Mistake]) -> list[Mistake]:
    """The last tensor of a list is wrong, or the list is."""
    return [
        Mistake("None instead of a list", lambda good: None, TYPE, "None"),
        Mistake("a tensor instead of a list", lambda good: good[0], EITHER, "Tensor|shape"),
        Mistake("a list that is too short", lambda good: good[:-1], VALUE, r"\b[12]\b"),
        Mistake("a list that is too long", lambda good: [*good, good[0]], VALUE, r"\b[234]\b"),
        *(
            mistake._replace(
                name=f"{mistake.name} in the list",
                value=lambda good, mistake=mistake: [*good[:-1], mistake.value(good[-1])],
            )
            for mistake in mistakes
        ),
    ]


SIZES = [
    Mistake("a list that is too long", lambda good: [*good, 0], VALUE, r"\b[34]\b"),
    Mistake("a list that is too short", lambda good: good[:-1], VALUE, r"\b[12]\b"),
    Mistake("another sum", lambda good: [good[0] + 1, *good[1:]], VALUE, r"\d"),
    Mistake("a negative size", lambda good: [good[0] + good[1] + 1, -1, *good[2:]], VALUE, "-1"),
    Mistake("a float", lambda good: [float(good[0]), *good[1:]], TYPE, "float|2.0|3.0"),
    Mistake("an int instead of a list", lambda good: 3, EITHER, "int"),
    Mistake("a string", lambda good: "1, 2", EITHER, "str"),
    Mistake("too large a size", lambda good: [HUGE, *good[1:]], VALUE, r"\d"),
    Mistake("a size beyond 64 bits", lambda good: [2**70, *good[1:]], (*EITHER, OverflowError), ""),
]
LENGTHS = [
    Mistake("none at all", lambda good: [], VALUE, "at least one|no "),
    Mistake("another sum", lambda good: [good[0] + 1, *good[1:]], VALUE, r"\d"),
    Mistake("a negative length", lambda good: [sum(good) + 1, -1], VALUE, "-1"),
    Mistake("a float", lambda good: [float(good[0]), *good[1:]], TYPE, "float"),
    Mistake("a string", lambda good: "12", EITHER, "str"),
]

PEERS = ints(
    Mistake("True", lambda good: True, TYPE, "bool"),
    Mistake("the number of ranks", lambda good: 2, VALUE, r"\b2\b"),
    Mistake("-1", lambda good: -1, VALUE, "-1"),
    Mistake("beyond 32 bits", lambda good: 2**40, VALUE, str(2**40)),
)
MESSAGE_PEERS = [*PEERS, Mistake("oneself", lambda good: 0, VALUE, "itself|oneself|own|self")]

MISTAKES: dict[str, list[Mistake]] = {
    "tensor": TENSORS,
    "target": TENSORS + TARGETS_ONLY + LEAF,
    "facade target": TENSORS + TARGETS_ONLY,  # as in torch, buffers may require grad
    "tensors": in_list(TENSORS),
    "targets": in_list(TENSORS + TARGETS_ONLY + LEAF),
    "facade targets": in_list(TENSORS + TARGETS_ONLY),
    "peer": [NONE, *PEERS],
    "message peer": [NONE, *MESSAGE_PEERS],
    "facade peer": [NOT_GIVEN, *PEERS],
    "facade message peer": [NOT_GIVEN, *MESSAGE_PEERS],
    "channel": ints(
        NONE,
        Mistake("the number of channels", lambda good: NUM_CHANNELS, VALUE, f"{NUM_CHANNELS}"),
        Mistake("-1", lambda good: -1, VALUE, "-1"),
        Mistake("beyond 32 bits", lambda good: 2**40, VALUE, str(2**40)),
    ),
    "dim": ints(
        NONE,
        Mistake("too large", lambda good: 7, RANGE, "7"),
        Mistake("too far back", lambda good: -8, RANGE, "-8"),
        Mistake("beyond 64 bits", lambda good: 2**70, (*RANGE, OverflowError), ""),
    ),
    "length": ints(
        Mistake("another length", lambda good: good + 1, VALUE, r"\d"),
        Mistake("negative", lambda good: -4, VALUE, "-"),
        Mistake("too large", lambda good: HUGE, VALUE, r"\d"),
    ),
    "sizes": SIZES,
    "lists of sizes": [
        Mistake("an int", lambda good: 3, EITHER, "3|int"),
        Mistake("one list too few", lambda good: good[:-1], VALUE, r"\b1\b"),
        *(
            mistake._replace(value=lambda good, mistake=mistake: [good[0], mistake.value(good[1])])
            for mistake in SIZES
        ),
    ],
    "rows": [
        Mistake("None", lambda good: None, EITHER, "None"),
        Mistake("a row too few", lambda good: good[:-1], VALUE, r"\b1\b"),
        Mistake("another sum", lambda good: good + 1, VALUE, r"\d"),
        Mistake("negative", lambda good: good - 9, VALUE, "-"),
        Mistake("floats", lambda good: good.float(), EITHER, "float"),
        Mistake("a list of ints", lambda good: [1, 2], EITHER, "int"),
    ],
    "sequence lengths": LENGTHS,
    "grad_scale": [
        Mistake("another word", lambda good: "sideways", VALUE, "sideways"),
        Mistake("a number", lambda good: 2.0, VALUE, "2.0"),
        Mistake("True", lambda good: True, VALUE, "True"),
    ],
    "timeout": [
        Mistake("0", lambda good: 0, VALUE, "0"),
        Mistake("negative", lambda good: -1.0, VALUE, "-1"),
        Mistake("NaN", lambda good: math.nan, VALUE, "nan"),
        Mistake("1e300", lambda good: 1e300, VALUE, r"1e\+?300"),
        Mistake("no time", lambda good: timedelta(0), VALUE, "0"),
        Mistake("a string", lambda good: "5", TYPE, "str"),
        Mistake("True", lambda good: True, TYPE, "bool"),
    ],
    "batch": [
        NONE,
        Mistake("an element instead of a list", lambda good: good[0], TYPE, ""),
        Mistake("a tuple as an element", lambda good: [*good, ("send", torch.ones(2), 1)], TYPE, "tuple"),
        Mistake("a tensor as an element", lambda good: [*good, torch.ones(2)], TYPE, "Tensor"),
        Mistake("None as an element", lambda good: [*good, None], TYPE, "None"),
    ],
    "shape": [
        NONE,
        Mistake("a string", lambda good: "2, 3", TYPE, "str"),
        Mistake("floats", lambda good: [2.0, 3.0], TYPE, "float|2.0"),
        Mistake("negative", lambda good: [-1, 3], VALUE, "-1|>= 0"),
    ],
    "dtype": [
        NONE,
        Mistake("a string", lambda good: "float32", TYPE, "str"),
        Mistake("a type of Python", lambda good: float, TYPE, "type|float"),
    ],
    "group": [
        Mistake("a string", lambda good: "world", EITHER, "str"),
        Mistake("a number", lambda good: 3, EITHER, "int"),
    ],
    "count": ints(
        NONE,
        Mistake("zero", lambda good: 0, VALUE, r"\b0\b"),
        Mistake("negative", lambda good: -2, VALUE, "-[24]"),
    ),
    "plan count": ints(
        NONE,
        Mistake("zero", lambda good: 0, PLAN, r"\b0\b"),
        Mistake("negative", lambda good: -2, PLAN, "-2"),
    ),
}


class Target(NamedTuple):
    name: str
    function: Callable[..., Any]  # of the communicator and the arguments
    good: Callable[[Communicator], dict[str, Any]]
    kinds: dict[str, str]  # of the arguments that may be wrong
    # "collective": the others make the good call. "message": they do nothing. "local": nobody is concerned.
    # "relay": the other stage makes the opposite call.
    form: str
    more: list[tuple[str, Mistake]]  # further mistakes, by argument


TARGETS: dict[str, Target] = {}


def target(name: str, form: str, function, good, kinds: dict[str, str], more=()) -> None:
    TARGETS[name] = Target(name, function, good, kinds, form, list(more))


def matrix(chosen: Target) -> Iterator[tuple[str, Mistake]]:
    """Pairs of an argument and what is wrong with it."""
    for argument, kind in chosen.kinds.items():
        for mistake in MISTAKES[kind]:
            yield argument, mistake
    yield from chosen.more


# ---- Communicator ------------------------------------------------------------------------------------------


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape or (4, 2))


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
        (
            "ops",
            Mistake("two receives that overlap", overlapping(Recv), VALUE, r"ops\[0\].*ops\[1\]|ops\[1\].*"),
        ),
        (
            "ops",
            Mistake("a send that overlaps a receive", overlapping(Send), VALUE, r"ops\[[01]\].*ops\[[01]\]"),
        ),
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
target(
    "Communicator",
    "collective",
    lambda comm, **kw: Communicator(comm.group, **kw).close(),
    lambda comm: dict(CONSTRUCTOR),
    {"timeout": "timeout"},
    [
        ("device", Mistake("an unknown one", lambda good: "tpu", (ValueError, RuntimeError), "tpu")),
        ("device", Mistake("meta", lambda good: "meta", VALUE, "meta")),
        ("transport", Mistake("an unknown one", lambda good: "pigeon", VALUE, "pigeon")),
        ("transport", Mistake("None", lambda good: None, VALUE, "None")),
        ("channels", Mistake("zero", lambda good: 0, VALUE, "0")),
        ("channels", Mistake("too many", lambda good: 16, VALUE, "16")),
        ("channels", Mistake("a float", lambda good: 2.0, TYPE, "float")),
        ("channels", Mistake("True", lambda good: True, TYPE, "bool")),
        ("check", Mistake("an unknown one", lambda good: "sometimes", VALUE, "sometimes")),
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


SHAPE = "pipeline shape"
MISTAKES[SHAPE] = [
    Mistake("a string", lambda good: "2, 3", TYPE, "str"),
    Mistake("an int", lambda good: 3, TYPE, "int"),
    Mistake("floats", lambda good: [2.0, 3.0], TYPE, "2.0|float"),
    Mistake("negative", lambda good: [-1, 3], VALUE, "-1"),
    Mistake("None", lambda good: None, (RuntimeError,), "shape must be given"),
]
OUTPUT = "pipeline tensor"
MISTAKES[OUTPUT] = [mistake for mistake in TENSORS if mistake.name not in ("None", "a list")] + [
    Mistake("a list with a string", lambda good: [good, "x"], TYPE, "str"),
]

pipeline(
    "recv_forward", lambda comm: {"tensor_shapes": (2, 3), "is_first_stage": False}, {"tensor_shapes": SHAPE}
)
pipeline(
    "recv_backward", lambda comm: {"tensor_shapes": (2, 3), "is_last_stage": False}, {"tensor_shapes": SHAPE}
)
pipeline(
    "send_forward",
    lambda comm: {"output_tensors": ones(), "is_last_stage": False},
    {"output_tensors": OUTPUT},
)
pipeline(
    "send_backward",
    lambda comm: {"input_tensor_grads": ones(), "is_first_stage": False},
    {"input_tensor_grads": OUTPUT},
)
pipeline(
    "send_forward_recv_backward",
    lambda comm: {"output_tensors": ones(), "tensor_shapes": (4, 2), "is_last_stage": False},
    {"output_tensors": OUTPUT, "tensor_shapes": SHAPE},
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
    {"input_tensor_grads": OUTPUT, "tensor_shapes": SHAPE},
)
pipeline(
    "send_forward_recv_forward",
    lambda comm: {"output_tensor": ones(), "recv_prev": True, "tensor_shape": (4, 2)},
    {"output_tensor": OUTPUT, "tensor_shape": SHAPE},
)
pipeline(
    "send_backward_recv_backward",
    lambda comm: {"input_tensor_grad": ones(), "recv_next": True, "tensor_shape": (4, 2)},
    {"input_tensor_grad": OUTPUT, "tensor_shape": SHAPE},
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
    {"output_tensor": OUTPUT, "input_tensor_grad": OUTPUT, "tensor_shape": SHAPE},
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
        ("layout", Mistake("a dim from the end", lambda good: ("sharded", -1), VALUE, "-1")),
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
