"""P2PCommunicator's nine methods: nothing swapped, nothing lost, whatever mode, shape form, edge and number of
stages."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from patterns import assert_same, pattern
from ranks import on_ranks

from pipecomm_ext import PipeCommMismatch
from pipecomm_ext.pipeline_parallel import P2PCommunicator, PipelineConfig

FORWARD, BACKWARD = "activation", "gradient"
MODES = {"batched": (True, False), "individual": (False, False), "overlapped": (False, True)}
SHAPE_FORMS = {
    "Size": torch.Size([3, 2, 4]),
    "tuple": (3, 2, 4),
    "list": [3, 2, 4],
    "list of shapes": [[3, 2, 4], (5,), torch.Size([2, 1, 1, 3])],
    "list of one": [(6, 2)],
}


class Stage:
    """One rank's calls in one mode, with the tensors that every rank can compute for every other one."""

    def __init__(self, world, mode: str, variable: bool, comm=None):
        is_batch, self.overlap = MODES[mode]
        self.rank, self.size, self.variable = world.rank, world.size, variable
        config = SimpleNamespace(
            pipeline_dtype=torch.float32, variable_seq_lengths=variable, batch_p2p_comm=is_batch
        )
        self.p2p = P2PCommunicator(comm or world.group, config)
        self.is_first, self.is_last = self.rank == 0, self.rank == self.size - 1
        self.previous, self.next = (self.rank - 1) % self.size, (self.rank + 1) % self.size

    def payload(self, sender: int, kind: str, shapes, step: str):
        """What `sender` sends in `step`: a tensor for a single shape, else a list; lengths vary if they may."""
        if not isinstance(shapes[0], int):
            return [self.payload(sender, kind, shape, f"{step} {idx}") for idx, shape in enumerate(shapes)]
        shape = list(shapes)
        if self.variable:
            shape[0] += (7 * sender + 3 * len(step) + (kind == BACKWARD)) % 5
        return pattern(tuple(shape), torch.float32, sender, kind, step)

    def call(self, method: str, *args):
        """The result; in overlapped mode after waiting for all handles, twice."""
        if not self.overlap:
            return getattr(self.p2p, method)(*args)
        result, handles = getattr(self.p2p, method)(*args, overlap_p2p_comm=True)
        assert set(handles) <= {"send_next", "recv_prev", "send_prev", "recv_next"}
        for handle in [*handles.values(), *handles.values()]:
            handle.wait()
        assert all(handle.is_completed() for handle in handles.values())
        return result

    def check(self, received, sender: int, kind: str, shapes, step: str) -> None:
        expected = self.payload(sender, kind, shapes, step)
        assert isinstance(received, list) == isinstance(expected, list), (step, kind)
        pairs = [(received, expected)]
        if isinstance(expected, list):
            pairs = list(zip(received, expected, strict=True))
        for got, sent in pairs:
            assert_same(got.detach(), sent, f"{step}: {kind} of rank {sender}")
            assert got.is_leaf and got.requires_grad and got.grad_fn is None

    def check_nothing(self, received, shapes) -> None:
        assert received is None if isinstance(shapes[0], int) else received == [None] * len(shapes)


def one_way(stage: Stage, shapes) -> None:
    """recv_forward, send_forward down the pipeline; recv_backward, send_backward up."""
    received = stage.call("recv_forward", shapes, stage.is_first)
    if stage.is_first:
        stage.check_nothing(received, shapes)
    else:
        stage.check(received, stage.previous, FORWARD, shapes, "one way")
    assert (
        stage.call("send_forward", stage.payload(stage.rank, FORWARD, shapes, "one way"), stage.is_last)
        is None
    )
    received = stage.call("recv_backward", shapes, stage.is_last)
    if stage.is_last:
        stage.check_nothing(received, shapes)
    else:
        stage.check(received, stage.next, BACKWARD, shapes, "one way")
    gradient = stage.payload(stage.rank, BACKWARD, shapes, "one way")
    assert stage.call("send_backward", gradient, stage.is_first) is None


def both_ways(stage: Stage, shapes) -> None:
    """The two sides of each pair of neighbours, first the pairs that begin with an even rank."""
    for parity in (0, 1):
        step = f"both ways {parity}"
        if stage.rank % 2 == parity:
            output = stage.payload(stage.rank, FORWARD, shapes, step)
            received = stage.call("send_forward_recv_backward", output, shapes, stage.is_last)
            peer, kind, is_edge = stage.next, BACKWARD, stage.is_last
        else:
            gradient = stage.payload(stage.rank, BACKWARD, shapes, step)
            received = stage.call("send_backward_recv_forward", gradient, shapes, stage.is_first)
            peer, kind, is_edge = stage.previous, FORWARD, stage.is_first
        if is_edge:
            stage.check_nothing(received, shapes)
        else:
            stage.check(received, peer, kind, shapes, step)


def shifts(stage: Stage, shapes, is_ring: bool) -> None:
    """Every rank sends on and receives, per direction and both at once; as a ring, or with open ends."""
    name = f"shift {is_ring}"
    to_next, to_previous = is_ring or not stage.is_last, is_ring or not stage.is_first
    output = stage.payload(stage.rank, FORWARD, shapes, name) if to_next else None
    gradient = stage.payload(stage.rank, BACKWARD, shapes, name) if to_previous else None
    from_previous, from_next = to_previous, to_next
    received = stage.call("send_forward_recv_forward", output, from_previous, shapes)
    grad_received = stage.call("send_backward_recv_backward", gradient, from_next, shapes)
    both = stage.call(
        "send_forward_backward_recv_forward_backward", output, gradient, from_previous, from_next, shapes
    )
    assert isinstance(both, tuple) and len(both) == 2
    for got, grad in [(received, grad_received), both]:
        if from_previous:
            stage.check(got, stage.previous, FORWARD, shapes, name)
        else:
            assert got is None
        if from_next:
            stage.check(grad, stage.next, BACKWARD, shapes, name)
        else:
            assert grad is None


@on_ranks(2, 3, 4, 5)
@pytest.mark.parametrize("variable", [False, True], ids=["fixed", "variable"])
@pytest.mark.parametrize("mode", MODES)
def test_every_method_with_every_shape_form_at_every_stage(world, mode, variable):
    stage = Stage(world, mode, variable)
    for shapes in SHAPE_FORMS.values():
        one_way(stage, shapes)
        both_ways(stage, shapes)
        shifts(stage, shapes, is_ring=True)
        shifts(stage, shapes, is_ring=False)
