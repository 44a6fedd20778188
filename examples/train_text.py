"""Trains a small language model on Python's own sources, cut into pipeline stages over pipecomm_ext.

    python examples/train_text.py --ranks 4 --verify          starts its own 4 processes
    torchrun --nproc-per-node 4 examples/train_text.py        the same under a launcher
    python examples/train_text.py --stages 1,2,1 --verify     stages of 1, 2 and 1 ranks

Every rank holds one stage. Activations go to the next stage on channel 0, gradients come back on channel 1,
in the 1F1B order. With --sequence-parallel N every stage is N ranks, each of which holds a piece of every
sequence and trades tokens for heads with the others during attention. With --stages the stages are
tensor-parallel, each over as many ranks as it says, and a StageRelay carries what goes between them.
--schedule runs another order of the same work, by name (zb_v, dualpipe, interleaved, ...), and draws it as
simulated and as measured. --verify
trains the unsplit model along in one process and compares the loss and all gradients of every step.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from lib import launch
from lib.links import RankLink, RelayLink
from lib.planned import PlannedStages, plan_of
from lib.report import draw_losses, progress_bar, relative_difference
from lib.sequence import SequencePiece
from lib.stage import Stage
from lib.tensor_parallel import split_over
from lib.text_model import HEAD_DIM, TextBatches, build_layers, loss_of, split_layers
from torch import nn

from pipecomm_ext import Communicator
from pipecomm_ext.parallel_state import PipelineTopology

VERIFY_LIMIT = 1e-5


# ---- one training, split and unsplit ---------------------------------------------------------------------


def piece_of(args: argparse.Namespace, comm: Communicator | None = None) -> SequencePiece:
    return SequencePiece(args.seq_len, args.hidden // HEAD_DIM, comm)


def layers_of(args: argparse.Namespace, piece: SequencePiece | None = None) -> list[nn.Module]:
    return build_layers(args.layers, args.hidden, piece or piece_of(args), args.seed)


def batches_of(args: argparse.Namespace) -> TextBatches:
    return TextBatches(args.batch_size, args.seq_len, args.seed)


def micro_batches(
    batches: TextBatches, step: int, num_micro: int, device: torch.device, tokens: slice = slice(None)
):
    inputs, targets = (rows[:, tokens].to(device) for rows in batches(step))
    return inputs.chunk(num_micro), targets.chunk(num_micro)


def num_stages_of(args: argparse.Namespace, num_ranks: int) -> int:
    """Stages of the model; a schedule may give a rank several of them."""
    if args.schedule is None:
        return num_ranks
    return len(plan_of(args.schedule, num_ranks, args.microbatches).chains[0])


def is_reporter(link: RankLink | RelayLink, piece: SequencePiece) -> bool:
    """Whether this rank reports the result: the first rank of the last stage."""
    return link.stage_idx == link.num_stages - 1 and link.is_leader and piece.idx == 0


@dataclass
class Training:
    """The results of the last stage after the training."""

    losses: list[float]
    seconds: float
    unsplit: UnsplitModel | None = None  # what it was compared with, if it was


def train_pipeline(
    args: argparse.Namespace, link: RankLink | RelayLink, piece: SequencePiece
) -> tuple[Training, Stage | PlannedStages]:
    layers = layers_of(args, piece)
    owned = split_layers(args.layers, num_stages_of(args, link.num_stages))
    micro_shape = (args.batch_size // args.microbatches, piece.sizes[piece.idx], args.hidden)
    if args.schedule is not None:
        plan = plan_of(args.schedule, link.num_stages, args.microbatches)
        stage = PlannedStages(plan, layers, owned, link.comm, piece, micro_shape, args.lr)
    else:
        mine = [layers[idx] for idx in owned[link.stage_idx]]
        if isinstance(link, RelayLink):
            mine = split_over(mine, link.topology.get_tensor_model_parallel_group())
        stage = Stage(mine, link, piece, micro_shape, args.lr)
    batches = batches_of(args)
    shapes = [
        [parameter.shape for idx in stage_layers for parameter in layers[idx].parameters()]
        for stage_layers in owned
    ]
    is_last = link.stage_idx == link.num_stages - 1

    training = Training(losses=[], seconds=0.0)
    if args.verify and is_reporter(link, piece):
        training.unsplit = UnsplitModel(args, link.device)
    with progress_bar(args.steps, is_reporter(link, piece)) as progress:
        for step in range(args.steps):
            inputs, targets = micro_batches(batches, step, args.microbatches, link.device, piece.tokens)
            started_at = time.perf_counter()
            losses = stage.step(inputs, targets)
            if is_last:
                training.losses.append(torch.stack(piece.sum_over_pieces(losses)).mean().item())
                progress.set_postfix(loss=f"{training.losses[-1]:.3f}", refresh=False)
                progress.update()
            training.seconds += time.perf_counter() - started_at
            if args.verify and piece.idx == 0:  # the gradients of the other pieces are the same
                gradients = stage.gather_gradients(shapes)
                if training.unsplit is not None:
                    training.unsplit.follow(training.losses[-1], gradients)
    return training, stage


class UnsplitModel:
    """The whole model in one process, trained in step with the split one and compared with it."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.args, self.device = args, device
        self.module = nn.Sequential(*layers_of(args)).to(device)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=args.lr)
        self.batches = batches_of(args)
        self.loss_difference = self.gradient_difference = 0.0  # relative, the largest so far
        self.num_steps = 0

    def backward(self) -> tuple[float, list[torch.Tensor]]:
        """Loss and gradients of the next step, by a plain loop without any communication."""
        self.optimizer.zero_grad()
        losses = []
        micro = micro_batches(self.batches, self.num_steps, self.args.microbatches, self.device)
        for inputs, targets in zip(*micro, strict=True):
            loss = loss_of(self.module(inputs), targets, self.args.seq_len)
            (loss / self.args.microbatches).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean().item(), [p.grad for p in self.module.parameters()]

    def follow(self, split_loss: float, split_gradients: list[torch.Tensor]) -> None:
        """Compares the next step with the split model's, then makes it with the split model's gradients.

        So both have the same weights before every step, and each step is compared separately. With its own
        gradients the weights would diverge: where a gradient is almost zero, Adam turns the rounding of sums
        in another order into steps of full length.
        """
        loss, gradients = self.backward()
        difference = relative_difference(torch.tensor(split_loss), torch.tensor(loss))
        self.loss_difference = max(self.loss_difference, difference)
        for parameter, gradient, split in zip(
            self.module.parameters(), gradients, split_gradients, strict=True
        ):
            self.gradient_difference = max(self.gradient_difference, relative_difference(split, gradient))
            parameter.grad = split
        self.optimizer.step()
        self.num_steps += 1


