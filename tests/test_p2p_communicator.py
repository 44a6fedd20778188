"""P2PCommunicator: nothing swapped, nothing lost, in every mode and for any number of stages."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from patterns import assert_same, pattern
from ranks import on_ranks

from pipecomm_ext import PipeCommMismatch, get_communicator
from pipecomm_ext.pipeline_parallel import P2PCommunicator, PipelineConfig
from pipecomm_ext.pipeline_parallel.shapes import is_single_shape

FORWARD, BACKWARD = "activation", "gradient"
MODES = {"batched": (True, False), "individual": (False, False), "overlapped": (False, True)}
FIXED_OR_VARIABLE = pytest.mark.parametrize("variable", [False, True], ids=["fixed", "variable"])
SHAPE_FORMS = {
    "Size": torch.Size([3, 2, 4]),
    "tuple": (3, 2, 4),
    "list": [3, 2, 4],
    "list of shapes": [[3, 2, 4], (5,), torch.Size([2, 1, 1, 3])],
    "list of one": [(6, 2)],
}


class Stage:
    """One rank's calls in one mode, with tensors that every rank can compute for every other one."""

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
        """What `sender` sends: a tensor for a single shape, else a list; lengths vary where allowed."""
        if not isinstance(shapes[0], int):
            return [self.payload(sender, kind, shape, f"{step} {idx}") for idx, shape in enumerate(shapes)]
        shape = list(shapes)
        if self.variable:
            shape[0] += (7 * sender + 3 * len(step) + (kind == BACKWARD)) % 5
        return pattern(tuple(shape), torch.float32, sender, kind, step)

    def call(self, method: str, *args):
        """Returns the result; in overlapped mode after waiting for all handles, twice."""
        if not self.overlap:
            return getattr(self.p2p, method)(*args)
        result, handles = getattr(self.p2p, method)(*args, overlap_p2p_comm=True)
        assert set(handles) <= {"send_next", "recv_prev", "send_prev", "recv_next"}
        for handle in [*handles.values(), *handles.values()]:
            handle.wait()
        assert all(handle.is_completed() for handle in handles.values())
        return result

    def check(self, received, is_absent: bool, sender: int, kind: str, shapes, step: str) -> None:
        """Asserts that `received` is what `sender` sent, or nothing."""
        if is_absent:
            assert received is None if isinstance(shapes[0], int) else received == [None] * len(shapes)
            return
        expected = self.payload(sender, kind, shapes, step)
        assert isinstance(received, list) == isinstance(expected, list), (step, kind)
        pairs = zip(received, expected, strict=True) if isinstance(expected, list) else [(received, expected)]
        for got, sent in pairs:
            assert_same(got.detach(), sent, f"{step}: {kind} of rank {sender}")
            assert got.is_leaf and got.requires_grad and got.grad_fn is None


def one_way(stage: Stage, shapes) -> None:
    """recv_forward, send_forward down the pipeline; recv_backward, send_backward up."""
    step = "one way"
    received = stage.call("recv_forward", shapes, stage.is_first)
    stage.check(received, stage.is_first, stage.previous, FORWARD, shapes, step)
    output = stage.payload(stage.rank, FORWARD, shapes, step)
    assert stage.call("send_forward", output, stage.is_last) is None
    received = stage.call("recv_backward", shapes, stage.is_last)
    stage.check(received, stage.is_last, stage.next, BACKWARD, shapes, step)
    gradient = stage.payload(stage.rank, BACKWARD, shapes, step)
    assert stage.call("send_backward", gradient, stage.is_first) is None


def both_ways(stage: Stage, shapes) -> None:
    """The two sides of each pair of neighbours, first the pairs that begin with an even rank."""
    for parity in (0, 1):
        step = f"both ways {parity}"
        if stage.rank % 2 == parity:
            output = stage.payload(stage.rank, FORWARD, shapes, step)
            received = stage.call("send_forward_recv_backward", output, shapes, stage.is_last)
            stage.check(received, stage.is_last, stage.next, BACKWARD, shapes, step)
        else:
            gradient = stage.payload(stage.rank, BACKWARD, shapes, step)
            received = stage.call("send_backward_recv_forward", gradient, shapes, stage.is_first)
            stage.check(received, stage.is_first, stage.previous, FORWARD, shapes, step)


