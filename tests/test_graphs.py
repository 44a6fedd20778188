"""Graphs of torch: which communicator they use, what their tracers refuse, and refusals in compiled calls."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from relay_cases import topology_of
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from pipecomm_ext import (
    Communicator,
    PipeCommMismatch,
    Recv,
    Send,
    StageRelay,
    all_to_all,
    all_to_all_many,
    distributed,
    gather_forward_split_backward,
)
from pipecomm_ext.communicator.communicator import graph_name
from pipecomm_ext.communicator.registry import named_group
from pipecomm_ext.relay.operators import _relay_of


@on_ranks(2)
def test_a_graph_does_not_run_over_another_communicator(world):
    """Its name is that of the communicator, and not that of an object that may take its place."""
    names = [None, None]
    dist.all_gather_object(names, graph_name(world.comm), world.group)
    assert names[0] == names[1] and named_group(names[0]) is world.comm
    used = set()
    for _ in range(20):
        with Communicator(world.group, timeout=20) as comm:
            name = graph_name(comm)
        assert name not in used
        used.add(name)
        with pytest.raises(ValueError, match="was traced with is closed"):
            named_group(name)
        del comm


@on_ranks(2)
def test_a_graph_does_not_run_over_another_relay(world):
    names = set()
    for _ in range(20):
        relay = StageRelay(topology_of(world, [1, 1]))
        name = relay.name_in_graphs
        assert name not in names
        names.add(name)
        del relay
        gc.collect()
        with pytest.raises(ValueError, match="was traced with is gone"):
            _relay_of(name)


# ---- tracers that drop communication ----------------------------------------------------------------------


def _followed(call: Callable) -> Callable:
    return lambda x: (call(x), x * 1)[1]


TRACERS: dict[str, Callable] = {
    "make_fx": lambda function, x: make_fx(function, tracing_mode="real")(x),
    "make_fx before dispatch": lambda function, x: make_fx(function, pre_dispatch=True)(x),
    "jit.trace": lambda function, x: torch.jit.trace(function, (x,), check_trace=False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRACERS)
@on_ranks(2)
def test_tracers_that_would_drop_communication_are_refused(world, name):
    comm, other = world.comm, 1 - world.rank
    relay = StageRelay(topology_of(world, [1, 1]))
    calls: list[Callable] = [
        lambda x: all_to_all(x * 1, comm),
        lambda x: gather_forward_split_backward(x * 1, comm, 1),
        lambda x: all_to_all_many([x * 1, x * 2], comm)[1],
        lambda x: comm.all_reduce(x),
        lambda x: comm.all_reduce(x, async_op=True),
        lambda x: comm.broadcast(x, 0),
        lambda x: comm.barrier(),
        lambda x: comm.barrier(async_op=True),
        lambda x: distributed.all_gather_into_tensor(x.new_empty(16), x.view(-1)),
        lambda x: comm.send(x, other),
        lambda x: comm.batch_p2p([Send(x, other), Recv(x.clone(), other)]),
        lambda x: relay.recv_forward((3,), torch.float32) if world.rank else relay.send_forward(x),
    ]
    x = torch.arange(8.0).view(1, 2, 4, 1) + world.rank
    for call in calls:
        with pytest.raises(TypeError, match="cannot record communication"):
            TRACERS[name](_followed(call), x)
    comm.barrier()
    comm.all_reduce(x)
    with TorchDispatchMode():  # another mode changes nothing
        comm.all_reduce(x)


# ---- refusals ---------------------------------------------------------------------------------------------

# Wrong on rank 0 only. The class of its error, and the calls.
REFUSED: dict[str, tuple[type[Exception], Callable, Callable]] = {
    "scale of a gather": (
        ValueError,
        lambda x, comm: gather_forward_split_backward(x, comm, 1, None, "x"),
        lambda x, comm: gather_forward_split_backward(x, comm, 1),
    ),
    "dim of a gather": (
        IndexError,
        lambda x, comm: gather_forward_split_backward(x, comm, 9),
        lambda x, comm: gather_forward_split_backward(x, comm, 1),
    ),
    "dim of an all-to-all": (
        IndexError,
        lambda x, comm: all_to_all(x, comm, 9, 1),
        lambda x, comm: all_to_all(x, comm, 2, 1),
    ),
    "sizes of an all-to-all": (
        ValueError,
        lambda x, comm: all_to_all(x, comm, 2, 1, scatter_sizes=[]),
        lambda x, comm: all_to_all(x, comm, 2, 1),
    ),
    "tensors of an all-to-all": (
        IndexError,
        lambda x, comm: all_to_all_many([x, x], comm, 2, 9)[0],
        lambda x, comm: all_to_all_many([x, x], comm, 2, 1)[0],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_what_one_rank_rejects_is_refused_in_compiled_calls(world, name):
    kind, wrong, right = REFUSED[name]
    x, call = torch.arange(8.0).view(1, 2, 4, 1), right if world.rank else wrong
    torch._dynamo.reset()
    graph = torch.compile(lambda x: call(x * 2, world.comm) + 1, backend="aot_eager")
    with pytest.raises(PipeCommMismatch if world.rank else kind) as caught:
        graph(x)
    assert world.rank == 0 or caught.value.origin_rank == 0
    right(x, world.comm)
