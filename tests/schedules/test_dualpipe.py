"""DualPipe's classes on real ranks against the unsplit model."""

from __future__ import annotations

import contextlib
import copy
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from pipelines import WIDTH, Block, Pipeline, ReentrantBlock, StoringBlock, squared_error
from ranks import on_ranks
from torch import nn

from pipecomm_ext import PipeCommAborted, PipeCommError
from pipecomm_ext.schedules import (
    DualPipe,
    DualPipeV,
    Executor,
    get_plan,
    set_p2p_tensor_dtype,
    set_p2p_tensor_shapes,
)

ROWS = 2  # of a chunk


def batch(num_rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, WIDTH, generator=generator, dtype=torch.float64)


def unsplit(layers, x, labels, num_chunks):
    """Losses by chunk, and all outputs; adds gradients if grad mode is on."""
    losses, outputs = [], []
    for chunk, chunk_labels in zip(x.chunk(num_chunks), labels.chunk(num_chunks), strict=True):
        output = nn.Sequential(*layers)(chunk)
        loss = squared_error(output, chunk_labels)
        if torch.is_grad_enabled():
            loss.backward()
        losses.append(loss.detach())
        outputs.append(output.detach())
    return torch.stack(losses), torch.cat(outputs)


def assert_gradients(pipe, whole, depths) -> None:
    for module, depth in zip(pipe.module, depths, strict=True):
        for mine, theirs in zip(module.parameters(), whole[depth].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)
    pipe.close()


@on_ranks(2, 4)
@pytest.mark.parametrize(
    "block", [Block, StoringBlock, ReentrantBlock], ids=["plain", "storing", "reentrant"]
)
def test_dualpipe_trains_and_infers_as_the_unsplit_model(world, block):
    P = world.size
    mapping = list(reversed(range(P))) if block is Block else None
    rank = mapping[world.rank] if mapping else world.rank
    whole = [block(depth) for depth in range(P)]
    modules = nn.Sequential(copy.deepcopy(whole[rank]), copy.deepcopy(whole[P - 1 - rank]))
    pipe = DualPipe(modules, rank_mapping=mapping)
    assert (pipe.rank, pipe.is_first_rank, pipe.is_last_rank) == (rank, rank == 0, rank == P - 1)
    num_chunks = 2 * P + 2
    half = num_chunks // 2
    x0, x1 = (batch(half * ROWS, seed) for seed in (1, 2))  # of the first rank, of the last rank
    l0, l1 = (batch(half * ROWS, seed) for seed in (3, 4))  # labels of x0, labels of x1
    inputs = {0: (x0,), P - 1: (x1,)}.get(rank, ())
    labels = {0: [l1], P - 1: [l0]}.get(rank, [])
    for is_training in (True, True, False):
        with torch.set_grad_enabled(is_training):
            loss, outputs = pipe.step(
                *inputs, num_chunks=num_chunks, criterion=squared_error, labels=labels, return_outputs=True
            )
            expected = {P - 1: unsplit(whole, x0, l0, half), 0: unsplit(whole, x1, l1, half)}.get(rank)
        if expected is None:
            assert loss is None and outputs is None
        else:
            assert loss.shape == (half,) and not loss.requires_grad and not outputs.requires_grad
            torch.testing.assert_close(loss, expected[0])
            torch.testing.assert_close(outputs, expected[1])
        if not is_training:
            with torch.no_grad():
                loss, outputs = pipe.step(*inputs, num_chunks=num_chunks, return_outputs=rank == 0)
            assert loss is None and (outputs is None) == (rank != 0)
    pipe.sum_replica_gradients()
    assert_gradients(pipe, whole, (rank, P - 1 - rank))


@on_ranks(1, 2, 3)
def test_dualpipev_trains_as_the_unsplit_model(world):
    P, rank = world.size, world.rank
    for block, num_chunks in ((Block, 2 * P), (StoringBlock, 2 * P + 3), (ReentrantBlock, 2 * P)):
        whole = [block(depth) for depth in range(2 * P)]
        pipe = DualPipeV(nn.Sequential(copy.deepcopy(whole[rank]), copy.deepcopy(whole[2 * P - 1 - rank])))
        x, labels = batch(num_chunks * ROWS, 1), batch(num_chunks * ROWS, 2)
        given = ((x,), [labels]) if rank == 0 else ((), [])
        loss, outputs = pipe.step(
            *given[0], num_chunks=num_chunks, criterion=squared_error, labels=given[1], return_outputs=True
        )
        expected = unsplit(whole, x, labels, num_chunks)
        if rank == 0:
            torch.testing.assert_close(loss, expected[0])
            torch.testing.assert_close(outputs, expected[1])
        else:
            assert loss is None and outputs is None
        assert_gradients(pipe, whole, (rank, 2 * P - 1 - rank))


