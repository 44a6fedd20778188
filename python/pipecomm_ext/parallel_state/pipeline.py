"""Pipeline stages of any sizes: who is in which, who comes next, and the groups that this needs."""

from __future__ import annotations

import datetime
import operator
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ..communicator import DEFAULT_TIMEOUT_S, Communicator
from ..errors import PipeCommMismatch
from ..rendezvous import Rendezvous

# A link joins a stage and the next one. A rank is part of two links; three colours keep the messages of the
# two apart on every ring, each in both directions.
NUM_LINK_COLOURS = 3
NUM_RELAY_CHANNELS = 2 * NUM_LINK_COLOURS
# Behind them, those of messages between single ranks: activations, gradients.
NUM_CHANNELS = NUM_RELAY_CHANNELS + 2

Stages = tuple[tuple[int, ...], ...]


class PipelineTopology:
    """Stages of a pipeline, each a set of ranks, maybe of different sizes. Construction is collective over
    the group: all its ranks, same arguments. All groups and connections are made here, once.

    Args:
        stages: sizes ([1, 2, 2]: the ranks of the group in order), or lists of group ranks ([[0], [1, 2], [3,
            4]]). Every rank of the group is in exactly one stage; its position there is its tensor-parallel
            rank, and the first rank of a stage leads it.
        group: a torch ProcessGroup; None is the default group.
        virtual_stages: model chunks per stage (Megatron's virtual pipeline size).
        timeout: of the communicator, as there.

    **Chains** (as MindSpeed-MM): chain i is the i-th rank of every stage, or the first one of stages that
    have fewer. The first rank of a stage belongs to chain 0, any other to its own. The pipeline group of a
    rank is its chain; its next and previous rank follow it, the last stage's next is the first stage. torch
    numbers the ranks of a group by increasing global rank, so list stages in that order where a rank of the
    pipeline group shall mean a stage. Ranks that methods return are global ones.

    Raises:
        ValueError, TypeError: `stages` has an empty stage, a rank twice, a rank that the group does not have,
            or leaves one out; `virtual_stages` < 1. The other ranks get PipeCommMismatch.
        PipeCommMismatch: ranks disagree about the arguments.
    """

    def __init__(
        self,
        stages: Sequence[int] | Sequence[Sequence[int]],
        *,
        group: dist.ProcessGroup | None = None,
        virtual_stages: int = 1,
        timeout: float | datetime.timedelta | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise ValueError(
                "torch.distributed is not initialised; call torch.distributed.init_process_group() first"
            )
        group = dist.group.WORLD if group is None else group
        if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
            raise ValueError(f"rank {dist.get_rank()} (global) is not a member of the group")
        self._group = group
        self._stages, self._num_virtual_stages = _agreed(group, stages, virtual_stages)
        self._virtual_stage_idx = 0

        my_rank = dist.get_rank(group)
        self._stage_idx = next(idx for idx, ranks in enumerate(self._stages) if my_rank in ranks)
        self._stage_rank = self.stage_ranks.index(my_rank)
        global_ranks = dist.get_process_group_ranks(group)
        self._global_stages = [[global_ranks[rank] for rank in ranks] for ranks in self._stages]
        chains = [
            [ranks[chain_idx if chain_idx < len(ranks) else 0] for ranks in self._global_stages]
            for chain_idx in range(max(map(len, self._stages)))
        ]
        self._chain = chains[self._stage_rank]
        groups = _make_groups(group, [*self._global_stages, *chains])
        self._stage_group = groups[tuple(self._global_stages[self._stage_idx])]
        self._chain_group = groups[tuple(self._chain)]
        self._communicator = Communicator(group, channels=NUM_CHANNELS, timeout=timeout)

    # ---------------------------------------------------------------- stages, as group ranks

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of all stages."""
        return self._group

    @property
    def stages(self) -> Stages:
        """Ranks of the group, stage by stage."""
        return self._stages

    @property
    def num_stages(self) -> int:
        return len(self._stages)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Ranks of the group that form my stage."""
        return self._stages[self._stage_idx]

    @property
    def communicator(self) -> Communicator:
        """Joins all ranks. Its channels are the stage relay's, and two for messages between single ranks."""
        return self._communicator

    def close(self) -> None:
        """Closes the communicator. Idempotent; torch's groups end with the process group of their world."""
        self._communicator.close()

    # ---------------------------------------------------------------- MindSpeed-MM's names

    def get_vtp_size_list(self) -> list[int]:
        """Number of ranks of each stage."""
        return [len(ranks) for ranks in self._stages]

    def get_vtp_stage_ranks(self) -> list[list[int]]:
        """Global ranks of each stage."""
        return [list(ranks) for ranks in self._global_stages]

    def get_vtp_my_stage_idx(self) -> int:
        """Number of my stage."""
        return self._stage_idx

    def is_vtp_stage_rank0(self) -> bool:
        """Whether I am the first rank of my stage."""
        return self._stage_rank == 0

    # ---------------------------------------------------------------- Megatron-core's names

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        """My chain."""
        return self._chain_group

    def get_pipeline_model_parallel_rank(self) -> int:
        """Number of my stage."""
        return self._stage_idx

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Number of stages."""
        return len(self._stages)

    def get_pipeline_model_parallel_next_rank(self) -> int:
        """Global rank of my chain in the next stage, of the last stage in the first."""
        return self._chain[(self._stage_idx + 1) % len(self._chain)]

    def get_pipeline_model_parallel_prev_rank(self) -> int:
        """Global rank of my chain in the previous stage, of the first stage in the last."""
        return self._chain[self._stage_idx - 1]

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        """My stage."""
        return self._stage_group

    def get_tensor_model_parallel_rank(self) -> int:
        """My position in my stage."""
        return self._stage_rank

    def get_tensor_model_parallel_world_size(self) -> int:
        """Number of ranks of my stage."""
        return len(self.stage_ranks)

    def get_virtual_pipeline_model_parallel_world_size(self) -> int:
        """Model chunks per stage."""
        return self._num_virtual_stages

    def get_virtual_pipeline_model_parallel_rank(self) -> int:
        """The model chunk that this rank is working on, as it has said."""
        return self._virtual_stage_idx

    def set_virtual_pipeline_model_parallel_rank(self, rank: int) -> None:
        """Says which model chunk this rank is working on: what `ignore_virtual=False` asks for."""
        if not 0 <= rank < self._num_virtual_stages:
            raise ValueError(f"virtual stage {rank} is not in 0..{self._num_virtual_stages - 1}")
        self._virtual_stage_idx = rank

    def is_pipeline_first_stage(self, ignore_virtual: bool = True) -> bool:
        """Whether my stage (and, unless ignored, my model chunk) is the first."""
        return self._stage_idx == 0 and (ignore_virtual or self._virtual_stage_idx == 0)

    def is_pipeline_last_stage(self, ignore_virtual: bool = True) -> bool:
        """Whether my stage (and, unless ignored, my model chunk) is the last."""
        is_last_chunk = self._virtual_stage_idx == self._num_virtual_stages - 1
        return self._stage_idx == len(self._stages) - 1 and (ignore_virtual or is_last_chunk)

    def __repr__(self) -> str:
        return (
            f"<PipelineTopology {[list(ranks) for ranks in self._stages]}, I am in stage {self._stage_idx}>"
        )


def _agreed(group: dist.ProcessGroup, stages: Any, virtual_stages: Any) -> tuple[Stages, int]:
    """The arguments, checked here and compared with the other ranks'."""
    error: Exception | None = None
    facts: dict[str, Any] = {}
    try:
        num_virtual_stages = _whole_number(virtual_stages, "virtual_stages")
        if num_virtual_stages < 1:
            raise ValueError(f"virtual_stages must be 1 or more, not {num_virtual_stages}")
        checked = _checked_stages(stages, dist.get_world_size(group))
        facts = {"stages": [list(ranks) for ranks in checked], "virtual_stages": num_virtual_stages}
    except (TypeError, ValueError) as wrong:
        error, facts = wrong, {"error": f"{type(wrong).__name__}: {wrong}"}
    meeting = Rendezvous(group, DEFAULT_TIMEOUT_S, "PipelineTopology")
    try:
        everybody = meeting.gather("topology", facts)
    finally:
        if error is not None:
            raise error
    for rank, theirs in enumerate(everybody):
        for name, value in theirs.items():
            if value != everybody[0][name]:
                raise PipeCommMismatch(
                    f"rank {meeting.rank}: PipelineTopology: ranks disagree about {name}: "
                    f"{everybody[0][name]} on rank 0, {value} on rank {rank}",
                    op="PipelineTopology",
                    rank=meeting.rank,
                    peer=rank,
                    origin_rank=rank,
                )
    return checked, num_virtual_stages


def _checked_stages(stages: Any, group_size: int) -> Stages:
    if not isinstance(stages, (list, tuple)) or not stages:
        raise ValueError(
            f"stages must be a list of sizes or of lists of ranks, one per stage, not {stages!r}"
        )
    if all(isinstance(ranks, (list, tuple)) for ranks in stages):
        checked = tuple(tuple(_whole_number(rank, "a rank") for rank in ranks) for ranks in stages)
    elif any(isinstance(ranks, (list, tuple)) for ranks in stages):
        raise ValueError(f"stages must be all sizes or all lists of ranks, not {stages!r}")
    else:
        sizes = [_whole_number(size, "the size of a stage") for size in stages]
        if min(sizes) < 1 or sum(sizes) != group_size:
            raise ValueError(
                f"stages of sizes {sizes} must have 1 rank or more each, {group_size} together, the size of "
                f"the group, not {sum(sizes)}"
            )
        ranks = iter(range(group_size))
        return tuple(tuple(next(ranks) for _ in range(size)) for size in sizes)
    empty = [idx for idx, ranks in enumerate(checked) if not ranks]
    if empty:
        raise ValueError(f"stage {empty[0]} has no ranks")
    stage_of: dict[int, int] = {}
    for idx, ranks in enumerate(checked):
        for rank in ranks:
            if not 0 <= rank < group_size:
                raise ValueError(
                    f"rank {rank} of stage {idx} is not in the group, whose ranks are 0..{group_size - 1}"
                )
            if rank in stage_of:
                raise ValueError(f"rank {rank} is in stage {stage_of[rank]} and in stage {idx}")
            stage_of[rank] = idx
    missing = [rank for rank in range(group_size) if rank not in stage_of]
    if missing:
        raise ValueError(
            f"ranks {missing} of the group are in no stage; make a group without them, or add them"
        )
    return checked


def _whole_number(value: Any, name: str) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not a bool")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, not {type(value).__name__}") from None


def _make_groups(
    group: dist.ProcessGroup, all_ranks: list[list[int]]
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """torch groups of these global ranks, by them; those that this rank is a member of."""
    me = dist.get_rank()
    if dist.get_world_size(group) == dist.get_world_size():
        made = [(ranks, dist.new_group(ranks)) for ranks in all_ranks]
        return {tuple(ranks): new for ranks, new in made if me in ranks}
    # Only the ranks of the group are here. torch then names a new group by its members and by how many
    # groups the process has had, so all ranks make equally many: in a group of its own who is no member.
    names = dist.distributed_c10d._world.pg_names
    meeting = Rendezvous(group, DEFAULT_TIMEOUT_S, "PipelineTopology")
    records = meeting.gather("groups", {"num_made": len(names)})
    for _ in range(max(record["num_made"] for record in records) - len(names)):
        dist.new_group([me], use_local_synchronization=True)
    made = [
        (ranks, dist.new_group(ranks if me in ranks else [me], use_local_synchronization=True))
        for ranks in all_ranks
    ]
    return {tuple(ranks): new for ranks, new in made if me in ranks}