def shifts(stage: Stage, shapes, is_ring: bool) -> None:
    """Every rank sends and receives, in each direction and both at once; as a ring, or with open ends."""
    step = f"shift {is_ring}"
    has_next, has_previous = is_ring or not stage.is_last, is_ring or not stage.is_first
    output = stage.payload(stage.rank, FORWARD, shapes, step) if has_next else None
    gradient = stage.payload(stage.rank, BACKWARD, shapes, step) if has_previous else None
    apart = (
        stage.call("send_forward_recv_forward", output, has_previous, shapes),
        stage.call("send_backward_recv_backward", gradient, has_next, shapes),
    )
    both = stage.call(
        "send_forward_backward_recv_forward_backward", output, gradient, has_previous, has_next, shapes
    )
    for activation, grad in (apart, both):
        if has_previous:
            stage.check(activation, False, stage.previous, FORWARD, shapes, step)
        if has_next:
            stage.check(grad, False, stage.next, BACKWARD, shapes, step)
        assert has_previous or activation is None
        assert has_next or grad is None


@on_ranks(2, 3, 4, 5)
@FIXED_OR_VARIABLE
@pytest.mark.parametrize("mode", MODES)
def test_every_method_with_every_shape_form_at_every_stage(world, mode, variable):
    over_sockets = world.shared_comm(transport="tcp", channels=4)
    for comm in (None, over_sockets) if world.size <= 3 else (None,):
        stage = Stage(world, mode, variable, comm)
        for shapes in SHAPE_FORMS.values():
            one_way(stage, shapes)
            both_ways(stage, shapes)
            shifts(stage, shapes, is_ring=True)
            shifts(stage, shapes, is_ring=False)


# ---- facts ------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_neighbours_are_global_ranks_and_the_ring_wraps(world):
    group = dist.new_group([0, 2], timeout=timedelta(seconds=30))
    if world.rank == 1:
        return
    config = PipelineConfig(pipeline_dtype=torch.float32, virtual_pipeline_model_parallel_size=2)
    p2p = P2PCommunicator(group, config)
    position = world.rank // 2
    assert (p2p.current_stage, p2p.total_stages) == (position, 2)
    assert p2p.next_rank == p2p.prev_rank == (2 if world.rank == 0 else 0)
    assert (p2p.is_pp_first_stage, p2p.is_pp_last_stage) == (position == 0, position == 1)
    assert p2p.virtual_pipeline_model_parallel_size == 2 and p2p.config is config
    received = p2p.send_forward_recv_forward(torch.full((2,), float(world.rank)), True, (2,))
    assert received.tolist() == [p2p.prev_rank] * 2
    p2p.close()
    dist.destroy_process_group(group)


@on_ranks(2)
def test_objects_of_a_group_share_connections_apart_from_those_of_other_calls(world):
    first, second = (P2PCommunicator(world.group, PipelineConfig()) for _ in range(2))
    assert first.communicator is second.communicator
    assert first.communicator is not get_communicator(world.group)


def test_what_is_a_single_shape():
    for shape in (torch.Size([]), torch.Size([2]), (1,), [3, 4], (0,)):
        assert is_single_shape(shape)
    for shapes in ((), [], [()], [(2,)], [torch.Size([1])], None, 3, [True], "12"):
        assert not is_single_shape(shapes)


# ---- what is moved ----------------------------------------------------------------------------------------


def p2p_of(world, **settings) -> P2PCommunicator:
    return P2PCommunicator(world.group, PipelineConfig(**{"pipeline_dtype": torch.float32, **settings}))


def to_next(p2p: P2PCommunicator, rank: int, tensors, shapes):
    """Rank 0 sends to rank 1, which gets the result."""
    if rank == 0:
        return p2p.send_forward(tensors, False)
    return p2p.recv_forward(shapes, False)


BOUNDARY = [
    pattern((3, 2, 8), torch.bfloat16, "hidden"),
    pattern((3, 2), torch.int64, "positions"),
    pattern((), torch.float32, "scalar"),
    pattern((0, 7), torch.bool, "empty"),
    pattern((2, 1, 3, 1, 2), torch.complex64, "five dims"),
]


@on_ranks(2)
@FIXED_OR_VARIABLE
def test_a_boundary_of_several_dtypes_and_ranks(world, variable):
    p2p = p2p_of(world, pipeline_dtype=[tensor.dtype for tensor in BOUNDARY], variable_seq_lengths=variable)
    shapes = [()] if variable else [tuple(tensor.shape) for tensor in BOUNDARY]
    received = to_next(p2p, world.rank, tuple(BOUNDARY), shapes)
    grads = [torch.full_like(t, 2) if t.dtype.is_floating_point or t.is_complex() else None for t in BOUNDARY]
    if world.rank == 1:
        for got, sent in zip(received, BOUNDARY, strict=True):
            assert_same(got.detach(), sent)
            assert got.requires_grad == (sent.is_floating_point() or sent.is_complex())
        p2p.send_backward(grads, False)
    else:
        for got, sent in zip(p2p.recv_backward(shapes, False), grads, strict=True):
            assert got is None if sent is None else torch.equal(got, sent)