class Pair(nn.Module):
    """Two inputs of which one may be None, two outputs along dim 1."""

    def forward(self, x, mask):
        return (x, mask) if mask is not None else (x, x[:, :0] > 0)


class WithNone(nn.Linear):
    def forward(self, x, mask=None):
        return super().forward(x), None


@on_ranks(1)
def test_an_output_that_is_none(world):
    pipe = DualPipeV((WithNone(3, 3), WithNone(3, 3)))
    loss = {"criterion": lambda hidden, mask: hidden.sum()}
    for is_training in (True, False):
        with torch.set_grad_enabled(is_training):
            _, (hidden, mask) = pipe.step(torch.ones(4, 3), num_chunks=2, return_outputs=True, **loss)
        assert hidden.shape == (4, 3) and mask is None
    pipe.close()


@on_ranks(3)
def test_a_group_smaller_than_the_world_and_modules_without_parameters(world):
    group = dist.new_group([2, 0])
    if world.rank == 1:
        with pytest.raises(ValueError, match="not a member of the group"):
            DualPipe((Pair(), Pair()), process_group=group)
        return
    pipe = DualPipe((Pair(), Pair()), batch_dim=1, process_group=group, rank_mapping=[1, 0])
    assert pipe.rank == {0: 1, 2: 0}[world.rank]
    x = batch(WIDTH, pipe.rank)
    with torch.no_grad():
        loss, outputs = pipe.step(x[:, :4], None, num_chunks=4, return_outputs=True)
    other = batch(WIDTH, 1 - pipe.rank)
    assert loss is None and type(outputs) is tuple
    assert outputs[0].equal(other[:, :4]) and outputs[1].dtype == torch.bool
    pipe.close()


@on_ranks(2)
def test_losses_keep_their_shape(world):
    """As the criterion returns them: one element in training, any shape in inference (reduction="none")."""
    pipe = DualPipe((Block(world.rank), Block(1 - world.rank)))
    x, labels = batch(4 * ROWS, world.rank), batch(4 * ROWS, 5)

    def step(criterion):
        return pipe.step(x, num_chunks=4, criterion=criterion, labels=[labels[: 2 * ROWS].repeat(2, 1)])[0]

    assert step(squared_error).shape == (2,)
    kept = step(lambda *args: squared_error(*args).reshape(1))
    assert kept.shape == (2, 1) and torch.equal(kept[:, 0], step(squared_error))
    with torch.no_grad():
        vector = step(nn.MSELoss(reduction="none"))
        assert vector.shape == (2, 2 * ROWS, WIDTH)
        torch.testing.assert_close(vector.mean((1, 2)), kept[:, 0])
    with world.breaking(), pytest.raises(PipeCommError, match="must be a tensor of one element, got shape"):
        step(nn.MSELoss(reduction="none"))
    pipe.close()


@on_ranks(4)
def test_what_a_rank_tells_about_itself(world):
    pipe = DualPipe((Block(0), Block(1)), rank_mapping=[3, 2, 1, 0])
    assert pipe.is_in_second_half == (world.rank < 2) and pipe.is_middle_rank == (world.rank in (1, 2))
    assert not pipe.overlapped_forward_backward
    assert DualPipe((StoringBlock(0), StoringBlock(1))).overlapped_forward_backward
    assert not DualPipeV((StoringBlock(0), Block(1))).overlapped_forward_backward


@on_ranks(2)
def test_sums_are_made_once_whatever_executor_makes_them(world):
    """DualPipe has an Executor for each number of chunks, and a failure replaces them."""
    modules = (Block(world.rank), Block(1 - world.rank))
    pipe, x, labels = DualPipe(modules), batch(8, 1), batch(8, 2)

    def step(num_chunks):
        pipe.step(x, num_chunks=num_chunks, criterion=squared_error, labels=[labels])

    for num_chunks in (4, 8):
        step(4)
        pipe.sum_replica_gradients()
        step(num_chunks)
        with world.breaking(), pytest.raises((ValueError, PipeCommAborted), match="have not been zeroed"):
            pipe.sum_replica_gradients()
        pipe.zero_grad(set_to_none=num_chunks == 4)
        step(num_chunks)
        pipe.sum_replica_gradients()
        pipe.zero_grad()
    plan = get_plan("dualpipe", 2, 4)
    pair = [Executor(plan, modules, loss_fn=squared_error) for _ in range(2)]
    for executor in pair:
        inputs, targets = {plan.chains[world.rank][0]: x}, {plan.chains[1 - world.rank][-1]: labels}
        executor.step(inputs, targets)
    pair[0].sum_replica_gradients()
    with world.breaking(), pytest.raises((ValueError, PipeCommAborted), match="have not been zeroed"):
        pair[1].sum_replica_gradients()
    for executor in (pipe, *pair):
        executor.close()


