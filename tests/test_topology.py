"""Pipeline stages of any sizes: which rank is in which stage and chain, and what is refused."""

from __future__ import annotations

import datetime
import inspect

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from relay_cases import topology_of

from pipecomm_ext import PipeCommMismatch, parallel_state
from pipecomm_ext.parallel_state import PipelineTopology

# The argument, the stages, and the chains by rank. A stage's ranks need neither be neighbours nor in order;
# the first one of its list leads.
STAGES = [
    ([1, 2, 2], [[0], [1, 2], [3, 4]], [[0, 1, 3], [0, 1, 3], [0, 2, 4], [0, 1, 3], [0, 2, 4]]),
    ([[4, 1], [0], [2, 3]], [[4, 1], [0], [2, 3]], [[4, 0, 2], [1, 0, 3], [4, 0, 2], [1, 0, 3], [4, 0, 2]]),
    ([3, 2], [[0, 1, 2], [3, 4]], [[0, 3], [1, 4], [2, 3], [0, 3], [1, 4]]),
]


@on_ranks(5)
@pytest.mark.parametrize(("asked_for", "stages", "chains"), STAGES, ids=["sizes", "lists", "fewer ranks"])
def test_stages_and_neighbours(world, asked_for, stages, chains):
    topology, chain = topology_of(world, asked_for), chains[world.rank]
    [stage_idx] = [idx for idx, ranks in enumerate(stages) if world.rank in ranks]
    members = stages[stage_idx]
    assert topology.get_vtp_size_list() == [len(ranks) for ranks in stages]
    assert topology.get_vtp_stage_ranks() == stages
    assert topology.get_vtp_my_stage_idx() == topology.get_pipeline_model_parallel_rank() == stage_idx
    assert topology.get_pipeline_model_parallel_world_size() == topology.num_stages == len(stages)
    assert topology.get_tensor_model_parallel_rank() == members.index(world.rank)
    assert topology.get_tensor_model_parallel_world_size() == len(members)
    assert topology.is_vtp_stage_rank0() == (world.rank == members[0])
    assert topology.get_pipeline_model_parallel_next_rank() == chain[(stage_idx + 1) % len(chain)]
    assert topology.get_pipeline_model_parallel_prev_rank() == chain[stage_idx - 1]
    ranks_of = dist.get_process_group_ranks
    assert sorted(ranks_of(topology.get_pipeline_model_parallel_group())) == sorted(chain)
    assert sorted(ranks_of(topology.get_tensor_model_parallel_group())) == sorted(members)
    assert topology.is_pipeline_first_stage() == (stage_idx == 0)
    assert topology.is_pipeline_last_stage() == (stage_idx == len(stages) - 1)
    assert topology.communicator.size == 5 and f"I am in stage {stage_idx}" in repr(topology)
    total = torch.tensor([world.rank])  # the groups work
    dist.all_reduce(total, group=topology.get_tensor_model_parallel_group())
    assert total.item() == sum(members)


@on_ranks(3)
def test_virtual_stages(world):
    topology = PipelineTopology([1, 2], virtual_stages=2)
    with topology.communicator:
        assert topology.get_virtual_pipeline_model_parallel_world_size() == 2
        is_first = world.rank == 0
        for chunk in range(2):
            topology.set_virtual_pipeline_model_parallel_rank(chunk)
            assert topology.get_virtual_pipeline_model_parallel_rank() == chunk
            assert topology.is_pipeline_first_stage() == is_first
            assert topology.is_pipeline_last_stage() == (not is_first)
            assert topology.is_pipeline_first_stage(ignore_virtual=False) == (is_first and chunk == 0)
            assert topology.is_pipeline_last_stage(ignore_virtual=False) == (not is_first and chunk == 1)
        with pytest.raises(ValueError, match="virtual stage 2 is not in 0..1"):
            topology.set_virtual_pipeline_model_parallel_rank(2)


@on_ranks(2)
def test_the_timeout_is_that_of_the_communicator(world):
    topology = PipelineTopology([1, 1], timeout=7)
    assert topology.communicator.timeout == 7
    topology.close()
    with pytest.raises(ValueError if world.rank == 0 else PipeCommMismatch, match="timeout"):
        PipelineTopology([1, 1], timeout=-1 if world.rank == 0 else 7).communicator.barrier()


@on_ranks(3)
def test_part_of_the_world(world):
    """Over a group: ranks are those of the group, and ranks outside take no part."""
    group = dist.new_group([0, 2])
    if world.rank == 1:
        with pytest.raises(ValueError, match="not a member of the group"):
            PipelineTopology([1, 1], group=group)
        return
    topology = PipelineTopology([[1], [0]], group=group)
    with topology.communicator:
        assert topology.get_vtp_stage_ranks() == [[2], [0]]
        assert topology.get_pipeline_model_parallel_next_rank() == 2 - world.rank


