"""The matrix of wrong arguments, see bad_inputs.py; and every operation on a communicator that is closed, or
in another process or thread.
"""

from __future__ import annotations

import re
import threading

import bad_input_targets  # noqa: F401  (fills the table)
import bad_input_targets_parallel  # noqa: F401  (fills the table)
import operations_parallel  # noqa: F401  (fills the table)
import operations_pipeline  # noqa: F401  (fills the table)
import pytest
import torch
import torch.distributed as dist
from bad_inputs import TARGETS, Target, matrix
from operations import NUM_CHANNELS, OPERATIONS, Call, Draw
from operations_pipeline import topology_of
from patterns import assert_same, pattern, poison
from ranks import on_ranks
from test_bad_calls import assert_usable
from test_lifetime import run_forked

import pipecomm_ext
from pipecomm_ext import Communicator, PipeCommAborted, PipeCommError, PipeCommMismatch
from pipecomm_ext import distributed as facade
from pipecomm_ext.pipeline_parallel import P2PCommunicator

TRANSPORTS = pytest.mark.parametrize("transport", ["tcp", "shm"])


def make_wrong_call(comm, target: Target, argument: str, mistake) -> str:
    """Makes the call; checks the error and returns its text."""
    arguments = target.good(comm)
    arguments[argument] = mistake.value(arguments[argument])
    try:
        target.function(comm, **arguments)
    except Exception as error:
        text = str(error)
        assert type(error) in mistake.raises, f"{type(error).__name__}: {text}"
        assert re.search(mistake.says, text), f"does not say {mistake.says!r}: {text}"
        return text
    raise AssertionError("was accepted")


def try_one(comm, target: Target, argument: str, mistake) -> None:
    if comm.rank == 0:
        make_wrong_call(comm, target, argument, mistake)
    elif target.form == "collective":
        with pytest.raises(PipeCommMismatch, match="rank 0") as caught:
            target.function(comm, **target.good(comm))
        assert caught.value.origin_rank == 0
    elif target.form == "relay":
        verbs = ("send", "recv") if "send" in target.name else ("recv", "send")
        opposite = TARGETS[target.name.replace(*verbs)]
        with pytest.raises(PipeCommMismatch, match="rank 0"):
            opposite.function(comm, **opposite.good(comm))
    assert_usable(comm, f"{argument}: {mistake.name}")


def options_of(name: str) -> dict[str, object]:
    """Of communicators for a target: the transports take turns, since most arguments never reach one."""
    transport = ("tcp", "shm")[list(TARGETS).index(name) % 2]
    return {"transport": transport, "channels": NUM_CHANNELS, "timeout": 30}


@on_ranks(2)
@pytest.mark.parametrize("name", TARGETS)
def test_wrong_arguments(world, name):
    """The wrong rank gets ValueError or TypeError, collectives are refused on all, and all continue."""
    target, failures = TARGETS[name], []
    topology_of(world.comm)  # collective, once
    for argument, mistake in matrix(target):
        comm = world.shared_comm(**options_of(name))
        went_wrong = torch.zeros(1)
        try:
            try_one(comm, target, argument, mistake)
        except BaseException as error:  # including that of pytest.raises
            failures.append(f"{argument}: {mistake.name}: {error}")
            went_wrong += 1
            comm.abort("the test failed")
        dist.all_reduce(went_wrong)
        if went_wrong:  # messages in flight between the ranks do not match any more
            comm.close()
    assert not failures, "\n".join([name, *failures])


@on_ranks(2)
@pytest.mark.parametrize("name", TARGETS)
def test_the_arguments_that_are_called_good_are(world, name):
    """Otherwise the matrix would prove nothing. Messages that are left end with their communicator."""
    target = TARGETS[name]
    topology_of(world.comm)
    if target.form not in ("message", "relay"):
        comm = world.shared_comm(**options_of(name))
        target.function(comm, **target.good(comm))
        return
    with world.broken_comm(**options_of(name)) as comm:
        arguments = target.good(comm)
        comm.abort("only whether it is accepted")
        with pytest.raises(PipeCommAborted):
            target.function(comm, **arguments)