@on_ranks(2)
def test_wrong_steps_raise_on_all_ranks_and_the_next_step_works(world):
    pipe = DualPipe((Block(world.rank), Block(1 - world.rank)))
    x, labels = batch(4, 1), batch(4, 2)

    def step(*inputs, **changes):
        options = {"num_chunks": 4, "criterion": squared_error, "labels": [labels], **changes}
        return pipe.step(*inputs, **options)

    def declared(declare, value):
        declare(value)
        try:
            return step(x)
        finally:
            declare(None)

    cases = [
        (lambda: step(x[:3]), ValueError, "inputs[0] of batch size 3 (dim 0) does not divide into 2"),
        (lambda: step(x, labels=[labels[:1]]), ValueError, "labels[0] of batch size 1"),
        (lambda: step(x, labels=labels), TypeError, "labels must be a list of tensors, not Tensor"),
        (lambda: step("x"), TypeError, "inputs[0] must be a tensor or None, not str"),
        (lambda: step(x, criterion=None), ValueError, "give step() a criterion"),
        (lambda: step(x, num_chunks=0), ValueError, "at least twice the 2 ranks, got 0"),
        (lambda: step(x, num_chunks=5), ValueError, "expected an even number"),
        (lambda: declared(set_p2p_tensor_shapes, [(9, WIDTH)]), PipeCommError,
         "set_p2p_tensor_shapes declared [[9, 6]]"),
        (lambda: declared(set_p2p_tensor_dtype, torch.float32), PipeCommError,
         "set_p2p_tensor_dtype declared torch.float32"),
        (lambda: step(x, criterion=lambda *_: 1 / 0), PipeCommError, "ZeroDivisionError"),
    ]  # fmt: skip
    for call, kind, message in cases:
        with world.breaking(), pytest.raises(kind if world.rank == 0 else (PipeCommAborted, kind)) as caught:
            call() if world.rank == 0 else step(x)
        assert message in str(caught.value), str(caught.value)
        loss, _ = step(x)
        assert loss.shape == (2,)
    for _ in range(30):  # wrong on all ranks: each reports its own, never the other's abort
        with world.breaking(), pytest.raises(ValueError, match="does not divide into 2"):
            step(x[:3])
    assert step(x)[0].shape == (2,)
    pipe.close()
    with pytest.raises(ValueError, match=r"call step\(\) first"):
        pipe.sum_replica_gradients()


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:clip_grad_norm_ of dualpipe before")
def test_failures_after_a_step_reach_all_ranks_and_the_next_step_works(world):
    pipe = DualPipe((Block(world.rank), Block(1 - world.rank)))
    x, labels = batch(4, 1), batch(4, 2)

    def step():
        pipe.zero_grad()
        return pipe.step(x, num_chunks=4, criterion=squared_error, labels=[labels])[0]

    with pytest.raises(ValueError, match=r"call step\(\) first"):
        pipe.sum_replica_gradients()
    expected = step()
    pipe.sum_replica_gradients()
    with pytest.raises(ValueError, match="must be called once"):
        pipe.sum_replica_gradients()
    assert pipe.executor.clip_grad_norm_(1.0).isfinite()  # nothing has been aborted

    def fail(*_):
        raise MemoryError("no memory")

    for call in (lambda: pipe.executor.clip_grad_norm_(1.0), pipe.sum_replica_gradients):
        step()
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == 0:
                patch.setattr(torch.nn.utils, "get_total_norm", fail)
                patch.setattr(torch.Tensor, "contiguous", fail)
            with world.breaking(), pytest.raises((MemoryError, PipeCommAborted), match="no memory"):
                call()
        torch.testing.assert_close(step(), expected, rtol=0, atol=0)

    def fail_to_clip_on_rank_0():
        with world.breaking(), pytest.MonkeyPatch.context() as patch:
            if world.rank == 0:
                patch.setattr(torch.nn.utils, "get_total_norm", fail)
                with pytest.raises(MemoryError):
                    pipe.executor.clip_grad_norm_(1.0)
            else:  # does not clip, and gets the error in its next step
                while pipe.executor.communicator.failure is None:
                    time.sleep(0.001)
                with pytest.raises(PipeCommAborted, match="no memory"):
                    step()

    fail_to_clip_on_rank_0()
    if world.rank == 0:  # whose batches would be those before
        with pytest.raises(PipeCommAborted, match="rank 1 has given up this step, its number 6,"):
            step()
    torch.testing.assert_close(step(), expected, rtol=0, atol=0)
    fail_to_clip_on_rank_0()
    pipe.close()  # on all ranks, which have agreed on the batch to go on with
    torch.testing.assert_close(step(), expected, rtol=0, atol=0)
    pipe.close()