# ---- results ---------------------------------------------------------------------------------------------


def plus(sizes: Iterable[int]) -> str:
    return "+".join(map(str, sizes))


def report(
    args: argparse.Namespace, link: RankLink | RelayLink, training: Training, stage: Stage | PlannedStages
) -> int:
    """Shows the last stage's summary, the picture and the verification; returns the exit code."""
    batches = batches_of(args)
    comm = link.comm
    owned = split_layers(args.layers, num_stages_of(args, link.num_stages))
    num_parameters = sum(parameter.numel() for layer in layers_of(args) for parameter in layer.parameters())
    num_text_bytes = args.steps * args.batch_size * args.seq_len
    blocks = plus(sum(1 <= idx <= args.layers for idx in layers) for layers in owned)
    shape, split = f"{len(owned)} {'stage' if len(owned) == 1 else 'stages'}", f"{blocks} blocks"
    if args.stages is not None:
        shape += f" of {plus(args.stages)} ranks"
    if stage.piece.comm is not None:
        shape += f" x {stage.piece.comm.size} sequence pieces"
        split += f"; {plus(stage.piece.sizes)} tokens, {plus(stage.piece.head_sizes)} heads"
    name = "1F1B" if args.schedule is None else stage.plan.name
    picture = Path(args.out) / "loss.png"
    draw_losses(training.losses, picture, f"Byte-level transformer, pipeline of {shape} ({comm.transport})")

    def line(name: str, text: str) -> None:
        print(f"{name:<10} {text}")

    print()
    line(
        "model",
        f"byte-level decoder, {args.layers} blocks, hidden {args.hidden}, {num_parameters:,} parameters",
    )
    line("text", f"{len(batches.text) / 1e6:.1f} MB of Python sources from {batches.directory}")
    line("pipeline", f"{shape} ({split}), {args.microbatches} micro-batches, {name}, {comm.device}")
    line("transport", f"{comm.transport}: {comm.transport_reason}")
    line(
        "messages",
        f"{stage.num_bytes_sent / 1e6:.1f} MB sent back by a rank of the last stage, "
        f"{torch.empty(stage.micro_shape).nbytes / 1e3:.0f} KB each",
    )
    line(
        "loss",
        f"{training.losses[0]:.3f} -> {training.losses[-1]:.3f} nats per byte in {args.steps} steps, "
        f"{training.seconds:.1f} s, {num_text_bytes / training.seconds / 1e3:.1f} KB of text per second",
    )
    line("picture", str(picture))
    return verify(training.unsplit, line) if training.unsplit is not None else 0