@on_ranks(2)
@FIXED_OR_VARIABLE
def test_an_empty_list_is_no_message(world, variable):
    p2p = p2p_of(world, variable_seq_lengths=variable)
    assert p2p.recv_forward((), False) == p2p.recv_backward([], False) == []
    assert p2p.send_forward([], False) is None and p2p.send_backward((), False) is None
    assert p2p.send_forward_recv_backward([], [], False) == []
    received = to_next(p2p, world.rank, torch.ones(2), (2,))
    assert world.rank == 0 or received.tolist() == [1, 1]


@on_ranks(2)
@FIXED_OR_VARIABLE
def test_strides_of_any_kind_and_tensors_that_require_grad(world, variable):
    p2p = p2p_of(world, variable_seq_lengths=variable)
    base = torch.arange(48.0).reshape(4, 12).requires_grad_()
    views = [base.t(), base[:, ::3], base[1:2].expand(3, 12), base * 2]
    received = to_next(p2p, world.rank, views, [tuple(view.shape) for view in views])
    if world.rank == 1:
        for got, sent in zip(received, views, strict=True):
            assert got.is_contiguous() and torch.equal(got, sent)


@on_ranks(2)
def test_one_dtype_that_has_no_gradients(world):
    """A single pipeline_dtype applies to everything, including gradients."""
    for dtype in (torch.int32, torch.float64):
        p2p = p2p_of(world, pipeline_dtype=dtype)
        values = torch.arange(6).reshape(2, 3).to(dtype)
        if world.rank == 0:
            received = p2p.send_forward_recv_backward(values, (2, 3), False)
        else:
            received = p2p.send_backward_recv_forward(values, (2, 3), False)
        assert torch.equal(received, values) and received.requires_grad == dtype.is_floating_point


@on_ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_an_absent_gradient_arrives_as_none_or_as_zeros(world, mode):
    for variable in (False, True):
        stage = Stage(world, mode, variable)
        shapes = [(2, 3), (4,)]
        if world.rank == 0:
            stage.call("send_forward", [torch.ones(2, 3), torch.ones(4)], False)
            gradients = stage.call("recv_backward", shapes, False)
            assert torch.equal(gradients[0], torch.full((2, 3), 5.0))
            assert gradients[1] is None if variable else torch.equal(gradients[1], torch.zeros(4))
            stage.call("send_forward", torch.ones(3), False)
            gradient = stage.call("recv_backward", (3,), False)
            assert gradient is None if variable else torch.equal(gradient, torch.zeros(3))
        else:
            stage.call("recv_forward", shapes, False)
            stage.call("send_backward", [torch.full((2, 3), 5.0), None], False)
            stage.call("recv_forward", (3,), False)
            stage.call("send_backward", None, False)


