"""Trains a small language model on Python's own sources, cut into pipeline stages over pipecomm_ext.

    python examples/train_text.py --ranks 4 --verify          starts its own 4 processes
    torchrun --nproc-per-node 4 examples/train_text.py        the same under a launcher

Every rank holds one stage. Activations go to the next stage on channel 0, gradients come back on channel 1,
in the 1F1B order. --verify repeats the training unsplit in one process and compares all losses and the last
gradients.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import launch
import torch
from text_model import TextBatches, build_layers, loss_of, split_layers
from torch import nn
from tqdm import tqdm

from pipecomm_ext import Communicator, Recv, Send

ACTIVATIONS, GRADIENTS = 0, 1  # channels
VERIFY_LIMIT = 1e-5
SMOOTHING = 0.8  # of the plotted loss, per step


# ---- the pipeline ----------------------------------------------------------------------------------------


class Stage:
    """This rank's layers, its optimizer, and the messages to the stages before and after it."""

    def __init__(
        self, layers: list[nn.Module], comm: Communicator, micro_shape: tuple[int, int, int], lr: float
    ):
        self.comm = comm
        self.module = nn.Sequential(*layers).to(comm.device)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=lr)
        self.previous = comm.rank - 1 if comm.rank > 0 else None
        self.next = comm.rank + 1 if comm.rank < comm.size - 1 else None
        self.micro_shape = micro_shape  # [micro-batch, seq, hidden] of every activation and gradient
        self.num_bytes_sent = 0

    def receive_buffer(self) -> torch.Tensor:
        return torch.empty(self.micro_shape, device=self.comm.device)

    def exchange(self, sends: list[tuple], recvs: list[tuple]) -> list[torch.Tensor | None]:
        """Sends (tensor, peer, channel) and receives (peer, channel) as one batch; peer None: no message."""
        buffers = [None if peer is None else self.receive_buffer() for peer, _ in recvs]
        messages = [Send(tensor, peer, channel) for tensor, peer, channel in sends if peer is not None]
        self.num_bytes_sent += sum(send.tensor.nbytes for send in messages)
        messages += [
            Recv(buffer, peer, channel)
            for buffer, (peer, channel) in zip(buffers, recvs, strict=True)
            if buffer is not None
        ]
        self.comm.batch_p2p(messages)
        return buffers

    def step_1f1b(
        self, inputs: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...]
    ) -> list[torch.Tensor]:
        """One optimizer step over the micro-batches; their losses on the last stage, [] elsewhere."""
        num_micro = len(inputs)
        num_warmup = min(self.comm.size - self.comm.rank - 1, num_micro)
        from_previous, from_next = (self.previous, ACTIVATIONS), (self.next, GRADIENTS)
        in_flight: deque[tuple[torch.Tensor, torch.Tensor]] = deque()  # (stage input, stage output)
        losses: list[torch.Tensor] = []

        def forward(micro_idx: int, received: torch.Tensor | None) -> torch.Tensor:
            x = inputs[micro_idx] if received is None else received.requires_grad_()
            output = self.module(x)
            if self.next is None:
                output = loss_of(output, targets[micro_idx])
                losses.append(output.detach())
                output = output / num_micro
            in_flight.append((x, output))
            return output.detach()

        def backward(gradient: torch.Tensor | None) -> torch.Tensor | None:
            x, output = in_flight.popleft()
            output.backward(gradient)
            return x.grad

        self.optimizer.zero_grad()
        for micro_idx in range(num_warmup):
            (received,) = self.exchange([], [from_previous])
            output = forward(micro_idx, received)
            self.exchange([(output, self.next, ACTIVATIONS)], [])

        num_steady = num_micro - num_warmup
        received = self.exchange([], [from_previous])[0] if num_steady else None
        for idx in range(num_steady):
            output = forward(num_warmup + idx, received)
            (gradient,) = self.exchange([(output, self.next, ACTIVATIONS)], [from_next])
            gradient = backward(gradient)
            is_last = idx == num_steady - 1
            (received,) = self.exchange(
                [(gradient, self.previous, GRADIENTS)], [(None, ACTIVATIONS) if is_last else from_previous]
            )

        for _ in range(num_warmup):
            (gradient,) = self.exchange([], [from_next])
            self.exchange([(backward(gradient), self.previous, GRADIENTS)], [])

        self.optimizer.step()
        return losses

    def gather_gradients(self, shapes: list[list[torch.Size]]) -> list[torch.Tensor] | None:
        """The gradients of all stages in layer order, on the last stage; `shapes[stage]` are their shapes."""
        mine = [parameter.grad for parameter in self.module.parameters()]
        last = self.comm.size - 1
        if self.comm.rank != last:
            self.comm.batch_p2p([Send(gradient, last) for gradient in mine])
            return None
        theirs = [
            Recv(torch.empty(shape, device=self.comm.device), stage)
            for stage in range(last)
            for shape in shapes[stage]
        ]
        self.comm.batch_p2p(theirs)
        return [recv.tensor for recv in theirs] + mine


