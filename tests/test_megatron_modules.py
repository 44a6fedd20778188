"""Code that imports Megatron's modules by name, and calls their functions as Megatron's users do."""

from __future__ import annotations

import importlib
import time
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from pipecomm_ext import PipeCommMismatch, get_communicator, parallel_state, pipeline_parallel
from pipecomm_ext.pipeline_parallel.communication_utils import (
    broadcast_float_list,
    broadcast_from_last_pipeline_stage,
    broadcast_from_last_to_first_pipeline_stage,
    broadcast_int_list,
    broadcast_tensor,
    recv_from_prev_pipeline_rank_,
    send_to_next_pipeline_rank,
)
from pipecomm_ext.pipeline_parallel.p2p_communication import (
    P2PCommunicator,
    Shape,
    _batched_p2p_ops,
    _p2p_ops,
    is_single_shape,
)
from pipecomm_ext.pipeline_parallel.schedules import forward_step_calc_loss, get_forward_backward_func
from pipecomm_ext.pipeline_parallel.utils import (
    get_pp_first_rank,
    get_pp_last_rank,
    get_pp_next_rank,
    get_pp_prev_rank,
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)

CONFIG = SimpleNamespace(pipeline_dtype=torch.float32, batch_p2p_comm=False)


def test_the_modules_hold_what_the_package_holds():
    schedules = importlib.import_module("pipecomm_ext.pipeline_parallel.schedules")
    for name in schedules.__all__:
        assert getattr(schedules, name) is getattr(pipeline_parallel, name), name
    assert get_forward_backward_func is pipeline_parallel.get_forward_backward_func
    assert P2PCommunicator is pipeline_parallel.P2PCommunicator is schedules.P2PCommunicator
    assert torch.Size in get_args(Shape) and is_single_shape(torch.Size([2]))
    assert not is_single_shape([(2, 3)])


def values(kind: str, rank: int) -> torch.Tensor:
    return torch.arange(6.0).view(1, 2, 3) + 10 * rank + (100 if kind == "gradient" else 0)


@on_ranks(2, 3)
@pytest.mark.parametrize("is_batched", [False, True])
def test_the_private_functions_of_megatron(world, is_batched):
    """Around the ring, in both directions at once; with two stages nothing is swapped."""
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    from_before, from_after = torch.empty(1, 2, 3), torch.empty(1, 2, 3)
    ends = {"group": world.group, "prev_pipeline_rank": before, "next_pipeline_rank": after}
    tensors = {
        "tensor_send_prev": values("gradient", world.rank),
        "tensor_recv_prev": from_before,
        "tensor_send_next": values("activation", world.rank),
        "tensor_recv_next": from_after,
    }
    handles = (_batched_p2p_ops if is_batched else _p2p_ops)(**tensors, **ends)
    if not is_batched:
        assert set(handles) == {"send_prev", "recv_prev", "send_next", "recv_next"}
        handles = list(handles.values())
    for handle in handles:
        handle.wait()
    assert torch.equal(from_before, values("activation", before))
    assert torch.equal(from_after, values("gradient", after))
    nothing = dict.fromkeys(tensors)
    assert _batched_p2p_ops(**nothing, **ends) == [] and _p2p_ops(**nothing, **ends) == {}
    one_way = {"tensor_send_next": torch.ones(1)} if world.rank == 0 else {"tensor_recv_prev": from_before}
    if world.rank < 2:
        waited = _p2p_ops(**{**nothing, **one_way}, **ends)
        assert list(waited) == ["send_next" if world.rank == 0 else "recv_prev"]
        with pytest.raises(PipeCommMismatch, match="nothing was transferred"):
            next(iter(waited.values())).wait()


