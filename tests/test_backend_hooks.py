"""Hooks on a group of the backend are called as on a group of gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from patterns import awaited
from test_backend import both, gloo_group, group_of

HOOK = 7  # any number, by which a hook is removed again


def every_call(group, rank: int, size: int) -> None:
    """Calls all that torch has hooks for, synchronous and not."""
    whole = torch.ones(size, 2)
    lists = [torch.ones(2) for _ in range(size)]
    for async_op in (False, True):
        works = [
            dist.broadcast(torch.ones(3), 1, group, async_op),
            dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX, group, async_op),
            dist.reduce(torch.ones(3), 1, group=group, async_op=async_op),
            dist.all_gather([torch.empty(2) for _ in range(size)], lists[rank], group, async_op),
            dist.all_gather_single(torch.empty(2 * size), lists[rank], group, async_op),
            dist.reduce_scatter(torch.empty(2), lists, group=group, async_op=async_op),
            dist.reduce_scatter_single(torch.empty(1, 2), whole, group=group, async_op=async_op),
            dist.all_to_all_single(torch.empty(size, 2), whole, group=group, async_op=async_op),
            dist.all_to_all([torch.empty(2) for _ in range(size)], lists, group, async_op),
            dist.gather(lists[0], lists if rank == 0 else None, 0, group, async_op),
            dist.scatter(torch.empty(2), lists if rank == 0 else None, 0, group, async_op),
            dist.barrier(group, async_op),
        ]
        for work in works:
            awaited(work)
    if rank < 2:
        calls = [(dist.send, dist.isend), (dist.recv, dist.irecv)]
        for waits, begins in calls if rank == 0 else reversed(calls):
            waits(torch.ones(4), 1 - rank, group)
            begins(torch.ones(4), 1 - rank, group).wait()
    with dist._coalescing_manager(group, async_ops=True) as coalesced:
        dist.all_reduce(torch.ones(2), group=group)
        dist.all_reduce(torch.ones(3), group=group)
    coalesced.wait()
    with dist._coalescing_manager(group, async_ops=True) as coalesced:
        dist.all_gather_single(torch.empty(2 * size), lists[rank], group)
        dist.all_gather_single(torch.empty(2 * size), lists[rank], group)
    coalesced.wait()


class Recorder:
    """Hooks that record what they are called with."""

    def __init__(self, group) -> None:
        self.group, self.calls, self.ended = group, [], []

    def before(self, args) -> None:
        shapes = [
            [list(tensor.shape) for tensor in some] for some in (args.input_tensors, args.output_tensors)
        ]
        self.calls.append((args.op_id, args.name.name, args.async_op, args.root, *shapes))

    def after(self, args) -> None:
        has_work = args.work is not None
        self.ended.append((args.op_id, args.name.name, args.async_op, has_work))

    def __enter__(self) -> Recorder:
        self.group.register_pre_hook(HOOK, self.before)
        self.group.register_post_hook(HOOK, self.after)
        return self

    def __exit__(self, *error) -> None:
        self.group.unregister_pre_hook(HOOK)
        self.group.unregister_post_hook(HOOK)


@both(2, 3)
def test_hooks_are_called_as_by_gloo(world):
    recorders = []
    for group in (gloo_group(world.size), group_of(world.size)):
        with Recorder(group) as recorder:
            every_call(group, world.rank, world.size)
        num_calls = len(recorder.calls)
        dist.barrier(group)
        assert len(recorder.calls) == num_calls
        assert [call[0] for call in recorder.calls] == [end[0] for end in recorder.ended]
        assert len({call[0] for call in recorder.calls}) == num_calls
        recorders.append(recorder)
    gloo, ours = recorders
    for of_gloo, of_ours in zip(gloo.calls, ours.calls, strict=False):
        assert of_ours[1:] == of_gloo[1:], f"{of_ours} against {of_gloo}"
    assert len(ours.calls) == len(gloo.calls), (ours.calls, gloo.calls)
    assert [end[1:] for end in ours.ended] == [end[1:] for end in gloo.ended]


@both(2)
def test_a_hook_that_raises_keeps_its_call_from_being_made(world):
    group = group_of(2)

    def refuse(args) -> None:
        raise KeyError("no")

    plain = type(group).allreduce
    group.register_pre_hook(HOOK, refuse)
    with pytest.raises(KeyError, match="no"):
        dist.all_reduce(torch.ones(1), group=group)
    group.unregister_pre_hook(HOOK)
    assert group.allreduce.__func__ is plain
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total == 2


@both(2)
def test_one_call_of_torch_calls_hooks_once(world):
    """Also where a method of the group uses another one."""
    recorders = []
    for group in (gloo_group(2), group_of(2)):
        with Recorder(group) as recorder:
            dist.all_gather_object([None] * 2, "x" * world.rank, group)
            dist.all_gather_coalesced([[torch.empty(1)], [torch.empty(1)]], [torch.ones(1)], group)
        recorders.append([call[1] for call in recorder.calls])
    assert recorders[0] == recorders[1] and len(recorders[0]) == 3
    with Recorder(group) as recorder:
        root = torch.empty(4) if world.rank == 0 else None
        group.gather_single(root, torch.ones(2), root=0).wait()
    assert [call[1] for call in recorder.calls] == ["GATHER"]
    assert recorder.calls[0][3] == 0


@both(2)
def test_nan_check(world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DIST_NAN_CHECK", "1")
        group = dist.new_group([0, 1], backend="pipecomm")
    bad = torch.tensor([1, float("nan")])
    for call in (dist.all_reduce, lambda tensor, group: dist.all_gather([bad] * 2, tensor, group)):
        with pytest.raises(RuntimeError, match="NaN"):
            call(bad, group=group)
    dist.all_gather([bad.clone(), bad.clone()], torch.ones(2), group)  # only what is sent is checked
    counts = torch.ones(2, dtype=torch.int64)
    dist.all_reduce(counts, group=group)
    assert counts.tolist() == [2, 2]