# ---- one training, split and unsplit ---------------------------------------------------------------------


def layers_of(args: argparse.Namespace) -> list[nn.Module]:
    return build_layers(args.layers, args.hidden, args.seq_len, args.seed)


def batches_of(args: argparse.Namespace) -> TextBatches:
    return TextBatches(args.batch_size, args.seq_len, args.seed)


def micro_batches(batches: TextBatches, step: int, num_micro: int, device: torch.device):
    inputs, targets = batches(step)
    return inputs.to(device).chunk(num_micro), targets.to(device).chunk(num_micro)


@dataclass
class Training:
    """What the last stage knows after the training."""

    losses: list[float]
    seconds: float
    gradients: list[torch.Tensor] | None = None  # of the last step, in layer order


def train_pipeline(args: argparse.Namespace, comm: Communicator) -> tuple[Training, Stage]:
    layers = layers_of(args)
    owned = split_layers(args.layers, comm.size)
    micro_shape = (args.batch_size // args.microbatches, args.seq_len, args.hidden)
    stage = Stage([layers[idx] for idx in owned[comm.rank]], comm, micro_shape, args.lr)
    batches = batches_of(args)
    is_last = comm.rank == comm.size - 1

    training = Training(losses=[], seconds=0.0)
    started_at = time.perf_counter()
    with tqdm(
        total=args.steps,
        desc="training",
        unit="step",
        ncols=90,
        disable=not is_last,
        mininterval=0.2 if sys.stderr.isatty() else 5.0,
    ) as progress:
        for step in range(args.steps):
            losses = stage.step_1f1b(*micro_batches(batches, step, args.microbatches, comm.device))
            if is_last:
                training.losses.append(torch.stack(losses).mean().item())
                progress.set_postfix(loss=f"{training.losses[-1]:.3f}", refresh=False)
                progress.update()
    training.seconds = time.perf_counter() - started_at
    if args.verify:
        shapes = [
            [parameter.shape for idx in stage_layers for parameter in layers[idx].parameters()]
            for stage_layers in owned
        ]
        training.gradients = stage.gather_gradients(shapes)
    return training, stage


def train_unsplit(args: argparse.Namespace, device: torch.device) -> Training:
    """The same training as train_pipeline's, by a plain loop in one process without any communication."""
    module = nn.Sequential(*layers_of(args)).to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=args.lr)
    batches = batches_of(args)
    training = Training(losses=[], seconds=0.0)
    started_at = time.perf_counter()
    for step in range(args.steps):
        optimizer.zero_grad()
        losses = []
        for inputs, targets in zip(*micro_batches(batches, step, args.microbatches, device), strict=True):
            loss = loss_of(module(inputs), targets)
            (loss / args.microbatches).backward()
            losses.append(loss.detach())
        optimizer.step()
        training.losses.append(torch.stack(losses).mean().item())
    training.seconds = time.perf_counter() - started_at
    training.gradients = [parameter.grad for parameter in module.parameters()]
    return training


# ---- results ---------------------------------------------------------------------------------------------


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference over the largest expected value; inf if anything is not finite."""
    if not (actual.isfinite().all() and expected.isfinite().all()):
        return float("inf")
    return ((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


def draw_losses(losses: list[float], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    total = weight = 0.0
    smoothed = []
    for loss in losses:
        total, weight = SMOOTHING * total + loss, SMOOTHING * weight + 1
        smoothed.append(total / weight)
    steps = range(1, len(losses) + 1)
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, losses, color="tab:blue", alpha=0.35, linewidth=1, label="loss of the step")
    axes.plot(steps, smoothed, color="tab:blue", linewidth=2, label=f"smoothed (exponential, {SMOOTHING:g})")
    axes.set(xlabel="optimizer step", ylabel="cross entropy (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def report(args: argparse.Namespace, comm: Communicator, training: Training, stage: Stage) -> int:
    """The last stage's summary, the picture and the verification; the exit code."""
    batches = batches_of(args)
    owned = split_layers(args.layers, comm.size)
    num_parameters = sum(parameter.numel() for layer in layers_of(args) for parameter in layer.parameters())
    num_text_bytes = args.steps * args.batch_size * args.seq_len
    blocks = "+".join(str(sum(1 <= idx <= args.layers for idx in layers)) for layers in owned)
    picture = Path(args.out) / "loss.png"
    draw_losses(
        training.losses, picture, f"Byte-level transformer, {comm.size} pipeline stages ({comm.transport})"
    )

    def line(name: str, text: str) -> None:
        print(f"{name:<10} {text}")

    print()
    line(
        "model",
        f"byte-level decoder, {args.layers} blocks, hidden {args.hidden}, {num_parameters:,} parameters",
    )
    line("text", f"{len(batches.text) / 1e6:.1f} MB of Python sources from {batches.directory}")
    line(
        "pipeline",
        f"{comm.size} stages ({blocks} blocks), {args.microbatches} micro-batches, 1F1B, {comm.device}",
    )
    line("transport", f"{comm.transport}: {comm.transport_reason}")
    line(
        "messages",
        f"{stage.num_bytes_sent / 1e6:.1f} MB sent by the last stage, "
        f"{torch.empty(stage.micro_shape).nbytes / 1e3:.0f} KB each",
    )
    line(
        "loss",
        f"{training.losses[0]:.3f} -> {training.losses[-1]:.3f} nats per byte in {args.steps} steps, "
        f"{training.seconds:.1f} s, {num_text_bytes / training.seconds / 1e3:.1f} KB of text per second",
    )
    line("picture", str(picture))
    return verify(args, comm.device, training, line) if args.verify else 0


