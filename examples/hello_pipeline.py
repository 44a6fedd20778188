"""torchrun --standalone --nproc-per-node 2 examples/hello_pipeline.py trains a model of two stages."""

import torch
import torch.distributed as dist
from torch import nn

from pipecomm_ext.schedules import Executor, get_plan

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
stage = nn.Sequential(nn.Linear(16, 16), nn.Tanh())  # this rank's part of the model
optimizer = torch.optim.SGD(stage.parameters(), lr=1.0)
torch.manual_seed(99)
inputs, targets = torch.randn(32, 16), torch.rand(32, 16)  # whole, on both ranks

plan = get_plan("1f1b", P=dist.get_world_size(), M=4)  # 4 micro-batches; "gpipe" is another order
with Executor(plan, [stage], loss_fn=nn.functional.mse_loss, loss_scale="mean") as executor:
    for step in range(5):
        losses, _ = executor.step(inputs, targets)  # the same call on all ranks
        if losses is not None:  # on the rank of the last stage
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}")
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