@on_ranks(3)
def test_groups_that_all_ranks_make_after_part_of_the_world(world):
    """Ranks outside of the topology's group can still make groups of torch's with those inside."""
    group = dist.new_group([0, 2])
    if world.rank != 1:
        for _ in range(2):
            PipelineTopology([1, 1], group=group).close()
    for ranks in ([0, 1, 2], [0, 1]):
        new = dist.new_group(ranks, timeout=datetime.timedelta(seconds=20))
        if world.rank in ranks:
            dist.barrier(new)


DEFAULT_GETTERS = [
    name
    for name in parallel_state.__all__
    if name.startswith(("get_", "is_")) and name not in ("get_parallel_state", "get_pipeline_topology")
]


def test_every_getter_of_a_topology_is_a_function_of_the_default_one():
    getters = {name for name in vars(PipelineTopology) if name.startswith(("get_", "is_", "set_"))}
    assert getters == {*DEFAULT_GETTERS, "set_virtual_pipeline_model_parallel_rank"}


@on_ranks(3)
def test_default_topology(world):
    with pytest.raises(RuntimeError, match="there is no pipeline topology"):
        parallel_state.get_pipeline_topology()
    getters = {name: getattr(parallel_state, name) for name in DEFAULT_GETTERS}
    for getter in getters.values():
        with pytest.raises(RuntimeError, match=r"there is no pipeline topology; call .*initialize_pipeline"):
            getter()
    topology = parallel_state.initialize_pipeline([2, 1])
    try:
        for name, getter in getters.items():
            assert getter() == getattr(topology, name)(), name
            assert getter.__name__ == name and "self" not in inspect.signature(getter).parameters
        parallel_state.set_virtual_pipeline_model_parallel_rank(0)
        assert parallel_state.is_pipeline_first_stage(ignore_virtual=False) == (world.rank < 2)
        assert parallel_state.is_pipeline_last_stage(False) == (world.rank == 2)
        assert parallel_state.get_pipeline_topology() is topology
        with pytest.raises(RuntimeError, match="already"):
            parallel_state.initialize_pipeline([1, 2])
    finally:
        topology.close()
        parallel_state.destroy()
        parallel_state.destroy()
    with pytest.raises(RuntimeError, match="there is no pipeline topology"):
        parallel_state.get_pipeline_topology()


WRONG = [
    ([1, 1], ValueError, "3 together, the size of the group, not 2"),
    ([0, 3], ValueError, "1 rank or more each"),
    ([], ValueError, "stages must be a list"),
    (3, ValueError, "stages must be a list"),
    ([1, [1, 2]], ValueError, "all sizes or all lists"),
    ([[0], []], ValueError, "stage 1 has no ranks"),
    ([[0], [1, 3]], ValueError, "rank 3 of stage 1 is not in the group, whose ranks are 0..2"),
    ([[0, 1], [1, 2]], ValueError, "rank 1 is in stage 0 and in stage 1"),
    ([[0], [2]], ValueError, "ranks [1] of the group are in no stage"),
    ([1.5, 1.5], TypeError, "the size of a stage must be an int, not float"),
    ([True, 2], TypeError, "must be an int, not bool"),
]


@on_ranks(3)
def test_wrong_stages_on_all_ranks(world):
    for stages, kind, text in WRONG:
        with pytest.raises(kind) as raised:
            PipelineTopology(stages)
        assert text in str(raised.value), (stages, raised.value)
    with pytest.raises(ValueError, match="virtual_stages must be 1 or more, not 0"):
        PipelineTopology([1, 2], virtual_stages=0)


@on_ranks(3)
def test_wrong_stages_on_one_rank(world):
    kind, text = (
        (ValueError, "not 2") if world.rank == 1 else (PipeCommMismatch, "refused by rank 1: ValueError")
    )
    with pytest.raises(kind, match=text):
        PipelineTopology([1, 1] if world.rank == 1 else [1, 2])
    with pytest.raises(PipeCommMismatch, match=r"disagree about stages: \[\[0\], \[1, 2\]\] on rank 0"):
        PipelineTopology([2, 1] if world.rank == 2 else [1, 2])
    with pytest.raises(PipeCommMismatch, match="disagree about virtual_stages: 1 on rank 0, 2 on rank 2"):
        PipelineTopology([1, 2], virtual_stages=2 if world.rank == 2 else 1)
