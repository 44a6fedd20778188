"""The table of schedules/test_combinations.py: a row is a script that trains a model, with its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import combination_layers as layers
import combination_scripts as scripts
import torch
from combination_sides import ENTRIES, EXECUTORS, POSTED, Side
from pipelines import Block
from torch import nn


class Row(NamedTuple):
    script: Callable[[Side], Any] = scripts.train
    layer: Callable[[int], nn.Module] = Block
    applies: Sequence[str] = tuple(ENTRIES)  # other entries have no such call, or take too long
    refused: str | None = None  # by an error with this text
    refused_in: Sequence[str] = tuple(ENTRIES)
    warned: str | None = None
    seeded: bool = False
    dtype: torch.dtype = torch.float64
    fails: bool = False  # a step fails, so the row needs a communicator of its own

    def outcome(self, entry: str) -> str:
        """The expected outcome with an entry point."""
        if entry not in self.applies:
            return "not run"
        return "refused" if self.refused and entry in self.refused_in else "right"


# What a row takes in turn: the plans of DualPipe run in an Executor and in its classes.
IN_TURN = (("dualpipev", "DualPipeV"), ("dualpipe", "DualPipe"))
# For what only uses gradients: an Executor, and one that adds those of replicas.
USES_GRADIENTS = ("zb_v", "dualpipe", "DualPipe")


def in_turn(rows: dict[str, Row]) -> dict[str, Row]:
    """The rows, each with one entry point of each group of IN_TURN that it applies to."""
    chosen = {}
    for idx, (name, row) in enumerate(rows.items()):
        groups = [[entry for entry in group if entry in row.applies] for group in IN_TURN]
        taken = {group[idx % len(group)] for group in groups if group}
        left_out = {entry for group in groups for entry in group} - taken
        chosen[name] = row._replace(applies=[entry for entry in row.applies if entry not in left_out])
    return chosen


ALL_ROWS = {
    "autocast": Row(scripts.autocast, dtype=torch.float32),
    "anomaly detection": Row(scripts.anomaly_detection, warned="Anomaly Detection"),
    "saved_tensors_hooks": Row(scripts.saved_tensors_elsewhere),
    "GradScaler": Row(scripts.scaled, applies=EXECUTORS),
    "GradScaler, fused optimizer": Row(scripts.scaled_fused, dtype=torch.float32, applies=EXECUTORS),
    "dropout": Row(layer=layers.Seeded, seeded=True),
    "dropout in checkpoints": Row(layer=layers.in_checkpoints, seeded=True),
    "dropout in reentrant checkpoints": Row(layer=layers.in_reentrant_checkpoints, seeded=True),
    "BatchNorm": Row(scripts.of_batches, layers.Normed),
    "frozen weights, LoRA": Row(layer=layers.Adapted),
    "parametrizations, a layer twice": Row(layer=layers.Parametrized),
    "torch.compile": Row(layer=layers.Compiled, applies=["one_f_one_b", "zb_v", "dualpipev"]),
    "gradients within the forward": Row(layer=layers.Penalised),
    "hooks of modules": Row(scripts.of_modules),
    "hooks of tensors that add up": Row(scripts.sums_of_hooks, layers.Summing),
    "hooks after accumulation": Row(scripts.after_accumulation),
    "retain_grad": Row(scripts.retained, layers.Retaining),
    "an optimizer in backward": Row(
        scripts.optimizer_in_backward, refused="by an inplace operation", fails=True
    ),
    "accumulation, zeroed in place": Row(scripts.accumulation_in_place),
    "accumulation, clipped": Row(scripts.clipped, applies=EXECUTORS),
    "moving average of weights": Row(scripts.moving_average, applies=USES_GRADIENTS),
    "fused optimizer": Row(scripts.fused_optimizer, applies=USES_GRADIENTS),
    "foreach optimizer": Row(scripts.foreach_optimizer, applies=USES_GRADIENTS),
    "gradients of inputs": Row(scripts.gradients_of_inputs),
    "evaluation between steps": Row(scripts.evaluation_between),
    "outputs in a buffer": Row(
        scripts.evaluation,
        layers.Reusing,
        refused="return a clone of a buffer",
        refused_in=POSTED,
        fails=True,
    ),
    "an error, and the next step": Row(scripts.error_and_next_step, fails=True),
    "saving and loading": Row(scripts.saved_and_loaded, applies=USES_GRADIENTS),
}
ROWS = in_turn(ALL_ROWS)

# Combinations that are not rows here, and their tests.
ELSEWHERE = {
    "weights shared by stages, clipping": "test_gradients.py::test_tied_weights_and_clipping",
    "hooks of tensors": "test_split_backward.py::test_hooks_that_change_gradients_change_them_once",
    "functions as stages": "test_gradients.py::test_parameters_of_stages_that_are_functions",
    "DDP, FSDP2": "test_data_parallel.py::test_gradients_are_those_of_all_the_data",
    "DDP, FSDP2: checkpoints": "test_sharded_stages.py::test_recomputation",
    "DDP, FSDP2: clipping": "test_sharded_stages.py::test_clipping_and_shared_weights",
    "DDP, FSDP2: errors": "test_sharded_stages.py::test_after_a_failed_step_the_next_one_is_right",
    "tensor parallelism": "test_sharded_stages.py::test_tensor_parallel_stages",
    "distributed checkpoints": "test_sharded_stages.py::test_a_distributed_checkpoint_of_the_whole_model",
}
