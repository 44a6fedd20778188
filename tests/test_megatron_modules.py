"""Code that imports Megatron's modules by name, and calls what is in them as Megatron's users do."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
import torch.distributed as torch_dist
from ranks import on_ranks

from pipecomm_ext import PipeCommMismatch, parallel_state, pipeline_parallel
from pipecomm_ext.pipeline_parallel.p2p_communication import (
    P2PCommunicator,
    Shape,
    _batched_p2p_ops,
    _p2p_ops,
    is_single_shape,
)
from pipecomm_ext.pipeline_parallel.schedules import forward_step_calc_loss, get_forward_backward_func

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
    """Without `is_last_stage` and `cp_group_size` the default pipeline is asked, as in Megatron."""

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
    torch_dist.barrier()
