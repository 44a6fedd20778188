"""Headers of borders, one format for the Executor and for Megatron's layer, and the messages after them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from pipecomm_ext import Communicator, PipeCommAborted, PipeCommError, StageRelay
from pipecomm_ext.parallel_state import PipelineTopology
from pipecomm_ext.pipeline_parallel import P2PCommunicator, PipelineConfig
from pipecomm_ext.runtime.border import (
    DTYPE_NAMES,
    HEADER_WORDS,
    BorderSpec,
    header_of,
    num_words_after,
    specs_in,
)
from pipecomm_ext.runtime.border_channels import BorderChannels, Incoming, Outgoing, connect
from pipecomm_ext.schedules import Executor, get_plan

NUMBERS = {  # on the wire between versions: never change one
    "uint8": 0, "int8": 1, "int16": 2, "int32": 3, "int64": 4, "float16": 5, "float32": 6, "float64": 7,
    "complex32": 8, "complex64": 9, "complex128": 10, "bool": 11, "qint8": 12, "quint8": 13, "qint32": 14,
    "bfloat16": 15, "quint4x2": 16, "quint2x4": 17, "bits1x8": 18, "bits2x4": 19, "bits4x2": 20, "bits8": 21,
    "bits16": 22, "float8_e5m2": 23, "float8_e4m3fn": 24, "float8_e5m2fnuz": 25, "float8_e4m3fnuz": 26,
    "uint16": 27, "uint32": 28, "uint64": 29, "uint1": 30, "uint2": 31, "uint3": 32, "uint4": 33, "uint5": 34,
    "uint6": 35, "uint7": 36, "int1": 37, "int2": 38, "int3": 39, "int4": 40, "int5": 41, "int6": 42,
    "int7": 43, "float8_e8m0fnu": 44, "float4_e2m1fn_x2": 45, "bcomplex32": 46,
}  # fmt: skip


def words_of(specs) -> list[int]:
    return [word for part in header_of(tuple(specs)) for word in part.tolist()]


def test_the_numbers_of_dtypes_are_frozen():
    assert dict(zip(DTYPE_NAMES[: len(NUMBERS)], range(len(NUMBERS)), strict=True)) == NUMBERS


def test_every_dtype_of_this_torch_can_cross_a_border():
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        specs = (BorderSpec((2, 0), dtype, False), None)
        assert words_of(specs)[:6] == [8, 2, NUMBERS[str(dtype).removeprefix("torch.")], 0, 2, 2]
        assert specs_in(words_of(specs)) == specs


def test_headers_of_any_length_and_rank():
    for num_tensors in (0, 1, 5, 6, 40):
        specs = tuple(BorderSpec((3,) * (idx % 7), torch.int8, idx % 2 == 0) for idx in range(num_tensors))
        words = words_of(specs)
        assert len(words) == HEADER_WORDS + num_words_after(words[:HEADER_WORDS])
        assert specs_in(words) == specs


def test_what_one_end_does_not_know_is_refused():
    with pytest.raises(TypeError, match="tensors of torch.float3 cannot cross a border"):
        header_of((BorderSpec((1,), "torch.float3", True),))
    with pytest.raises(PipeCommError, match="a header with dtype 999: the peer runs another version"):
        specs_in([6, 1, 999, 0, 1, 5])
    with pytest.raises(PipeCommError, match="a header of 0 words: the peer runs another version"):
        num_words_after([0] * HEADER_WORDS)


def test_a_dtype_that_this_torch_lacks_is_named(monkeypatch):
    monkeypatch.setattr("pipecomm_ext.runtime.border.DTYPE_NAMES", ["float3"])
    with pytest.raises(PipeCommError, match="sends tensors of float3, which this torch does not have"):
        specs_in([5, 1, 0, 0, 0])


@on_ranks(2)
def test_the_executor_and_megatron_read_each_others_headers(world):
    """One end is an Executor, the other one Megatron's layer, in both roles."""
    outputs = [torch.ones(3, 2), torch.arange(4), *[torch.full((1, 2, 3), 0.5)] * 8]  # a header of two parts
    comm = world.fresh_comm(channels=4)
    stage = {0: lambda x: tuple(outputs), 1: lambda *inputs: inputs}[world.rank]
    executor = Executor(get_plan("one_f_one_b", 2, 1), [stage], communicator=comm)
    config = PipelineConfig(pipeline_dtype=torch.float32, variable_seq_lengths=True)
    megatron, words = P2PCommunicator(comm, config), BorderChannels.for_chains(comm, 1)
    if world.rank == 0:
        executor.eval([torch.zeros(1)])
        kinds = words.send_words(torch.zeros(2, dtype=torch.int64), 1, 0)  # forward only; kind 0
        megatron.send_forward(outputs, False)
        kinds.wait()
    else:
        assert words.receive_words(2, 0, 0) == [0, 0]
        for received in (megatron.recv_forward([()], False), executor.eval().outputs[0]):
            assert [t.dtype for t in received] == [t.dtype for t in outputs]
            assert all(map(torch.equal, received, outputs))