@on_ranks(3)
def test_wrong_constructions(world):
    blocks = (Block(0), Block(1))
    with pytest.raises(ValueError, match="an even number of ranks, the group has 3"):
        DualPipe(blocks)
    for pair in (blocks, list(blocks), nn.ModuleList(blocks), iter(blocks)):
        assert list(DualPipeV(pair).module) == list(blocks)
    for wrong in (blocks[:1], nn.Sequential(*blocks, Block(2)), Block(0), None):
        with pytest.raises(ValueError, match="the two modules of this rank"):
            DualPipeV(wrong)
    with pytest.raises(ValueError, match="rank_mapping must name each pipeline rank 0..2 once"):
        DualPipeV(blocks, rank_mapping=[0, 1, 1])
    with pytest.raises(TypeError, match="not str"):
        set_p2p_tensor_dtype("float32")


def test_a_star_import_gives_the_names():
    names = {}
    exec("from pipecomm_ext.schedules import *", names)
    assert {"DualPipe", "DualPipeV", "WeightGradStore", "set_p2p_tensor_shapes"} <= set(names)


class Normed(Block):
    def __init__(self, depth: int):
        super().__init__(depth)
        self.batch_norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)

    def forward(self, x):
        return super().forward(self.batch_norm(x))


@on_ranks(2)
def test_buffers_of_copies_that_change_are_a_warning_until_they_are_averaged(world):
    pipe = DualPipe(nn.Sequential(Normed(world.rank), Normed(1 - world.rank)))
    with pytest.raises(ValueError, match="there are no gradients yet"):
        pipe.executor.clip_grad_norm_(1.0)
    x, labels = batch(2 * ROWS, world.rank), batch(2 * ROWS, 2 + world.rank)

    def step():
        pipe.step(x, num_chunks=4, criterion=squared_error, labels=[labels])

    for has_warned in (False, True):
        step()
        warned = pytest.warns(UserWarning, match="average_replica_buffers")
        with contextlib.nullcontext() if has_warned else warned as caught:
            pipe.sum_replica_gradients()
        assert has_warned or caught[0].filename == __file__
        pipe.zero_grad()
    before = [module.batch_norm.running_mean.clone() for module in pipe.module]
    pipe.executor.average_replica_buffers()
    means = [module.batch_norm.running_mean for module in pipe.module]
    both = [torch.empty_like(torch.stack(before)) for _ in range(2)]
    dist.all_gather(both, torch.stack(before))
    expected = (both[0] + both[1].flip(0)) / 2  # by depth, of which this rank has its own first
    torch.testing.assert_close(torch.stack(means), expected if world.rank == 0 else expected.flip(0))
    assert all(module.batch_norm.num_batches_tracked == 4 for module in pipe.module)
    pipe.close()


@on_ranks(2)
def test_buffers_that_are_loaded_before_the_first_step_are_no_warning(world):
    plan = get_plan("dualpipe", 2, 4)
    pipeline = Pipeline(plan, world.rank, Normed)
    with Executor(plan, pipeline.stages, loss_fn=squared_error) as executor:
        for module in pipeline.stages.values():
            module.load_state_dict(Normed(0).state_dict())
            module.batch_norm.eval()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipeline.step(executor)
            executor.sum_replica_gradients()
            pipeline.zero_grad()
            pipeline.step(executor)
            executor.sum_replica_gradients()
            pipeline.zero_grad()
        for module in pipeline.stages.values():
            module.batch_norm.train()
        pipeline.step(executor)
        with pytest.warns(UserWarning, match="average_replica_buffers") as caught:
            executor.sum_replica_gradients()
        assert caught[0].filename == __file__