def verify(unsplit: UnsplitModel, line: Callable[[str, str], None]) -> int:
    equal = max(unsplit.loss_difference, unsplit.gradient_difference) <= VERIFY_LIMIT
    line(
        "verify",
        f"{'equal to' if equal else 'DIFFERS from'} the unsplit model in {unsplit.num_steps} steps: "
        f"largest relative difference {unsplit.loss_difference:.1e} of the losses, "
        f"{unsplit.gradient_difference:.1e} of the gradients, limit {VERIFY_LIMIT:.0e}",
    )
    return 0 if equal else 1


# ---- the script ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def links(args: argparse.Namespace) -> Iterator[tuple[RankLink | RelayLink, Communicator | None]]:
    """My link to the other stages, and the communicator of all pieces of my stage's sequences."""
    if args.stages is not None:
        topology = PipelineTopology(args.stages)
        with topology.communicator:
            yield RelayLink(topology), None
        return
    if args.sequence_parallel == 1:
        with Communicator(device=args.device) as stages:
            yield RankLink(stages), None
        return
    # A column and a row of the grid of ranks.
    grid = torch.arange(dist.get_world_size()).view(-1, args.sequence_parallel)  # [stage, piece]
    column, _ = dist.new_subgroups_by_enumeration(grid.T.tolist())
    row, _ = dist.new_subgroups_by_enumeration(grid.tolist())
    with (
        Communicator(column, device=args.device) as stages,
        Communicator(row, device=args.device) as pieces,
    ):
        yield RankLink(stages), pieces


def run_stage(args: argparse.Namespace) -> int:
    """Trains this rank's stage; returns the exit code."""
    with links(args) as (link, pieces):
        piece = piece_of(args, pieces)
        training, stage = train_pipeline(args, link, piece)
        link.comm.barrier()
        timelines = None
        if args.schedule is not None and piece.idx == 0:
            Path(args.out).mkdir(parents=True, exist_ok=True)
            timelines = stage.draw_timelines(Path(args.out) / "timeline.html")
        if not is_reporter(link, piece):
            return 0
        exit_code = report(args, link, training, stage)
        if timelines is not None:
            print(f"timeline   {Path(args.out) / 'timeline.html'} (hover shows what is where)\n{timelines}")
        return exit_code


