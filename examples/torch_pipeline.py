"""torch's pipeline() splits a model at the layers that you name, and an Executor runs its stages.

    torchrun --standalone --nproc-per-node 2 examples/torch_pipeline.py [schedule]

pipeline() traces the model with one micro-batch. Each stage must read only what the stage before returns. The
last lines compare all gradients of the first step with those of the unsplit model.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline

from pipecomm_ext.schedules import Executor, get_plan

M, ROWS, WIDTH = 8, 4, 16  # micro-batches, rows of each, width of the model


class Model(nn.Module):
    """Eight layers with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


def main() -> int:
    dist.init_process_group("gloo")
    torch.manual_seed(1)  # the same weights and data on all ranks
    model, inputs, targets = Model(), torch.randn(M * ROWS, WIDTH), torch.rand(M * ROWS, WIDTH)
    plan = get_plan(sys.argv[1] if len(sys.argv) > 1 else "1f1b", P=dist.get_world_size(), M=M)
    starts = [8 * stage // plan.num_stages for stage in range(1, plan.num_stages)]
    splits = {f"layers.{idx}": SplitPoint.BEGINNING for idx in starts}
    pipe = pipeline(model, mb_args=(inputs[:ROWS],), split_spec=splits)
    stages = {stage: pipe.get_stage_module(stage) for stage in plan.stages_of(dist.get_rank())}
    parameters = [weight for stage in stages.values() for weight in stage.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    worst = 0.0
    with Executor(plan, stages, loss_fn=nn.functional.mse_loss, loss_scale="mean") as executor:
        for step in range(5):
            losses, _ = executor.step(inputs, targets)
            if losses is not None:
                print(f"step {step}: loss {torch.stack(losses).mean():.4f}", flush=True)
            if step == 0:
                worst = difference(model, stages, inputs, targets)
            optimizer.step()
            optimizer.zero_grad()
    print(f"rank {dist.get_rank()}: gradients differ by {worst:.1e} from the unsplit model's", flush=True)
    dist.destroy_process_group()
    return 0 if worst < 1e-6 else 1


def difference(
    model: Model, stages: dict[int, nn.Module], inputs: torch.Tensor, targets: torch.Tensor
) -> float:
    """The largest difference of a gradient of this rank's stages. Their parameters have the model's names."""
    parameters = dict(model.named_parameters())
    whole = torch.autograd.grad(nn.functional.mse_loss(model(inputs), targets), list(parameters.values()))
    expected = dict(zip(parameters, whole, strict=True))
    differences = [
        (parameter.grad - expected[name]).abs().max()
        for stage in stages.values()
        for name, parameter in stage.named_parameters()
    ]
    return torch.stack(differences).max().item()


if __name__ == "__main__":
    sys.exit(main())