@on_ranks(2, 3)
def test_the_private_methods_of_megatron(world):
    p2p = P2PCommunicator(world.group, CONFIG)
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    sent = {
        "tensor_send_next": values("activation", world.rank),
        "tensor_send_prev": values("gradient", world.rank),
    }
    for waits in (True, False):
        from_before, from_after, handles = p2p._communicate(
            **sent, recv_prev=True, recv_next=True, tensor_shape=[1, 2, 3], wait_on_reqs=waits
        )
        assert (handles is None) == waits
        for handle in (handles or {}).values():
            handle.wait()
        assert torch.equal(from_before, values("activation", before)) and from_before.requires_grad
        assert torch.equal(from_after, values("gradient", after))
    is_first = world.rank == 0
    # Down the pipeline only: no stage sends to the first one.
    tensor = torch.ones(world.rank + 1, 2, 3) if world.rank < world.size - 1 else None
    shapes = p2p._communicate_shapes(tensor, None, not is_first, False)
    assert shapes == ([0, 0, 0] if is_first else [world.rank, 2, 3], [0, 0, 0])
    received = p2p._communicate(
        tensor_send_next=tensor,
        tensor_send_prev=None,
        recv_prev=not is_first,
        recv_next=False,
        tensor_shape=shapes[0],
    )
    assert received[1:] == (None, None)
    assert received[0] is None if is_first else received[0].shape == (world.rank, 2, 3)
    shapes = p2p._communicate_shapes(None, torch.ones(4, 5, 6), False, True)
    assert shapes == ([0, 0, 0], [4, 5, 6])
    if world.size == 2:
        with pytest.raises(PipeCommMismatch, match=r"int64\[2\]"):
            p2p._communicate_shapes(
                *([torch.ones(2, 2), None, False, False] if is_first else [None, None, True, False])
            )


@on_ranks(2)
def test_who_calculates_the_loss(world):
    """Without `is_last_stage` and `cp_group_size` the default pipeline decides, as in Megatron."""

    def stored(vp_stage=None, **kwargs):
        store = []
        arguments = (SimpleNamespace(), torch.ones(2), lambda out: (out.sum(), "data"), SimpleNamespace())
        output, _ = forward_step_calc_loss(*arguments, vp_stage, False, 1, store, **kwargs)
        assert (output.dim() == 0) == bool(store)
        return store

    with pytest.raises(ValueError, match="there are no defaults before"):
        stored()
    assert stored(is_last_stage=True) == ["data"] and stored(is_last_stage=False) == []
    for virtual_stages in (1, 2):
        topology = parallel_state.initialize_pipeline([1, 1], virtual_stages=virtual_stages)
        try:
            if virtual_stages == 1:
                assert stored() == (["data"] if world.rank == 1 else [])
            else:
                assert stored(0) == [] and stored(1) == (["data"] if world.rank == 1 else [])
                with pytest.raises(ValueError, match="2 chunks per rank: give vp_stage, or is_last_stage"):
                    stored()
        finally:
            topology.close()
            parallel_state.destroy()
    dist.barrier()


# ---- messages of inference, and predicates of stages -----------------------------------------------------


def generate(group, num_tokens: int) -> list[int]:
    """A loop as in text generation: the model adds its stage's number plus 1; the last stage samples."""
    tokens = torch.tensor([1, 2])
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for _ in range(num_tokens):
        hidden = tokens.double().view(1, 2)
        if rank > 0:
            hidden = torch.empty(2, 1, dtype=torch.double).t()
            recv_from_prev_pipeline_rank_(hidden, group)
        hidden = hidden + rank + 1
        new_tokens = None
        if rank < size - 1:
            send_to_next_pipeline_rank(hidden, pp_group=group)
        else:
            new_tokens = hidden.view(2).long()
        tokens = broadcast_from_last_pipeline_stage([2], torch.int64, new_tokens, pp_group=group)
    return tokens.tolist()


@on_ranks(1, 2, 3)
def test_generation_over_a_group(world):
    total = 4 * sum(range(1, world.size + 1))
    assert generate(world.group, 4) == [1 + total, 2 + total]
    scores = torch.full((2, 3), 0.5) if world.rank == world.size - 1 else None
    scores = broadcast_from_last_to_first_pipeline_stage([2, 3], torch.float32, scores, world.group)
    if world.rank in (0, world.size - 1):
        assert torch.equal(scores, torch.full((2, 3), 0.5))
    else:
        assert scores is None


