"""Pipeline stages of any sizes: which ranks they have, which rank comes next, and the groups they need."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..communicator import DEFAULT_TIMEOUT_S, communicator_for
from ..core.checked import whole_number
from ..core.process_groups import own_group
from ..core.rendezvous import Rendezvous
from .groups import make_groups

# A link joins a stage and the next one. A rank takes part in two links; three colours keep the messages of
# the two apart on every cycle of stages, in both directions.
NUM_LINK_COLOURS = 3
NUM_RELAY_CHANNELS = 2 * NUM_LINK_COLOURS
# The last two channels are for messages between single ranks: activations and gradients.
NUM_CHANNELS = NUM_RELAY_CHANNELS + 2

Stages = tuple[tuple[int, ...], ...]


class PipelineTopology:
    """The stages of a pipeline, which may have different numbers of ranks. All ranks of the group construct
    it, with equal arguments. All groups and connections are made here, once.

    Args:
        stages: sizes ([1, 2, 2] takes the ranks of the group in order), or lists of group ranks
            ([[0], [1, 2], [3, 4]]). Every rank of the group is in exactly one stage. Its position there is
            its tensor-parallel rank, and the first rank of a stage leads it.
        group: a torch ProcessGroup; None is the default group.
        virtual_stages: model chunks per stage (Megatron's virtual pipeline size).
        timeout, device: those of the communicator; see Communicator.

    **Chains** (as in MindSpeed-MM): chain i consists of the i-th rank of every stage, or of its first rank
    where a stage has fewer. The i-th rank of a stage belongs to chain i. Its pipeline group is that chain,
    and its next and previous ranks are its neighbours there; the first stage follows the last. torch numbers
    the ranks of a group by increasing global rank, so list the stages in that order if a rank of the pipeline
    group is to be the number of a stage. The ranks that methods return are global.

    Attributes:
        group: the group of all stages.
        stages, num_stages: ranks of the group, stage by stage, and how many stages there are.
        stage_ranks: ranks of the group that form my stage.
        communicator: that of all ranks, with channels for relays and two for messages of single ranks.

    Raises:
        ValueError, TypeError: `stages` has an empty stage, has a rank twice or one that is not in the group,
            or leaves one out; or `virtual_stages` < 1. The other ranks raise PipeCommMismatch.
        PipeCommMismatch: ranks disagree about the arguments.

    Example:
        ```python
        topology = PipelineTopology([1, 1])  # two stages of one rank; [1, 2, 1] needs four ranks
        stage = topology.get_vtp_my_stage_idx()  # of this rank
        ```
    """

    def __init__(
        self,
        stages: Sequence[int] | Sequence[Sequence[int]],
        *,
        group: dist.ProcessGroup | None = None,
        virtual_stages: int = 1,
        timeout: float | datetime.timedelta | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        self.group = group = own_group(group)
        self.stages, self._num_virtual_stages = _agreed(group, stages, virtual_stages)
        self.num_stages = len(self.stages)
        self._virtual_stage_idx = 0

        my_rank = dist.get_rank(group)
        self._stage_idx = next(idx for idx, ranks in enumerate(self.stages) if my_rank in ranks)
        self.stage_ranks = self.stages[self._stage_idx]
        self._stage_rank = self.stage_ranks.index(my_rank)
        global_ranks = dist.get_process_group_ranks(group)
        self._global_stages = [[global_ranks[rank] for rank in ranks] for ranks in self.stages]
        chains = [
            [ranks[idx if idx < len(ranks) else 0] for ranks in self._global_stages]
            for idx in range(max(map(len, self.stages)))
        ]
        self._chain = chains[self._stage_rank]
        groups = make_groups(group, [*self._global_stages, *chains])
        self._stage_group = groups[tuple(self._global_stages[self._stage_idx])]
        self._chain_group = groups[tuple(self._chain)]
        self.communicator = communicator_for("topology", group, device, NUM_CHANNELS, timeout=timeout)
        around = self.stages[max(0, self._stage_idx - 1) : self._stage_idx + 2]
        # Over NCCL a relay connects the channels that it uses.
        self.communicator.connect((rank for ranks in around for rank in ranks), channels=())

    def close(self) -> None:
        """Closes the communicator. Idempotent; torch's groups end with the process group of their world."""
        self.communicator.close()

    # ---------------------------------------------------------------- MindSpeed-MM's names

    def get_vtp_size_list(self) -> list[int]:
        """Number of ranks of each stage."""
        return [len(ranks) for ranks in self.stages]

    def get_vtp_stage_ranks(self) -> list[list[int]]:
        """Global ranks of each stage."""
        return [list(ranks) for ranks in self._global_stages]

    def get_vtp_my_stage_idx(self) -> int:
        """Number of my stage."""
        return self._stage_idx

    def is_vtp_stage_rank0(self) -> bool:
        """Whether this rank is the first of its stage."""
        return self._stage_rank == 0

    # ---------------------------------------------------------------- Megatron-core's names

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        """The group of this rank's chain."""
        return self._chain_group

    def get_pipeline_model_parallel_rank(self) -> int:
        """Number of my stage."""
        return self._stage_idx

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Number of stages."""
        return self.num_stages

    def get_pipeline_model_parallel_next_rank(self) -> int:
        """Global rank of this chain in the next stage; the first stage follows the last."""
        return self._chain[(self._stage_idx + 1) % len(self._chain)]

    def get_pipeline_model_parallel_prev_rank(self) -> int:
        """Global rank of this chain in the previous stage; the last stage precedes the first."""
        return self._chain[self._stage_idx - 1]

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        """The group of this rank's stage."""
        return self._stage_group

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's position in its stage."""
        return self._stage_rank

    def get_tensor_model_parallel_world_size(self) -> int:
        """Number of ranks of my stage."""
        return len(self.stage_ranks)

    def get_virtual_pipeline_model_parallel_world_size(self) -> int:
        """Model chunks per stage."""
        return self._num_virtual_stages

    def get_virtual_pipeline_model_parallel_rank(self) -> int:
        """The model chunk that was last passed to `set_virtual_pipeline_model_parallel_rank`."""
        return self._virtual_stage_idx

    def set_virtual_pipeline_model_parallel_rank(self, rank: int) -> None:
        """Sets the model chunk that this rank is working on, for calls with `ignore_virtual=False`."""
        if not 0 <= rank < self._num_virtual_stages:
            raise ValueError(f"virtual stage {rank} is not in 0..{self._num_virtual_stages - 1}")
        self._virtual_stage_idx = rank

    def is_pipeline_first_stage(self, ignore_virtual: bool = True) -> bool:
        """Whether my stage (and, unless ignored, my model chunk) is the first."""
        return self._stage_idx == 0 and (ignore_virtual or self._virtual_stage_idx == 0)

    def is_pipeline_last_stage(self, ignore_virtual: bool = True) -> bool:
        """Whether my stage (and, unless ignored, my model chunk) is the last."""
        is_last_chunk = self._virtual_stage_idx == self._num_virtual_stages - 1
        return self._stage_idx == self.num_stages - 1 and (ignore_virtual or is_last_chunk)

    def __repr__(self) -> str:
        return f"<PipelineTopology {list(map(list, self.stages))}, I am in stage {self._stage_idx}>"


def _agreed(group: dist.ProcessGroup, stages: Any, virtual_stages: Any) -> tuple[Stages, int]:
    """Returns the arguments, checked here and compared with those of the other ranks."""
    error: Exception | None = None
    facts: dict[str, Any] = {}
    checked: Stages = ()
    num_virtual_stages = 0
    try:
        num_virtual_stages = whole_number(virtual_stages, "virtual_stages")
        if num_virtual_stages < 1:
            raise ValueError(f"virtual_stages must be 1 or more, not {num_virtual_stages}")
        checked = _checked_stages(stages, dist.get_world_size(group))
        facts = {"stages": [list(ranks) for ranks in checked], "virtual_stages": num_virtual_stages}
    except (TypeError, ValueError) as wrong:
        error = wrong
    Rendezvous(group, DEFAULT_TIMEOUT_S, "PipelineTopology").agree("topology", facts, error)
    return checked, num_virtual_stages


def _checked_stages(stages: Any, group_size: int) -> Stages:
    if not isinstance(stages, (list, tuple)) or not stages:
        raise ValueError(
            f"stages must be a list of sizes or of lists of ranks, one per stage, not {stages!r}"
        )
    if all(isinstance(ranks, (list, tuple)) for ranks in stages):
        checked = tuple(tuple(whole_number(rank, "a rank") for rank in ranks) for ranks in stages)
    elif any(isinstance(ranks, (list, tuple)) for ranks in stages):
        raise ValueError(f"stages must be all sizes or all lists of ranks, not {stages!r}")
    else:
        sizes = [whole_number(size, "the size of a stage") for size in stages]
        if min(sizes) < 1 or sum(sizes) != group_size:
            raise ValueError(
                f"stages of sizes {sizes} must have 1 rank or more each, {group_size} together, the size of "
                f"the group, not {sum(sizes)}"
            )
        numbers = iter(range(group_size))
        return tuple(tuple(next(numbers) for _ in range(size)) for size in sizes)
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