# ---- tensors that share memory -----------------------------------------------------------------------------


def fresh(num: int) -> list[torch.Tensor]:
    return [torch.ones(4, 3) for _ in range(num)]


def lists(outputs: list[torch.Tensor], inputs: list[torch.Tensor]):
    return (lambda comm: comm.all_to_all(inputs, outputs)), (lambda comm: comm.all_to_all(fresh(2), fresh(2)))


ONE, BUFFER, ROWS = torch.ones(4, 3), torch.ones(7, 3), torch.ones(8, 3)
GRID = torch.ones(4, 7)
# Calls whose tensors share memory, and the same calls of the other rank.
ALIASED = {
    "an output twice": lists([ONE, ONE], fresh(2)),
    "outputs that overlap": lists([BUFFER[:4], BUFFER[3:]], fresh(2)),
    "an input in the place of another one": lists([ONE, *fresh(1)], [*fresh(1), ONE]),
    "columns of outputs that overlap": lists([GRID[:, :3], GRID[:, 2:5]], fresh(2)),
    "a column and a row that cross": lists([torch.ones(4, 3), GRID.view(7, 4)[:3].t()], [GRID[:, 4:]] * 2),
    "columns of inputs in those of outputs": lists([GRID[:, 1:4], GRID[:, 4:]], [GRID[:, :3], GRID[:, 3:6]]),
    "outputs are the inputs": lists(ROWS.chunk(2), ROWS.chunk(2)[::-1]),
    "output and input overlap": (
        lambda comm: facade.all_to_all_single(GRID.view(14, 2)[:8], GRID.view(14, 2)[2:10], group=comm),
        lambda comm: facade.all_to_all_single(torch.ones(8, 2), torch.ones(8, 2), group=comm),
    ),
    "the input lies in the output": (
        lambda comm: facade.all_gather(list(ROWS.chunk(2)), ROWS[4:], comm),
        lambda comm: facade.all_gather(fresh(2), torch.ones(4, 3), comm),
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("name", ALIASED)
def test_tensors_that_share_memory_are_refused(world, name):
    (wrong, right), comm = ALIASED[name], world.shared_comm(channels=NUM_CHANNELS)
    if world.rank == 0:
        with pytest.raises(ValueError, match="share memory; use separate tensors"):
            wrong(comm)
    else:
        with pytest.raises(PipeCommMismatch, match="rank 0.*share memory"):
            right(comm)
    assert_usable(comm, name)


@on_ranks(2, 3)
def test_a_gather_in_place_is_legal(world):
    """The input is its own place in the output; columns of one tensor do not share memory either."""
    expected = pattern((4 * world.size, 3), torch.int32)
    output = poison((4 * world.size, 3), torch.int32)
    mine = output[4 * world.rank : 4 * world.rank + 4]
    mine.copy_(expected[4 * world.rank : 4 * world.rank + 4])
    facade.all_gather_into_tensor(output, mine, world.comm)
    assert_same(output, expected)
    own = pattern((4, 3), torch.int32, world.rank)
    everybody = [own if rank == world.rank else poison((4, 3), torch.int32) for rank in range(world.size)]
    world.comm.all_to_all([own] * world.size, everybody)
    for rank, received in enumerate(everybody):
        assert_same(received, pattern((4, 3), torch.int32, rank))
    columns = poison((4, world.size), torch.int32)
    facade.all_gather(list(columns.split(1, 1)), expected[:4, :1] + world.rank, world.comm)
    assert_same(columns, expected[:4, :1] + torch.arange(world.size, dtype=torch.int32))


# ---- communicators in the wrong state, place or time -------------------------------------------------------


def calls_over(comm: Communicator) -> dict[str, Call]:
    chosen = [operation for operation in OPERATIONS.values() if operation.form != "apart"]
    return {operation.name: operation.prepare(comm, Draw()) for operation in chosen}


def all_must_raise(calls: dict[str, Call], kind: type[Exception], message: str) -> None:
    for name, call in calls.items():
        with pytest.raises(kind, match=message):
            call.run()
            raise AssertionError(name)


@on_ranks(2)
@TRANSPORTS
def test_every_operation_on_a_closed_communicator(world, transport):
    comm = world.fresh_comm(transport=transport, channels=NUM_CHANNELS)
    calls = calls_over(comm)
    comm.close()
    all_must_raise(calls, PipeCommAborted, "closed communicator; create a new")


def every_operation_in_a_forked_child(world, transport):
    comm = world.fresh_comm(transport=transport, channels=NUM_CHANNELS)
    calls = calls_over(comm)
    told = "was forked.*make a new group and Communicator"
    run_forked(lambda: all_must_raise(calls, PipeCommError, told))
    assert_usable(comm, "fork")


@TRANSPORTS
def test_every_operation_in_a_forked_child(ranks, transport):
    """On new ranks: where an earlier backward has started threads, torch refuses any in a forked child."""
    with ranks.disposable(2, every_operation_in_a_forked_child, transport) as world:
        outcomes = world.collect()
    assert all(outcome.status == "returned" for outcome in outcomes), "\n".join(map(str, outcomes))


@on_ranks(2)
@TRANSPORTS
def test_every_operation_from_another_thread(world, transport):
    comm = world.shared_comm(transport=transport, channels=NUM_CHANNELS)
    errors: list[tuple[str, BaseException]] = []

    def work() -> None:
        for name, operation in OPERATIONS.items():
            try:
                operation.prepare(comm, Draw()).run()
            except BaseException as error:
                errors.append((name, error))
                return

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and not errors, errors


# ---- the lists are complete --------------------------------------------------------------------------------

# Public names without arguments that can be wrong, or whose tests are elsewhere.
NOT_IN_THE_MATRIX = {
    "info": "takes nothing",
    "__version__": "a string",
    "distributed": "a module, its functions are here",
    "distributed.all_gather_single": "another name of all_gather_into_tensor",
    "parallel_state": "groups only, see test_split_gather.py",
    "get_communicator": "the arguments of Communicator",
    "Send": "batch_p2p of a Send",
    "Recv": "batch_p2p of a Recv",
    "Work": "wait() is here",
    "Communicator.transport_among": "what the package itself asks; ranks of the group",
    "Communicator.refuse": "a rank that calls it has found the mistake itself",
    "P2PCommunicator.post": "what all methods of the class go through",
    "vtp_send_forward": "StageRelay.send_forward",
    "vtp_send_backward": "StageRelay.send_backward",
    "vtp_recv_forward": "StageRelay.recv_forward",
    "vtp_recv_backward": "StageRelay.recv_backward",
}
METHODS_NOT_IN_THE_MATRIX = {
    "abort", "close", "collective", "connection_events", "dump_flight", "flight_record",
}  # fmt: skip


def public_names() -> set[str]:
    names = {name for name in pipecomm_ext.__all__ if not name.startswith("PipeComm")}
    names |= {f"distributed.{name}" for name in pipecomm_ext.distributed.__all__}
    for owner in (pipecomm_ext.Communicator, P2PCommunicator):
        names |= {
            f"{owner.__name__}.{name}"
            for name, member in vars(owner).items()
            if callable(member) and not name.startswith("_") and name not in METHODS_NOT_IN_THE_MATRIX
        }
    return names - set(NOT_IN_THE_MATRIX)


def test_every_public_function_is_in_the_matrix() -> None:
    assert public_names() - set(TARGETS) == set()


def test_every_communicating_function_is_in_the_table_of_operations() -> None:
    words = set(re.findall(r"\w+", " ".join(OPERATIONS)))
    functions = {name.split(".")[-1] for name in public_names()}
    local = {"Communicator", "P2POp", "connect", "empty", "reorder_output", "route", "transport_among"}
    local |= {name for name in functions if name.startswith(("cal_split", "split_", "packed_data_split_f"))}
    assert functions - words - local == set()