def stages_argument(text: str) -> list[int]:
    """ "1,2,1" -> [1, 2, 1]"""
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of ranks like 1,2,1") from None


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    integer = dict(type=int, metavar="N")
    parser.add_argument(
        "--ranks", default=4, help="processes, all stages together; torchrun's number wins (4)", **integer
    )
    parser.add_argument(
        "--sequence-parallel",
        default=1,
        help="ranks a stage, each with a piece of the sequence; neither tokens nor heads need divide (1)",
        **integer,
    )
    parser.add_argument(
        "--stages",
        type=stages_argument,
        metavar="LIST",
        help="ranks of each stage, like 1,2,1, which split its layers (tensor parallelism); sets --ranks",
    )
    parser.add_argument(
        "--schedule",
        metavar="NAME",
        help="gpipe, 1f1b, interleaved, zb_h1, zb_h2, zb_v, dualpipe, dualpipev or u_shaped (1F1B by hand)",
    )
    parser.add_argument("--steps", default=100, help="optimizer steps (100)", **integer)
    parser.add_argument("--batch-size", default=16, help="sequences a step (16)", **integer)
    parser.add_argument("--microbatches", default=8, help="pieces of a batch in the pipeline (8)", **integer)
    parser.add_argument("--seq-len", default=64, help="bytes a sequence (64)", **integer)
    parser.add_argument(
        "--layers", help="transformer blocks (4, or one per stage if there are more)", **integer
    )
    parser.add_argument("--hidden", default=64, help=f"width, a multiple of {HEAD_DIM} (64)", **integer)
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (3e-3)")
    parser.add_argument("--seed", default=1, help="of weights and batches (1)", **integer)
    parser.add_argument("--out", default="out/train_text", metavar="DIR", help="where the picture goes")
    parser.add_argument("--device", **launch.DEVICE_OPTION)
    parser.add_argument(
        "--verify", action="store_true", help="compare with the unsplit model; exit code 1 if unequal"
    )
    args = launch.parsed(parser, arguments)
    positive = (
        "ranks", "sequence_parallel", "steps", "batch_size", "microbatches", "seq_len", "layers", "hidden"
    )  # fmt: skip
    for name in positive:
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}")
    if args.batch_size % args.microbatches:
        parser.error(
            f"--batch-size {args.batch_size} is not a multiple of --microbatches {args.microbatches}"
        )
    if args.hidden % HEAD_DIM:
        parser.error(f"--hidden {args.hidden} is not a multiple of {HEAD_DIM}, the width of a head")
    if args.stages is not None:
        check_stages(parser, args)
        return args
    num_ranks = launch.num_ranks_of(args)
    if num_ranks % args.sequence_parallel:
        parser.error(
            f"{num_ranks} ranks cannot form stages of {args.sequence_parallel} ranks each; "
            "make the ranks a multiple of --sequence-parallel"
        )
    check_num_stages(parser, args, num_ranks // args.sequence_parallel)
    return args


def check_num_stages(parser: argparse.ArgumentParser, args: argparse.Namespace, num_parts: int) -> None:
    try:
        num_stages = num_stages_of(args, num_parts)
    except ValueError as error:
        parser.error(f"--schedule {args.schedule}: {error}")
    if args.layers is None:
        args.layers = max(4, num_stages)
    if num_stages > args.layers:
        parser.error(f"{num_stages} stages need at least as many blocks; give --layers {num_stages} or more")


def check_stages(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """--stages sets the number of ranks."""
    args.ranks = sum(args.stages)
    num_ranks = launch.num_ranks_of(args)
    if min(args.stages) < 1 or num_ranks != args.ranks:
        parser.error(f"--stages {args.stages} must be 1 or more each, and together the {num_ranks} ranks")
    if args.sequence_parallel > 1 or args.schedule is not None:
        parser.error("--stages does not go with --sequence-parallel or --schedule")
    num_heads = args.hidden // HEAD_DIM
    if max(args.stages) > num_heads:
        parser.error(f"a stage of {max(args.stages)} ranks needs as many heads, there are {num_heads}")
    check_num_stages(parser, args, len(args.stages))


def main(arguments: list[str] | None = None) -> int:
    # torch.optim imports torch._dynamo at its first step, in each rank separately if not here.
    return launch.run(run_stage, parse_arguments(arguments), preload=("torch._dynamo",))


if __name__ == "__main__":
    sys.exit(main())