def verify(args: argparse.Namespace, device: torch.device, training: Training, line) -> int:
    reference = train_unsplit(args, device)
    loss_difference = max(
        relative_difference(torch.tensor(split), torch.tensor(unsplit))
        for split, unsplit in zip(training.losses, reference.losses, strict=True)
    )
    gradient_difference = max(
        relative_difference(split, unsplit)
        for split, unsplit in zip(training.gradients, reference.gradients, strict=True)
    )
    equal = max(loss_difference, gradient_difference) <= VERIFY_LIMIT
    line(
        "verify",
        f"{'equal to' if equal else 'DIFFERS from'} the unsplit model ({reference.seconds:.1f} s): "
        f"largest relative difference {loss_difference:.1e} over {args.steps} losses, "
        f"{gradient_difference:.1e} over the last gradients, limit {VERIFY_LIMIT:.0e}",
    )
    return 0 if equal else 1


# ---- the script ------------------------------------------------------------------------------------------


def run_stage(args: argparse.Namespace) -> int:
    """Trains this rank's stage; the exit code."""
    tqdm.set_lock(threading.RLock())  # its default lock is a semaphore of the system, left behind by a kill
    with Communicator(device=args.device) as comm:
        training, stage = train_pipeline(args, comm)
        comm.barrier()
        return report(args, comm, training, stage) if comm.rank == comm.size - 1 else 0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    integer = dict(type=int, metavar="N")
    parser.add_argument(
        "--ranks", default=4, help="processes and stages; torchrun's number wins (4)", **integer
    )
    parser.add_argument("--steps", default=100, help="optimizer steps (100)", **integer)
    parser.add_argument("--batch-size", default=16, help="sequences a step (16)", **integer)
    parser.add_argument("--microbatches", default=8, help="pieces of a batch in the pipeline (8)", **integer)
    parser.add_argument("--seq-len", default=64, help="bytes a sequence (64)", **integer)
    parser.add_argument("--layers", default=4, help="transformer blocks (4)", **integer)
    parser.add_argument("--hidden", default=64, help="width, a multiple of 32 (64)", **integer)
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (3e-3)")
    parser.add_argument("--seed", default=1, help="of weights and batches (1)", **integer)
    parser.add_argument("--out", default="out/train_text", metavar="DIR", help="where the picture goes")
    parser.add_argument(
        "--device", choices=["auto", "cpu"], default="auto", help="auto: a GPU a rank if there are that many"
    )
    parser.add_argument(
        "--verify", action="store_true", help="compare with the unsplit model; exit code 1 if unequal"
    )
    args = parser.parse_args(arguments)
    for name in ("ranks", "steps", "batch_size", "microbatches", "seq_len", "layers", "hidden"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}")
    if args.batch_size % args.microbatches:
        parser.error(
            f"--batch-size {args.batch_size} is not a multiple of --microbatches {args.microbatches}"
        )
    if args.hidden % 32:
        parser.error(f"--hidden {args.hidden} is not a multiple of 32, the width of a head")
    num_stages = int(os.environ.get("WORLD_SIZE", args.ranks))
    if num_stages > args.layers:
        parser.error(f"{num_stages} stages need at least as many blocks; give --layers {num_stages} or more")
    return args


if __name__ == "__main__":
    # torch.optim imports torch._dynamo at its first step, in every rank anew if not here.
    sys.exit(launch.run(run_stage, parse_arguments(), preload=("torch._dynamo",)))