@on_ranks(2, 3)
@pytest.mark.parametrize(
    "tensor", [None, torch.ones(2), torch.ones(2, 3).int()], ids=["none", "shape", "dtype"]
)
def test_what_the_last_stage_cannot_send_is_refused_on_the_first(world, tensor):
    last, comm = world.size - 1, world.fresh_comm(timeout=60)
    begin = time.monotonic()
    if world.rank in (0, last):
        expected = (TypeError, ValueError) if world.rank == last else PipeCommMismatch
        with pytest.raises(expected, match="tensor must be"):
            given = tensor if world.rank == last else None
            broadcast_from_last_to_first_pipeline_stage([2, 3], torch.float32, given, comm)
    comm.barrier()
    assert time.monotonic() - begin < 30
    scores = torch.full((2,), 0.5) if world.rank == last else None
    scores = broadcast_from_last_to_first_pipeline_stage([2], torch.float32, scores, comm)
    assert scores is None if 0 < world.rank < last else scores.tolist() == [0.5] * 2


@on_ranks(3)
def test_the_default_pipeline_and_lists_for_all(world):
    with pytest.raises(ValueError, match="there are no defaults before"):
        send_to_next_pipeline_rank(torch.ones(1))
    with pytest.raises(ValueError, match="there are no defaults before"):
        broadcast_int_list(1, [1], data_parallel=True)
    topology = parallel_state.initialize_pipeline([1, 1, 1])
    try:
        assert generate(None, 2) == [13, 14]
        if world.rank == 0:
            recv_from_prev_pipeline_rank_(received := torch.empty(2))  # round the ring
            assert received.tolist() == [4.0, 5.0]
        elif world.rank == 2:
            send_to_next_pipeline_rank(torch.tensor([4.0, 5.0], requires_grad=True))
        lengths = [7, 2**40] if world.rank == 0 else None
        assert broadcast_int_list(2, lengths, data_parallel=True).tolist() == [7, 2**40]
    finally:
        topology.close()
        parallel_state.destroy()
    floats = broadcast_float_list(2, [0.5, 3] if world.rank == 1 else None, rank=1)
    assert floats.tolist() == [0.5, 3.0] and floats.dtype == torch.float32
    whole = torch.arange(6).view(2, 3).t()
    assert torch.equal(broadcast_tensor([3, 2], torch.int64, whole if world.rank == 0 else None), whole)


@on_ranks(2)
def test_wrong_tensors(world):
    """The source's tensor contradicts size or dtype, or ranks disagree: all raise, the next call works."""
    for value, text in [
        (torch.ones(3), r"must be torch.float32\[2\], not torch.float32\[3\]"),
        (torch.ones(2).double(), r"must be torch.float32\[2\], not torch.float64\[2\]"),
        (None, "tensor must be a torch.Tensor, not NoneType"),
    ]:
        kind = (ValueError, TypeError) if world.rank == 1 else PipeCommMismatch
        with pytest.raises(kind, match=text):
            value = value if world.rank == 1 else None
            broadcast_from_last_pipeline_stage([2], torch.float32, value, world.group)
    with pytest.raises(PipeCommMismatch):
        broadcast_int_list(2 + world.rank, [1, 2])
    with pytest.raises(PipeCommMismatch, match="nothing was transferred"):
        if world.rank == 0:
            send_to_next_pipeline_rank(torch.ones(2), world.group)
        else:
            recv_from_prev_pipeline_rank_(torch.ones(3), world.group)
    assert broadcast_int_list(2, [1, 2]).tolist() == [1, 2]


@on_ranks(3)
def test_where_a_rank_is(world):
    group = dist.new_group([2, 0]) if world.size == 3 else None
    if world.rank == 1:
        return
    is_first = world.rank == 0
    assert (is_pp_first_stage(group), is_pp_last_stage(group)) == (is_first, not is_first)
    for pipeline in (group, get_communicator(group)):
        assert (get_pp_first_rank(pipeline), get_pp_last_rank(pipeline)) == (0, 2)
        assert get_pp_next_rank(pipeline) == (2 if is_first else None)
        assert get_pp_prev_rank(pipeline) == (None if is_first else 0)


def test_chunks_of_a_rank():
    for vp_size in (None, 0, 1):
        for vp_stage in (None, 0):
            assert is_vp_first_stage(vp_stage, vp_size) and is_vp_last_stage(
                vp_stage=vp_stage, vp_size=vp_size
            )
        with pytest.raises(ValueError, match="vp_stage must be None or 0 with vp_size"):
            is_vp_first_stage(1, vp_size)
    assert [is_vp_first_stage(chunk, 3) for chunk in range(3)] == [True, False, False]
    assert [is_vp_last_stage(chunk, 3) for chunk in range(3)] == [False, False, True]
