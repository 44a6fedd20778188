"""What all ranks see when a stage fails, or when a step or a construction is wrong on one of them."""

from __future__ import annotations

import contextlib
import time
import warnings

import pytest
import torch
from pipelines import (
    WIDTH,
    Block,
    Failing,
    Pipeline,
    batches,
    executor_of,
    make_executor,
    plan_named,
    prepared,
    refused_by_one,
    squared_error,
)
from ranks import on_ranks
from torch import nn

from pipecomm_ext import PipeCommAborted, PipeCommMismatch
from pipecomm_ext.runtime import plan_loop
from pipecomm_ext.schedules import DualPipe, Executor, Plan, StageError, get_plan

pytestmark = pytest.mark.filterwarnings("ignore:.*micro-batches are fewer than the stages")


@on_ranks(3)
@pytest.mark.parametrize("failing_rank", [0, 1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_a_stage_reaches_all_ranks(world, where, failing_rank):
    plan = plan_named("one_f_one_b", world.size)
    pipeline = Pipeline(plan, world.rank, Failing)
    if world.rank == failing_rank:
        pipeline.stages[world.rank].where = where
    executor = make_executor(world, plan, pipeline, communicator=None)
    expected = StageError if world.rank == failing_rank else PipeCommAborted
    with world.breaking(), pytest.raises(expected) as caught:
        pipeline.step(executor)
    text, action = str(caught.value), f"{'F' if where == 'forward' else 'B'}{failing_rank}.2"
    assert action in text and "one_f_one_b" in text and "KeyError: 'no such expert'" in text, text
    assert caught.value.origin_rank == failing_rank
    if world.rank == failing_rank:
        assert str(caught.value.action) == action
        assert isinstance(caught.value.__cause__, KeyError)
    # It makes a new communicator of its own: the next step works.
    pipeline.set_data(seed=2)
    losses = pipeline.step(executor).losses
    pipeline.assert_losses(losses, pipeline.run_whole(backward=False))
    executor.close()


@on_ranks(4)
def test_a_communicator_that_was_given_has_failed_for_good(world):
    plan = plan_named("zb_v", world.size)
    pipeline = Pipeline(plan, world.rank, Failing)
    if world.rank == 0:
        pipeline.stages[0].where = "forward"
    with world.broken_comm(channels=4) as comm:
        executor = make_executor(world, plan, pipeline, communicator=comm)
        with world.breaking(), pytest.raises(StageError if world.rank == 0 else PipeCommAborted):
            pipeline.step(executor)
        with pytest.raises(PipeCommAborted):
            pipeline.step(executor)


def skip_failed_batches(step, communicator, num_batches: int = 6) -> list[bool]:
    """A usual loop; returns which batches have succeeded. A rank has raised by the fourth one."""
    outcomes = []
    for number in range(num_batches):
        while number == 3 and all(outcomes) and communicator().failure is None:
            time.sleep(0.001)
        try:
            step(number)
            outcomes.append(True)
        except (StageError, PipeCommAborted) as error:
            assert "no such expert" in str(error) or "has given up" in str(error), str(error)
            outcomes.append(False)
    return outcomes


@on_ranks(2, 3)
@pytest.mark.parametrize("is_training", [True, False])
def test_a_loop_that_skips_failed_batches_keeps_the_batches_of_ranks_together(world, is_training):
    """The last backward of the second step fails on rank 0, whose neighbour has finished that step; forward
    only the second step fails on the last rank, when rank 0 is ahead by some steps."""
    plan = plan_named("one_f_one_b", world.size)
    pipeline = Pipeline(plan, world.rank, Failing, last_rows=None)
    failing_rank, num_micros = 0 if is_training else world.size - 1, plan.micros_per_chain
    if world.rank == failing_rank:
        stage = pipeline.stages[failing_rank]
        stage.where, stage.micro = (
            ("backward", 2 * num_micros - 1) if is_training else ("forward", num_micros)
        )
    executor = make_executor(world, plan, pipeline, communicator=None)

    def step(number: int) -> None:
        pipeline.set_data(seed=number)
        with torch.set_grad_enabled(is_training):
            losses = pipeline.step(executor).losses
        pipeline.assert_losses(losses, pipeline.run_whole(backward=False))

    with world.breaking():
        outcomes = skip_failed_batches(step, lambda: executor.communicator)
        assert outcomes[0] and outcomes[4:] == [True, True], outcomes
        assert world.rank != failing_rank or not outcomes[1]
        executor.close()


@on_ranks(2)
def test_wrong_steps_are_refused_on_all_ranks(world):
    plan = plan_named("one_f_one_b", 2, 4)
    pipeline = Pipeline(plan, world.rank, last_rows=None)
    executor = make_executor(world, plan, pipeline, communicator=None)
    inputs, targets = pipeline.of_my(0, pipeline.inputs), pipeline.of_my(-1, pipeline.targets)
    good = (inputs, targets)
    cases = [
        (0, (inputs and {0: inputs[0][:3]}, targets), ValueError, "inputs of stage 0 has 3 micro-batches"),
        (0, (None, targets), TypeError, "inputs of stage 0 must be a list of 4 micro-batches, not NoneType"),
        (0, ({"x": torch.ones(3, WIDTH)}, targets), ValueError, "its tensors have lengths [3] there"),
        (0, ({1: pipeline.inputs[0]}, targets), ValueError, "must be given for the stages [0], got [1]"),
        (1, (inputs, None), TypeError, "targets of stage 1 must be a list of 4 micro-batches"),
    ]
    for rank, arguments, kind, message in cases:
        error_type = kind if world.rank == rank else PipeCommAborted
        with world.breaking(), pytest.raises(error_type) as caught:
            executor.step(*(arguments if world.rank == rank else good))
        assert message in str(caught.value), str(caught.value)
        assert pipeline.step(executor).outputs is None or world.rank == 1  # it still works
    with world.breaking(), pytest.raises((ValueError, PipeCommAborted), match="run the same on all ranks"):
        with torch.set_grad_enabled(world.rank == 0):
            pipeline.step(executor)
    executor.close()


@on_ranks(2)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_steps_that_are_wrong_on_all_ranks_leave_a_given_communicator_usable(world, transport):
    plan = plan_named("one_f_one_b", 2, 4)
    pipeline = Pipeline(plan, world.rank, last_rows=None)
    comm = world.fresh_comm(channels=4, transport=transport)
    executor = make_executor(world, plan, pipeline, communicator=comm)
    inputs, targets = pipeline.inputs[0], pipeline.targets[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_loop, "REFUSAL_S", 30.0)
        for arguments, kind, message in [
            ((inputs[:3], targets[:3]), ValueError, "has 3 micro-batches, the plan has 4"),
            ((None, None), TypeError, "must be a list of 4 micro-batches, not NoneType"),
        ]:
            with pytest.raises(kind, match=message):
                executor.step(*arguments)
            pipeline.assert_losses(pipeline.step(executor).losses, pipeline.run_whole())
        pipeline.assert_gradients()
        expected = ValueError if world.rank == 0 else PipeCommAborted
        with world.breaking(), refused_by_one(), pytest.raises(expected, match="has 3 micro-batches"):
            executor.step(inputs[:3] if world.rank == 0 else inputs, targets)
        with pytest.raises(PipeCommAborted):  # the given one remains failed
            pipeline.step(executor)


LOSSES = {
    "detached": (lambda y, t: squared_error(y, t).detach(), "does not require grad, but the output"),
    "integer": (lambda y, t: squared_error(y, t).long(), r"\(torch.int64\) does not require grad"),
    "complex": (
        lambda y, t: squared_error(y, t) * (1 + 2j),
        "only for real scalar outputs, not torch.complex128",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1", "dualpipev"])
def test_losses_that_backward_would_refuse(world, loss, name):
    plan = plan_named(name, 2)
    loss_fn, message = LOSSES[loss]
    pipeline = Pipeline(plan, world.rank, loss_fn=loss_fn)
    executor = make_executor(world, plan, pipeline, communicator=None)
    owns_loss = any(plan.owner[chain[-1]] == world.rank for chain in plan.chains)
    expected = StageError if owns_loss else PipeCommAborted
    with world.breaking(), pytest.raises(expected, match=message) as caught:
        pipeline.step(executor)
    if owns_loss:
        assert isinstance(caught.value.__cause__, RuntimeError)
    with torch.no_grad():
        losses = pipeline.step(executor).losses  # without a backward any loss is valid
    assert (losses is not None) == owns_loss
    executor.close()


@on_ranks(2)
def test_wrong_results_of_stages_and_losses_are_explained(world):
    plan = plan_named("one_f_one_b", 2, 2)
    structures = "must be tensors and None, alone or in tuples, lists and dicts with"
    cases = [
        (0, lambda x: "text", squared_error, f"the outputs of stage 0 {structures}"),
        (1, nn.Identity(), lambda y, t: y, "must be a tensor of one element, got shape [3, 6]"),
        (1, nn.Identity(), lambda y, t: 1.0, "must be a tensor of one element, got float"),
    ]
    for rank, stage, loss_fn, message in cases:
        pipeline = Pipeline(plan, world.rank, last_rows=None)
        if world.rank == rank:
            pipeline.stages[rank] = stage
        executor = Executor(plan, pipeline.stages, loss_fn=loss_fn)
        expected = StageError if world.rank == rank else PipeCommAborted
        with world.breaking(), pytest.raises(expected) as caught:
            pipeline.step(executor)
        assert message in str(caught.value)
        executor.close()


@on_ranks(2)
def test_wrong_constructions_are_refused_on_all_ranks(world):
    comm = world.shared_comm(channels=4)
    plan = plan_named("one_f_one_b", 2)
    stages = [nn.Identity()]
    incomplete = Plan("bad", 2, 1, owner=[0, 1], compute=["F0.0", "F1.0 B1.0"])
    cases = [
        (("plan", stages), {}, TypeError, "plan must be a Plan, not str"),
        ((plan_named("gpipe", 3), stages), {}, ValueError, "for 3 ranks, the communicator has 2"),
        ((plan, []), {}, ValueError, "owns the stages [0], stages has 0 entries"),
        ((plan, {5: stages[0]}), {}, ValueError, "owns the stages [0], stages has [5]"),
        ((plan, ["module"]), {}, TypeError, "stage 0 must be a module or a callable, not str"),
        ((plan, nn.Identity()), {}, TypeError, "must be a mapping or a list of modules, not Identity"),
        ((plan, stages), {"loss_scale": "max"}, ValueError, '"sum", "mean" or a number, not \'max\''),
        ((plan, stages), {"rank_mapping": [0, 0]}, ValueError, "each pipeline rank 0..1 once"),
        ((incomplete, stages), {}, ValueError, "no backward"),
    ]
    for arguments, options, kind, message in cases:
        if world.rank == 0:
            with pytest.raises(kind) as caught:
                Executor(*arguments, communicator=comm, **options)
            assert message in str(caught.value), str(caught.value)
        else:
            with pytest.raises(PipeCommMismatch) as caught:
                Executor(plan, stages, communicator=comm)
            assert caught.value.origin_rank == 0 and message in str(caught.value), str(caught.value)
    shown = (
        r"rank 1 has another plan than rank 0: one_f_one_b for P=2, M=\d, and rank 0 has gpipe for P=2, M=\d;"
    )
    with pytest.raises(PipeCommMismatch, match=shown):
        Executor(plan_named(["gpipe", "one_f_one_b"][world.rank], 2), stages, communicator=comm)
    renamed = plan_named(["gpipe", "one_f_one_b"][world.rank], 2).replace(name="mine")
    with pytest.raises(PipeCommMismatch, match="rank 0 has mine for P=2, M=. with other actions; give"):
        Executor(renamed, stages, communicator=comm)
    with pytest.raises(
        PipeCommMismatch, match="another dynamic_shapes than rank 0: True, and rank 0 has False"
    ):
        Executor(plan, stages, communicator=comm, dynamic_shapes=world.rank == 1)
    with pytest.raises(ValueError, match="record_timeline=True"):
        Executor(plan, stages, communicator=comm).timeline()


@on_ranks(2)
def test_wrong_constructions_are_refused_on_all_ranks_over_communicators_of_their_own(world):
    """The refusal arrives although the executor that made it, and its communicator, are gone."""
    plan = plan_named("one_f_one_b", 2)
    for delay_s in (0, 0.3):
        with pytest.raises(PipeCommMismatch if world.rank else ValueError, match="stages has 0 entries"):
            if world.rank == 0:
                Executor(plan, [])
            else:
                Executor(plan, _SlowList([nn.Identity()], delay_s))
    pipeline = Pipeline(plan, world.rank)
    with Executor(plan, pipeline.stages, loss_fn=pipeline.loss_fn) as executor:
        pipeline.assert_losses(pipeline.step(executor).losses, pipeline.run_whole())


class _SlowList(list):
    """Makes its rank late for the collective of the constructor."""

    def __init__(self, stages, delay_s: float):
        super().__init__(stages)
        self.delay_s = delay_s

    def __iter__(self):
        time.sleep(self.delay_s)
        return super().__iter__()


@on_ranks(2)
def test_fewer_micro_batches_than_stages_is_a_warning(world):
    plan = plan_named("one_f_one_b", 2, 1)
    with pytest.warns(UserWarning, match="1 micro-batches are fewer than the stages"):
        executor_of(world, plan, [nn.Identity()])


class Reusing(nn.Module):
    """Returns a buffer that its next forward writes into: itself, a view of it, or a copy."""

    def __init__(self, form: str):
        super().__init__()
        self.form, self.out = form, torch.zeros(4, WIDTH, dtype=torch.float64)

    def forward(self, x):
        self.out[: len(x)] = x
        result = self.out[: len(x)] if self.form == "a view" else self.out
        return result.clone() if self.form == "a clone" else result


@on_ranks(2)
@pytest.mark.parametrize("form", ["itself", "a view", "a clone"])
def test_an_output_that_is_written_while_it_is_sent_is_refused(world, form):
    plan = get_plan("one_f_one_b", 2, 4)
    micros = batches(4, 1)
    with Executor(plan, [Reusing(form) if world.rank == 0 else Block(1)]) as executor:
        if form == "a clone":
            executor.eval(micros)
            return
        with (
            world.breaking(),
            pytest.raises((ValueError, PipeCommAborted), match="stage 0 has written into its"),
        ):
            executor.eval(micros)
            executor.eval(micros)  # a rank that is done with the first gets the error here


class Masking(nn.Module):
    """Writes into its piece of the batch, and passes it on."""

    def forward(self, x, mask):
        mask[:, 0] = 1
        return x, mask


@on_ranks(2)
def test_a_piece_of_a_batch_may_be_written_by_the_stage_that_gets_it(world):
    batch = (torch.ones(8, WIDTH, dtype=torch.float64), torch.zeros(8, 2))
    with Executor(
        get_plan("one_f_one_b", 2, 4), [Masking() if world.rank == 0 else lambda *x: x]
    ) as executor:
        if world.rank == 0:
            executor.eval(batch)
            assert batch[1][:, 0].all()
        else:
            assert all(mask[:, 0].all() for _, mask in executor.eval().outputs)
    pipe = DualPipe((Masking(), Masking()))
    with torch.no_grad():
        pipe.step(*batch, num_chunks=4)
    pipe.close()


class Filling(nn.Module):
    """Each micro-batch has a row of one buffer."""

    def __init__(self):
        super().__init__()
        self.rows, self.num_calls = torch.zeros(4, WIDTH, dtype=torch.float64), 0

    def forward(self, x):
        self.rows[self.num_calls] = x[0]
        self.num_calls += 1
        return self.rows[self.num_calls - 1]


@on_ranks(2)
def test_views_of_one_buffer_count_together(world):
    with Executor(get_plan("one_f_one_b", 2, 4), [Filling() if world.rank == 0 else Block(1)]) as executor:
        with (
            world.breaking(),
            pytest.raises((ValueError, PipeCommAborted), match="views of one tensor count as one"),
        ):
            executor.eval(batches(4, 1))
            executor.eval(batches(4, 1))  # a rank that is done with the first gets the error here


@on_ranks(2)
def test_means_of_unequal_micro_batches_are_a_warning(world):
    pipeline, executor = prepared(world, get_plan("one_f_one_b", 2, 4), loss_scale="mean")
    is_last = world.rank == 1
    with pytest.warns(UserWarning, match=r"\[3, 2\] rows") if is_last else contextlib.nullcontext():
        pipeline.step(executor)
    pipeline.set_data(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline.step(executor)
