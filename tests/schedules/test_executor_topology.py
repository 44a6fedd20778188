"""The executor on stages of several ranks each, against the unsplit model in one process."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from pipelines import WIDTH, Block, Failing, Pipeline, Rich, Selecting, plan_named, squared
from ranks import on_ranks
from relay_cases import piece, topology_of
from torch import nn

from pipecomm_ext import PipeCommAborted, PipeCommMismatch
from pipecomm_ext.schedules import Executor, StageError, get_plan

pytestmark = pytest.mark.filterwarnings("ignore:.*micro-batches are fewer than the stages")

ROWS = ("sharded", 0)
SCHEDULES = ("one_f_one_b", "zb_h1", "interleaved_1f1b")


def summed_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Unlike a mean, the sum of the losses of pieces is that of the whole."""
    return ((output - target) ** 2).sum()


class Stages(Pipeline):
    """A plan's stages of this rank, which may be one of several of its pipeline rank, each with all weights.

    Where the layout is sharded, it computes its piece of every micro-batch, and gradients and losses are
    those of the pieces.
    """

    def __init__(self, plan, topology, layout="replicated", layer=Block, loss_fn=summed_error, **options):
        self.topology = topology
        self.layouts = layout if isinstance(layout, list) else [layout] * plan.P
        super().__init__(plan, topology.get_vtp_my_stage_idx(), layer, loss_fn, **options)

    @property
    def layout(self):
        return self.layouts[self.rank]

    def of_my(self, end, data):
        """This rank's pieces of inputs and targets; losses, which have no dims, unchanged."""
        mine = super().of_my(end, data)
        return mine and {
            stage: [value if value.ndim == 0 else self.piece_of(value) for value in values]
            for stage, values in mine.items()
        }

    def piece_of(self, whole: torch.Tensor, layout=None) -> torch.Tensor:
        position = self.topology.get_tensor_model_parallel_rank()
        size = self.topology.get_tensor_model_parallel_world_size()
        return piece(whole, layout or self.layout, position, size)

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks of this stage if each has only its piece."""
        if self.layout != "replicated":
            dist.all_reduce(tensor, group=self.topology.get_tensor_model_parallel_group())
        return tensor

    def compare(self, executor) -> None:
        """Runs two steps that accumulate; compares losses of the last one, then gradients."""
        for _ in range(2):
            losses = self.step(executor).losses
            expected = self.run_whole()
        self.compare_losses(losses, expected)
        self.compare_gradients()

    def compare_losses(self, losses, expected) -> None:
        self.assert_losses(losses and [self.add_up(loss.clone()) for loss in losses], expected)

    def compare_gradients(self) -> None:
        for module in self.stages.values():
            for parameter in module.parameters():
                self.add_up(parameter.grad)
        self.assert_gradients()


def make(world, plan, stages: Stages, layout="replicated", **options) -> Executor:
    options.setdefault("communicator", world.shared_comm(channels=15))
    return Executor(
        plan, stages.stages, loss_fn=stages.loss_fn, topology=stages.topology, layout=layout, **options
    )


def compare_each(world, sizes, names, layout="replicated", layer=Block, **options) -> None:
    topology = topology_of(world, sizes)
    for name in names:
        plan = plan_named(name, topology.num_stages)
        stages = Stages(plan, topology, layout, layer)
        stages.compare(make(world, plan, stages, layout, **options))


# ---- schedules and layouts --------------------------------------------------------------------------------


def body_every_layout(world, sizes):
    mixed = ["replicated" if size == 1 else ROWS for size in sizes]
    for layout in ("replicated", ROWS, mixed):
        compare_each(world, sizes, SCHEDULES, layout)


@pytest.mark.parametrize("sizes", [[1, 2, 1], [2, 1], [1, 2], [2, 2]], ids=str)
def test_stages_of_several_ranks_equal_the_unsplit_model(ranks, sizes):
    """Accumulating steps; pieces of rows have different lengths, and the last micro-batch is smaller."""
    ranks.run(sum(sizes), body_every_layout, sizes)


@on_ranks(4)
def test_chains_that_meet_a_stage_twice_or_in_both_directions(world):
    for layout in ("replicated", ROWS):
        compare_each(world, [1, 2, 1], ["zb_v", "u_shaped"], layout)


@on_ranks(4)
def test_two_chains_with_two_copies_of_the_weights(world):
    topology = topology_of(world, [1, 3])
    plan = get_plan("dualpipe", 2, 8)
    stages = Stages(plan, topology)
    with make(world, plan, stages, communicator=None) as executor:
        stages.assert_losses(stages.step(executor).losses, stages.run_whole())
        with world.breaking(), pytest.raises((ValueError, PipeCommAborted), match="must be one rank each"):
            executor.sum_replica_gradients()
    for depth, whole in enumerate(stages.whole):
        (stage,) = (stage for stage in stages.stages if stages.depth_of[stage] == depth)
        for mine, expected in zip(stages.stages[stage].parameters(), whole.parameters(), strict=True):
            copies = [torch.empty_like(mine.grad) for _ in range(world.size)]
            dist.all_gather(copies, mine.grad)
            assert torch.equal(copies[1], copies[2]) and torch.equal(copies[1], copies[3])
            torch.testing.assert_close(copies[0] + copies[1], expected.grad)


@on_ranks(3)
def test_ranks_in_any_order_over_sockets_and_on_an_in_order_stream(world):
    compare_each(world, [[2, 0], [1]], SCHEDULES, ROWS)
    over_sockets = world.shared_comm(channels=15, transport="tcp")
    compare_each(world, [1, 2], SCHEDULES, ROWS, communicator=over_sockets)
    compare_each(world, [1, 2], SCHEDULES, communicator=over_sockets, grad_reduce="mean")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipecomm_ext.runtime.border_channels.BorderChannels.waits_on_device", True)
        compare_each(world, [1, 2], SCHEDULES, ROWS)


class Scale(nn.Module):
    """Elementwise: any piece of its input determines that piece of its output."""

    def __init__(self, depth: int):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.1 + depth, dtype=torch.float64))

    def forward(self, x):
        return torch.sin(x * self.factor)


@on_ranks(5)
def test_layouts_along_different_dims(world):
    """Columns to rows to replicated, and the other way round; 6 columns on 2 ranks, 3 rows on 2 or 3."""
    compare_each(world, [2, 2, 1], SCHEDULES, [("sharded", 1), ROWS, "replicated"], Scale)
    compare_each(world, [3, 2], SCHEDULES, [ROWS, ("sharded", 1)], Scale)


@on_ranks(4)
def test_borders_between_two_ranks_have_messages(world):
    topology = topology_of(world, [1, 1, 2])
    plan = plan_named("one_f_one_b", 3)
    stages = Stages(plan, topology)
    executor = make(world, plan, stages)
    stages.compare(executor)
    relayed = executor._mailbox._relayed
    assert relayed.link(("ACT", 0, 1)) is None and relayed.link(("GRAD", 1, 0)) is None
    assert relayed.link(("ACT", 1, 2)) is not None and relayed.link(("GRAD", 2, 1)) is not None


# ---- sizes that change ------------------------------------------------------------------------------------


@on_ranks(3)
def test_whole_sizes_are_told_apart_where_pieces_of_a_rank_are_equal(world):
    """Of 3 and of 4 rows the first of two ranks has 2; of 2 and of 3 rows the second one has 1."""
    for sizes, layout in (([2, 1], [ROWS, "replicated"]), ([1, 2], ["replicated", ROWS])):
        topology = topology_of(world, sizes)
        plan = plan_named("interleaved_1f1b", 2, 6)
        stages = Stages(plan, topology, layout)
        executor = make(world, plan, stages, layout)
        for step in range(3):
            for data in (stages.inputs, stages.targets):
                generator = torch.Generator().manual_seed(10 * step + (data is stages.inputs))
                rows = [1 + (micro + step) % 4 for micro in range(6)]
                data[0] = [torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in rows]
            with torch.no_grad():
                stages.compare_losses(stages.step(executor).losses, stages.run_whole(backward=False))
            stages.step(executor)
            stages.run_whole()
        stages.compare_gradients()


@on_ranks(3)
def test_shapes_that_depend_on_data(world):
    for sizes in ([2, 1], [1, 2]):
        plan = plan_named("one_f_one_b", 2, 6)
        stages = Stages(plan, topology_of(world, sizes), layer=Selecting, loss_fn=squared)
        stages.compare(make(world, plan, stages, dynamic_shapes=True))
        executor = make(world, plan, stages, communicator=None)
        with (
            world.breaking(),
            pytest.raises((ValueError, PipeCommAborted), match="dynamic_shapes=True"),
            executor,
        ):
            stages.step(executor)


class Named(Rich):
    """Passes them on in a dict."""

    def forward(self, x, ids=None, others=(None, ())):
        x, ids, *others = super().forward(x, ids, *others[1])
        return {"x": x, "others": (None, others), "ids": ids}


def first_error(output, target):
    return summed_error(output["x"] if isinstance(output, dict) else output[0], target)


@on_ranks(4)
def test_borders_of_several_tensors(world):
    topology = topology_of(world, [1, 2, 1])
    for name in ("one_f_one_b", "zb_v"):
        plan = plan_named(name, 3)
        for layer in (Rich, Named):
            stages = Stages(plan, topology, layer=layer, loss_fn=first_error)
            stages.compare(make(world, plan, stages))


# ---- gradients of a stage ---------------------------------------------------------------------------------


@on_ranks(3)
@pytest.mark.parametrize("grad_reduce", ["leader", "sum", "mean"])
def test_gradients_of_a_replicated_border_are_reduced(world, grad_reduce):
    """The ranks of the last stage compute different rows, so their gradients are parts of the whole one."""
    plan = plan_named("zb_h1", 2)
    stages = Stages(plan, topology_of(world, [1, 2]))
    stages.loss_fn = lambda *whole: summed_error(*(stages.piece_of(value, ROWS) for value in whole))
    warned = grad_reduce == "leader" and world.rank == 1
    with pytest.warns(UserWarning, match='give the Executor grad_reduce="sum"') if warned else nullcontext():
        stages.step(make(world, plan, stages, grad_reduce=grad_reduce))
    stages.loss_fn = summed_error
    if grad_reduce == "leader":
        stages.loss_fn = lambda *whole: summed_error(*(piece(value, ROWS, 0, 2) for value in whole))
    stages.run_whole(scale=0.5 if grad_reduce == "mean" else 1.0)
    if world.rank == 0:
        stages.assert_gradients()


# ---- failures ---------------------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("failing_rank", [0, 1, 2])
def test_an_exception_on_one_rank_of_a_stage_reaches_all(world, failing_rank):
    topology = topology_of(world, [1, 2, 1])
    plan = plan_named("one_f_one_b", 3)
    stages = Stages(plan, topology, layer=Failing)
    if world.rank == failing_rank:
        stages.stages[stages.rank].where = "forward"
    with make(world, plan, stages, communicator=None) as executor:
        expected = StageError if world.rank == failing_rank else PipeCommAborted
        with world.breaking(), pytest.raises(expected, match="no such expert") as caught:
            stages.step(executor)
        assert f"rank {failing_rank}: F{[0, 1, 1][failing_rank]}.2" in str(caught.value)
        assert caught.value.origin_rank == failing_rank
        stages.zero_grad()
        stages.compare(executor)  # it has made a new communicator of its own


class Uneven(nn.Module):
    """On the second rank of a stage, returns one row more than it got."""

    def __init__(self, position: int):
        super().__init__()
        self.position = position

    def forward(self, x):
        return torch.cat([x, x[:1]]) if self.position else x


def run_pieces_that_do_not_fit(world, layout):
    topology = topology_of(world, [2, 1])
    plan = plan_named("one_f_one_b", 2, 2)
    stages = Stages(plan, topology, layout)
    if stages.rank == 0:
        stages.stages[0] = Uneven(topology.get_tensor_model_parallel_rank())
    with make(world, plan, stages, layout, communicator=None) as executor, world.breaking():
        try:
            stages.step(executor)
        except (ValueError, PipeCommAborted) as error:
            return type(error), str(error)


@on_ranks(3)
def test_ranks_of_a_stage_that_return_different_structures_are_named(world):
    topology = topology_of(world, [2, 1])
    plan = plan_named("one_f_one_b", 2, 2)
    stages = Stages(plan, topology)
    if world.rank == 1:
        block = stages.stages[0]
        stages.stages[0] = lambda x: (block(x), None)
    with make(world, plan, stages, communicator=None) as executor:
        with world.breaking(), pytest.raises((ValueError, PipeCommAborted)) as caught:
            stages.step(executor)
        held = "(float64[3, 6] with gradient)"
        assert f'{held} on rank 0, {held} as ["tuple", 1, null] on rank 1; by' in str(caught.value)


@pytest.mark.parametrize("layout", ["replicated", [ROWS, "replicated"]], ids=str)
def test_ranks_whose_tensors_do_not_fit_are_named(ranks, layout):
    errors = ranks.run(3, run_pieces_that_do_not_fit, layout)
    assert ValueError in [kind for kind, _ in errors]
    for _, text in errors:
        assert "stage 0 made (float64[" in text and "on rank 1; by its layout" in text


@on_ranks(3)
def test_wrong_constructions_are_refused_on_all_ranks(world):
    topology = topology_of(world, [1, 2])
    comm = world.shared_comm(channels=15)
    plan, stages = plan_named("one_f_one_b", 2), [nn.Identity()]
    good = {"topology": topology}
    cases = [
        (plan_named("gpipe", 3), good, ValueError, "for 3 ranks, the topology has 2 stages"),
        (plan, {"topology": [1, 2]}, TypeError, "topology must be a PipelineTopology, not list"),
        (plan, good | {"layout": ["replicated"]}, ValueError, "one entry for each of the 2 stages, got 1"),
        (plan, good | {"layout": "rows"}, ValueError, 'must be "replicated" or ("sharded", dim)'),
        (plan, good | {"grad_reduce": "max"}, ValueError, "must be one of leader, sum, mean"),
        (plan, good | {"rank_mapping": [0, 1, 2]}, ValueError, "must be None with a topology"),
    ]
    for bad_plan, options, kind, message in cases:
        if world.rank == 0:
            with pytest.raises(kind) as caught:
                Executor(bad_plan, stages, communicator=comm, **options)
        else:
            with pytest.raises(PipeCommMismatch) as caught:
                Executor(plan, stages, communicator=comm, topology=topology)
            assert caught.value.origin_rank == 0
        assert message in str(caught.value), str(caught.value)
    for name, options in ("layout", {"layout": ROWS}), ("grad_reduce", {"grad_reduce": "sum"}):
        mine = good | options if world.rank == 1 else good
        with pytest.raises(PipeCommMismatch, match=f"rank 1 has another {name} than rank 0"):
            Executor(plan, stages, communicator=comm, **mine)


@on_ranks(3)
def test_communicators_that_cannot_serve_are_refused(world):
    topology = topology_of(world, [1, 2])
    plan, stages = plan_named("interleaved_1f1b", 2), [nn.Identity()] * 2
    for channels, message in ((3, "needs 6 or more"), (6, "need 8 channels, the communicator has 6")):
        with pytest.raises(ValueError, match=message):
            Executor(plan, stages, communicator=world.shared_comm(channels=channels), topology=topology)
    group = dist.new_group([0, 1])
    if world.rank < 2:
        with pytest.raises(ValueError, match=r"joins the ranks \[0, 1\], but the topology has \[0, 1, 2\]"):
            Executor(plan, stages, communicator=group, topology=topology)


@on_ranks(3)
def test_steps_that_disagree_about_gradients_are_refused(world):
    topology = topology_of(world, [2, 1])
    plan = plan_named("one_f_one_b", 2)
    stages = Stages(plan, topology)
    with make(world, plan, stages, communicator=None) as executor:
        with (
            world.breaking(),
            pytest.raises((ValueError, PipeCommAborted), match="run the same on all ranks"),
        ):
            with torch.set_grad_enabled(world.rank != 1):
                stages.step(executor)


# ---- measured ---------------------------------------------------------------------------------------------


@on_ranks(3)
def test_a_timeline_has_the_first_rank_of_each_stage(world):
    topology = topology_of(world, [1, 2])
    plan = plan_named("interleaved_1f1b", 2)
    stages = Stages(plan, topology)
    executor = make(world, plan, stages, record_timeline=True)
    stages.step(executor)
    spans = executor.timeline().spans
    assert [[span.action for span in row] for row in spans] == [list(row) for row in plan.compute]
