"""Trains a small language model with DualPipe or DualPipeV: two stages a rank, their passes interleaved.

    python examples/dualpipe_train.py --ranks 4               DualPipe: two copies of a model of 4 stages
    python examples/dualpipe_train.py --ranks 2 --v           DualPipeV: one model of 4 stages on 2 ranks
    torchrun --nproc-per-node 4 examples/dualpipe_train.py    the same under a launcher

With DualPipe the batch enters at both ends: the first rank feeds one half, the last rank the other, and each
gets the losses of the other's half. Every rank also trains the unsplit model and compares loss and gradients
of every step; exit code 1 if unequal.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from lib import launch
from lib.report import draw_losses, progress_bar, relative_difference
from lib.sequence import SequencePiece
from lib.text_model import HEAD_DIM, TextBatches, build_layers, loss_of, split_layers
from torch import nn

from pipecomm_ext.schedules import DualPipe, DualPipeV, get_plan

LIMIT = 1e-5  # of relative differences


def run_rank(args: argparse.Namespace) -> int:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_stages = 2 * num_ranks if args.v else num_ranks
    num_chunks = args.chunks
    depths = (rank, num_stages - 1 - rank)  # of my two stages
    device = torch.device(args.device)

    def build_stages() -> list[nn.Module]:
        piece = SequencePiece(args.seq_len, args.hidden // HEAD_DIM)
        layers = build_layers(args.layers or num_stages, args.hidden, piece, args.seed)
        owned = split_layers(len(layers) - 2, num_stages)
        return [nn.Sequential(*(layers[idx] for idx in indices)).to(device) for indices in owned]

    def criterion(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_of(logits, targets, args.seq_len) / num_chunks

    stages = build_stages()
    modules = tuple(stages[depth] for depth in depths)
    pipe = DualPipeV(modules) if args.v else DualPipe(modules)
    unsplit = nn.Sequential(*build_stages())
    optimizers = [
        torch.optim.SGD(module.parameters(), lr=args.lr, momentum=0.9) for module in (pipe, unsplit)
    ]
    batches = TextBatches(args.chunk_size * num_chunks, args.seq_len, args.seed)
    worst, losses = 0.0, []
    progress = progress_bar(args.steps, is_shown=rank == 0)
    for step in range(args.steps):
        inputs, labels = (rows.to(device) for rows in batches(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        if args.v:
            feeds = {0: (inputs, labels)}
        else:
            (first, second), (first_labels, second_labels) = inputs.chunk(2), labels.chunk(2)
            feeds = {0: (first, second_labels), num_ranks - 1: (second, first_labels)}
        my_inputs, my_labels = feeds.get(rank, (None, None))
        loss, _ = pipe.step(my_inputs, num_chunks=num_chunks, criterion=criterion, labels=[my_labels])
        if not args.v:
            pipe.sum_replica_gradients()

        whole_loss = torch.zeros((), device=device)
        for chunk, chunk_labels in zip(inputs.chunk(num_chunks), labels.chunk(num_chunks), strict=True):
            chunk_loss = criterion(unsplit(chunk), chunk_labels)
            chunk_loss.backward()
            whole_loss += chunk_loss.detach()
        total = torch.zeros((), device=device) if loss is None else loss.sum()
        dist.all_reduce(total)
        differences = [relative_difference(total, whole_loss)]
        for module, depth in zip(pipe.module, depths, strict=True):
            for mine, theirs in zip(module.parameters(), unsplit[depth].parameters(), strict=True):
                differences.append(relative_difference(mine.grad, theirs.grad))
        worst = max(worst, *differences)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(total.item())
        progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
        progress.update()
    progress.close()
    pipe.close()

    worst = torch.tensor(worst, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    is_equal = bool(worst <= LIMIT)  # False for NaN
    if rank == 0:
        name = "DualPipeV" if args.v else "DualPipe"
        shape = f"{num_stages} stages, {num_ranks} ranks, {num_chunks} chunks"
        picture = Path(args.out) / "loss.png"
        draw_losses(losses, picture, f"{name}: {shape}")
        print(f"pipeline   {name}: {shape}, {device.type}")
        print(f"loss       {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte in {args.steps} steps")
        print(f"picture    {picture}")
        verdict = "equal to" if is_equal else "DIFFERS from"
        print(f"verify     {verdict} the unsplit model in {args.steps} steps: {worst:.1e}, limit {LIMIT:.0e}")
    return 0 if is_equal else 1


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = [
        ("ranks", 4, "processes; DualPipe needs an even number (4)"),
        ("steps", 20, "optimizer steps (20)"),
        ("chunks", 0, "micro-batches, at least twice the ranks; even for DualPipe (two more than that)"),
        ("chunk-size", 2, "sequences a micro-batch (2)"),
        ("seq-len", 32, "bytes a sequence (32)"),
        ("layers", 0, "transformer blocks (one a stage)"),
        ("hidden", 32, f"width, a multiple of {HEAD_DIM} (32)"),
        ("seed", 1, "of weights and batches (1)"),
    ]
    for name, default, text in numbers:
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    parser.add_argument("--v", action="store_true", help="DualPipeV")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate (0.1)")
    parser.add_argument("--out", default="out/dualpipe", metavar="DIR", help="where the picture goes")
    parser.add_argument("--device", **launch.DEVICE_OPTION)
    args = launch.parsed(parser, arguments)
    for name in ("ranks", "steps", "chunk_size", "seq_len", "hidden"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}")
    if args.hidden % HEAD_DIM:
        parser.error(f"--hidden {args.hidden} is not a multiple of {HEAD_DIM}, the width of a head")
    num_ranks = launch.num_ranks_of(args)
    num_stages = 2 * num_ranks if args.v else num_ranks
    if args.layers and args.layers < num_stages:
        parser.error(f"{num_stages} stages need as many blocks; give --layers {num_stages} or more")
    args.chunks = args.chunks or 2 * num_ranks + 2
    try:
        get_plan("dualpipev" if args.v else "dualpipe", P=num_ranks, M=args.chunks)
    except ValueError as error:
        parser.error(f"--ranks {num_ranks} --chunks {args.chunks}: {error}")
    return args


def main(arguments: list[str] | None = None) -> int:
    # torch.optim imports torch._dynamo at its first step, in each rank separately if not here.
    return launch.run(run_rank, parse_arguments(arguments), preload=("torch._dynamo",))


if __name__ == "__main__":
    sys.exit(main())