@on_ranks(2)
def test_headers_on_a_communicator_of_their_own(world):
    """As for CUDA tensors, whose headers stay on the host."""
    channels = BorderChannels(world.shared_comm(channels=2), world.shared_comm(channels=4))
    peer = 1 - world.rank
    shapes = [(channel + 3, 2) for channel in (0, 1)]

    def outgoing(tensors, channel):
        specs = [None if t is None else BorderSpec(t.shape, t.dtype, True) for t in tensors]
        return Outgoing(tensors, peer, channel, channels.header(specs, peer, channel))

    def incoming(channel):
        return Incoming(lambda: channels.receive_header(peer, channel), peer, channel)

    sent = [[torch.full(shape, float(world.rank)), None] for shape in shapes]
    works, receipts = channels.post(
        [outgoing(tensors, channel) for channel, tensors in enumerate(sent)], [incoming(0), incoming(1)]
    )
    for shape, receipt in zip(shapes, receipts, strict=True):
        tensor, absent = receipt.wait()
        assert absent is None and tensor.requires_grad
        assert torch.equal(tensor.detach(), torch.full(shape, float(peer)))
    for work in works:
        work.wait()
    # Nothing but a header.
    works, [receipt] = channels.post([outgoing([None], 0)], [incoming(0)])
    assert receipt.wait() == [None] and receipt.work is None
    [work] = works
    work.wait()


@on_ranks(3)
@pytest.mark.parametrize("first", ["data", "headers"])
def test_both_communicators_tell_the_first_cause(world, first):
    """Whichever of them reports it to a rank."""
    with world.broken_comm(channels=2) as data:
        channels = BorderChannels.for_chains(data, 1)
        channels.headers.barrier()
        world.meet()
        if world.rank == 1:
            getattr(channels, first).abort("no such expert")
        else:
            with pytest.raises(PipeCommAborted, match="no such expert"):
                getattr(channels, first).barrier()
            channels.abort("what follows from it")
        world.meet()
        for comm in (channels.data, channels.headers):
            with pytest.raises(PipeCommAborted, match="aborted by rank 1: no such expert") as caught:
                comm.barrier()
            assert caught.value.origin_rank == 1
        world.meet()
        channels.close_headers()


@on_ranks(2)
def test_what_the_package_makes_does_not_shift_the_communicators_of_the_user(world):
    """Rank 1 has failed before it makes what rank 0 makes."""
    group = dist.new_group([0, 1])
    data = Communicator(group, device="cpu", channels=2)
    topology = PipelineTopology([1, 1], group=group, device="cpu")
    if world.rank == 0:
        made = [connect(group, torch.device("cpu")), BorderChannels.for_chains(data, 3).headers]
        made.append(StageRelay(topology, communicator=data).communicator)
        assert len({comm.id for comm in made} - {data.id, topology.communicator.id}) == 3
        for comm in made:
            comm.close()
    with Communicator(group, device="cpu", channels=5) as comm:
        comm.barrier()
    data.close()
    topology.close()


@on_ranks(2)
def test_receives_of_known_specs_queue_behind_those_that_are_not_known_yet(world):
    channels = BorderChannels.for_chains(world.shared_comm(channels=4), 1)
    peer = 1 - world.rank
    specs = [BorderSpec((2,), torch.float32, False)]
    asked = []

    def learn():
        asked.append(True)
        return channels.receive_header(peer, 0)

    _, receipts = channels.post([], [Incoming(learn, peer, 0), Incoming(specs, peer, 0)])
    mine = [torch.full((2,), float(10 * world.rank + idx)) for idx in range(2)]
    works, _ = channels.post(
        [Outgoing([mine[0]], peer, 0, channels.header(specs, peer, 0)), Outgoing([mine[1]], peer, 0)], []
    )
    assert not asked
    for idx in (1, 0):  # in either order
        [tensor] = receipts[idx].wait()
        assert tensor.tolist() == [10 * peer + idx] * 2 and asked == [True]
    for work in works:
        work.wait()
