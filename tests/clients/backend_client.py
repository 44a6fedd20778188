"""Frameworks in which nothing is changed but the name of torch.distributed's backend.

python tests/clients/backend_client.py CLIENT BACKEND FOLDER    rank r leaves its results in FOLDER/r.pt
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

NUM_STEPS = 2


def megatron(name: str) -> list[torch.Tensor]:
    """Megatron-core's own pipeline schedules, data and tensor parallelism, and optimizer."""
    from megatron.core.pipeline_parallel import schedules
    from megatron_client import Setup, Trainer, model_parallel, on_cpu, reported

    overlap = {"overlap_grad_reduce": True, "bucket_size": 10000}
    setup = {
        "1F1B": Setup(ddp={"use_distributed_optimizer": True}, optimizer={"use_distributed_optimizer": True}),
        "interleaved": Setup(
            vp=2,
            ties_embeddings=True,
            config={"overlap_p2p_comm": True, "batch_p2p_comm": False},
            ddp=overlap,
            optimizer={"clip_grad": 0.1},
        ),
        "tensor parallel": Setup(pp=1, tp=2, optimizer={"clip_grad": 0.1}),
        "experts": Setup(
            pp=1,
            config={
                "num_moe_experts": 4,
                "moe_router_topk": 2,
                "moe_token_dispatcher_type": "allgather",
                "expert_model_parallel_size": 2,
                "add_bias_linear": False,
            },
            optimizer={"clip_grad": 0.1},
        ),
    }[name]
    results = []
    with on_cpu(), model_parallel(setup):
        trainer = Trainer(setup)
        for _ in range(NUM_STEPS):
            results += reported(trainer.step(schedules.get_forward_backward_func))
            trainer.optimizer.step()
        results += [part.detach().clone() for chunk in trainer.chunks for part in chunk.parameters()]
    return results


def three_meshes() -> list[torch.Tensor]:
    """torch's pipeline, FSDP2 and tensor parallelism over the stages that torchtitan's splitter makes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torchtitan_client import VOCAB, cross_entropy, split

    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pipeline", "data", "tensor"))
    idx, data_idx = mesh.get_local_rank("pipeline"), mesh.get_local_rank("data")
    module = split(2)[idx]
    for layer in module.layers.values():
        parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(module, mesh=mesh["data"])
    stage = PipelineStage(module, idx, 2, torch.device("cpu"), group=mesh.get_group("pipeline"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(data_idx)
    results: list[torch.Tensor] = []
    for _ in range(NUM_STEPS):
        tokens = torch.randint(0, VOCAB, (8, 17), generator=generator)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        losses: list[torch.Tensor] = []
        schedule.step(*([inputs] if idx == 0 else []), target=labels if idx else None, losses=losses)
        results += [loss.detach() for loss in losses]
        optimizer.step()
        optimizer.zero_grad()
    return results + [parameter.full_tensor().detach() for parameter in module.parameters()]


def accelerate() -> list[torch.Tensor]:
    """accelerate's data parallelism with accumulated and clipped gradients, and metrics of all ranks."""
    from accelerate import Accelerator
    from accelerate.utils import broadcast_object_list, pad_across_processes, reduce

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == dist.get_world_size()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    data = [(x, x.sum().reshape(1)) for x in torch.randn(24, 8)]
    loader = torch.utils.data.DataLoader(data, batch_size=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    results: list[torch.Tensor] = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                results.append(accelerator.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
        results.append(accelerator.gather_for_metrics(loss.detach()))
    uneven = torch.full((accelerator.process_index + 1,), 1.0)
    results.append(accelerator.gather(pad_across_processes(uneven)))
    results.append(reduce(uneven[:1], "mean"))
    [word] = broadcast_object_list([f"of rank {accelerator.process_index}"])
    assert word == "of rank 0"
    accelerator.wait_for_everyone()
    return results + [parameter.detach() for parameter in model.parameters()]


def ulysses() -> list[torch.Tensor]:
    """yunchang's attention over parts of a sequence."""
    from test_yunchang import my_part, output_and_gradients, ulysses_attention, whole_sequence

    class World:
        rank, size = dist.get_rank(), dist.get_world_size()

    return output_and_gradients(ulysses_attention(), *(my_part(World, x) for x in whole_sequence(256)))


CLIENTS: dict[str, tuple[int, Callable[[], list[torch.Tensor]]]] = {
    # gloo adds numbers of more than two ranks in another order.
    **{
        f"Megatron-core, {name}": (size, lambda name=name: megatron(name))
        for name, size in {"1F1B": 4, "interleaved": 4, "tensor parallel": 4, "experts": 2}.items()
    },
    "torch's pipeline, FSDP2 and tensor parallelism": (8, three_meshes),
    "accelerate": (2, accelerate),
    "yunchang": (4, ulysses),
}


def run_rank(rank: int, client: str, backend: str, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    size, train = CLIENTS[client]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group(backend)
    results = train()
    torch.save([result.detach() for result in results], f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(client: str, backend: str, folder: str) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    torch.multiprocessing.start_processes(
        run_rank, (client, backend, folder, port), CLIENTS[client][0], start_method="fork"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