@on_ranks(3)
def test_variable_shapes_of_many_messages_in_flight(world):
    """Headers are read in the order of their messages, in whatever order the caller waits."""
    p2p = p2p_of(world, variable_seq_lengths=True)
    sizes = [5, 0, 70_000, 1, 33, 12_000]
    sends = [
        (channel, [pattern(size, torch.float32, world.rank, channel)]) for size in sizes for channel in (0, 1)
    ]
    works, _ = p2p.post(sends, [])
    _, receipts = p2p.post([], [(channel, [()]) for _ in sizes for channel in (0, 1)])
    for idx in reversed(range(len(receipts))):
        channel = idx % 2
        sender = (world.rank - 1) % world.size if channel == 0 else (world.rank + 1) % world.size
        [received] = receipts[idx].wait()
        assert_same(received.detach(), pattern(sizes[idx // 2], torch.float32, sender, channel))
        assert receipts[idx].wait()[0] is received
    for work in works:
        work.wait()


# ---- errors -----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_wrong_arguments_are_refused_before_anything_is_sent(world):
    p2p, ones = p2p_of(world), torch.ones(2)
    mixed = p2p_of(world, pipeline_dtype=[torch.float32, torch.int64])
    for error, message, call in [
        (RuntimeError, "pipeline_dtype must be set",
         lambda: p2p_of(world, pipeline_dtype=None).recv_forward((2,), False)),
        (RuntimeError, "the tensor shape must be given", lambda: p2p.recv_forward(None, False)),
        (RuntimeError, "shape must be given",
         lambda: p2p_of(world, batch_p2p_comm=False).send_forward_recv_backward(ones, None, False)),
        (RuntimeError, "shape must be given",
         lambda: p2p_of(world, variable_seq_lengths=True).send_forward_recv_backward(ones, None, False)),
        (TypeError, "a shape must be a torch.Size", lambda: p2p.recv_backward(7, False)),
        (TypeError, "output_tensors must be a tensor, None", lambda: p2p.send_forward([ones, "x"], False)),
        (ValueError, "tensor 0 of 1 to be sent is None", lambda: p2p.send_forward(None, False)),
        (ValueError, "2 tensors are sent, but there are shapes for 1",
         lambda: p2p.send_backward_recv_forward([ones, ones], (2,), False)),
        (ValueError, "2 dtypes for 1 tensors", lambda: mixed.recv_forward((2,), False)),
        (TypeError, r"such as PipelineConfig\(\*\*config\), not a dict",
         lambda: P2PCommunicator(world.comm, {"pipeline_dtype": torch.float32})),
        (ValueError, "overlap_p2p_comm needs config.batch_p2p_comm=False",
         lambda: p2p.send_forward(ones, False, overlap_p2p_comm=True)),
    ]:  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    received = p2p.send_forward_recv_forward(torch.full((2,), float(world.rank)), True, (2,))
    assert received.tolist() == [1 - world.rank] * 2


@on_ranks(2)
def test_disagreement_raises_on_both_ends_and_the_pipeline_goes_on(world):
    p2p = p2p_of(world)
    for sent, shape in [(torch.ones(3), (4,)), (torch.ones(4, dtype=torch.float64), (4,))]:
        with pytest.raises(PipeCommMismatch, match="nothing was transferred"):
            to_next(p2p, world.rank, sent, shape)
    variable = p2p_of(world, variable_seq_lengths=True)
    if world.rank == 0:
        variable.send_forward([torch.ones(3), torch.ones(2)], False)
    else:
        with pytest.raises(PipeCommMismatch, match="2 tensors came from rank 0, where one was expected"):
            variable.recv_forward((1,), False)
    received = to_next(p2p, world.rank, torch.ones(4), (4,))
    assert world.rank == 0 or received.eq(1).all()


@on_ranks(2)
@pytest.mark.parametrize("num_expected", [1, 4])
def test_lists_of_different_lengths_do_not_shift_into_each_other(world, num_expected):
    """Shapes and dtypes agree, so only the lengths of the lists differ. The end with the longer list also
    raises, although its further tensors match no receive.
    """
    with world.broken_comm() as comm:
        p2p = P2PCommunicator(comm, PipelineConfig(pipeline_dtype=torch.float32))
        with pytest.raises(PipeCommMismatch, match="as part of another list of tensors"):
            to_next(p2p, world.rank, [torch.ones(2)] * 3, [(2,)] * num_expected)
        world.meet()
        p2p.abort("the lists differ")


@on_ranks(2)
def test_an_integer_member_of_a_boundary_has_no_gradient_to_send(world):
    p2p = p2p_of(world, pipeline_dtype=[torch.float32, torch.int64])
    shapes = [(2,), (3,)]
    to_next(p2p, world.rank, [torch.ones(2), torch.arange(3)], shapes)
    if world.rank == 1:
        with pytest.raises(ValueError, match="gradient 1 belongs to a tensor of torch.int64, which has none"):
            p2p.send_backward([torch.ones(2), torch.ones(3)], False)
        p2p.send_backward([torch.ones(2), None], False)
    else:
        gradients = p2p.recv_backward(shapes, False)
        assert gradients[0].tolist() == [1, 1] and gradients[1] is None


@on_ranks(2)
def test_a_communicator_in_the_place_of_a_group(world):
    comm = world.fresh_comm(channels=2)
    p2p = P2PCommunicator(comm, PipelineConfig(pipeline_dtype=torch.float32))
    assert p2p.communicator is comm
    assert to_next(p2p, world.rank, torch.ones(1), (1,)) is None or world.rank == 1
    with pytest.raises(ValueError, match="has 2 channels, and headers of variable shapes need 4"):
        P2PCommunicator(comm, PipelineConfig(variable_seq_lengths=True))


@on_ranks(2)
def test_timers_are_named_as_in_megatron(world):
    class Timers(list):
        def __call__(self, name, log_level=2):
            return SimpleNamespace(
                start=lambda: self.append(f"{name} {log_level}"), stop=lambda: self.append("stop")
            )

    timers = Timers()
    p2p = p2p_of(world, timers=timers)
    p2p.send_forward_backward_recv_forward_backward(torch.ones(1), torch.ones(1), True, True, (1,))
    to_next(p2p, world.rank, torch.ones(1), (1,))
    last = "forward-send 2" if world.rank == 0 else "forward-recv 2"
    assert p2p.recv_forward((1,), True) is None and p2p.send_forward(torch.ones(1), True) is None  # at edges
    with pytest.raises(ValueError, match="is None, and its shape is not known"):
        p2p.send_forward(None, False)
    started = ["forward-backward-send-forward-backward-recv 2", last, "forward-send 2"]
    assert timers == [event for name in started for event in (name, "stop")]
