"""Causal attention over real text, split along the sequence over ranks (Ulysses), against the unsplit one.

    python examples/ulysses_attention.py --ranks 4            starts its own 4 processes
    torchrun --nproc-per-node 4 examples/ulysses_attention.py the same under a launcher

Every rank holds a piece of the sequence. For attention the ranks trade: each gives up tokens of most heads
and gets all tokens of some heads, one exchange for q, k and v together, and one back; in chunks of heads, so
that the next chunk arrives while one is computed. Neither the sequence
nor the heads need to divide by the ranks, and there may be fewer key/value heads than ranks (grouped
queries): a key/value head is sent to exactly those ranks whose query heads read it.

Output, loss and the gradients of all weights are compared with the unsplit attention; exit code 1 if unequal.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from lib import launch
from lib.attention import HEADS, SEQ, attend_whole
from lib.report import draw_split, progress_bar, relative_difference
from lib.text_model import VOCABULARY, TextBatches
from torch import nn
from torch.nn import functional

from pipecomm_ext import (
    Communicator,
    cal_split_sizes,
    gather_forward_split_backward,
    split_forward_gather_backward,
    ulysses_attention,
)

LIMIT = {torch.float32: 1e-4, torch.float64: 1e-12}  # relative to the largest value
INIT_STD = 0.1


class Attention(nn.Module):
    """Byte embedding, grouped-query causal attention, logits of the next byte."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int):
        super().__init__()
        hidden = num_heads * head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.q = nn.Linear(hidden, hidden)
        # A bias of the keys would shift all scores of a query equally; its gradient would be only rounding.
        self.k = nn.Linear(hidden, num_kv_heads * head_dim, bias=False)
        self.v = nn.Linear(hidden, num_kv_heads * head_dim)
        self.out = nn.Linear(hidden, VOCABULARY)
        nn.init.normal_(self.embedding.weight, std=INIT_STD)

    def forward(self, text: torch.Tensor, attend) -> torch.Tensor:
        """int64[batch, tokens] -> logits [batch, tokens, 256]; `attend` sees q, k, v of these tokens."""
        x = self.embedding(text)
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q, self.k, self.v)
        )  # [batch, tokens, heads, head_dim]
        return self.out(attend(q, k, v).flatten(HEADS))


def summed_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss in nats, summed over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def run_rank(args: argparse.Namespace) -> int:
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    model = Attention(args.heads, args.kv_heads, args.head_dim).to(device, args.dtype)
    text, targets = (
        rows.to(device) for rows in TextBatches(args.batch_size, args.seq_len, args.seed)(step=0)
    )

    model.zero_grad()
    whole_logits = model(text, attend_whole)
    whole_loss = summed_loss(whole_logits, targets)
    whole_loss.backward()
    whole_grads = [parameter.grad.clone() for parameter in model.parameters()]

    with Communicator(device=device) as comm:
        split = {"process_group": comm, "chunks": args.chunks, "gather_size": args.seq_len}
        attend = functools.partial(ulysses_attention, **split, is_causal=True)
        seq_sizes, head_sizes = (cal_split_sizes(n, comm.size) for n in (args.seq_len, args.heads))
        my_text, my_targets = (split_forward_gather_backward(rows, comm, SEQ) for rows in (text, targets))
        progress = progress_bar(args.repeat, comm.rank == 0, "attention")
        for _ in range(args.repeat):
            model.zero_grad()
            start = time.perf_counter()
            my_logits = model(my_text, attend)
            my_loss = summed_loss(my_logits, my_targets)
            my_loss.backward()
            seconds = time.perf_counter() - start
            progress.update()
        progress.close()
        logits = gather_forward_split_backward(my_logits.detach(), comm, SEQ, seq_sizes)
        loss = my_loss.detach().clone()
        dist.all_reduce(loss)
        for parameter in model.parameters():  # each rank saw only its tokens: the sum over ranks is the whole
            dist.all_reduce(parameter.grad)

        differences = {"output": relative_difference(logits, whole_logits.detach())}
        differences["loss"] = relative_difference(loss, whole_loss.detach())
        for (name, parameter), whole_grad in zip(model.named_parameters(), whole_grads, strict=True):
            differences[f"gradient of {name}"] = relative_difference(parameter.grad, whole_grad)
        worst = torch.tensor(max(differences.values()), device=device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        is_equal = bool(worst <= LIMIT[args.dtype])  # False for NaN
        if comm.rank == 0:
            print(f"ranks      {comm.size}, {comm.transport}: {comm.transport_reason}")
            print(f"tokens     {args.batch_size} x {args.seq_len} bytes, a rank holds {seq_sizes}")
            print(f"heads      {args.heads}, a rank attends {head_sizes}")
            print(f"kv heads   {args.kv_heads}, sent to the ranks whose heads read them")
            print(f"time       {1e3 * seconds:.1f} ms forward and backward")
            for name, difference in differences.items():
                print(f"  {name:<28} differs by {difference:.1e} of its largest value")
            picture = Path(args.out) / "split.png"
            draw_split(seq_sizes, head_sizes, picture, "What each rank holds")
            print(f"picture    {picture}")
            verdict = "equal to" if is_equal else "DIFFERS from"
            print(f"verify     {verdict} the unsplit attention: {worst:.1e}, limit {LIMIT[args.dtype]:.0e}")
    return 0 if is_equal else 1


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = [
        ("ranks", 4, "processes, as many as you like"),
        ("seq-len", 1021, "tokens, any number"),
        ("heads", 10, "query heads, any number"),
        ("kv-heads", 2, "key/value heads, at most the query heads"),
        ("chunks", 2, "of a rank's heads"),
        ("head-dim", 16, "width of a head"),
        ("batch-size", 2, "sequences"),
        ("repeat", 2, "passes; the last one is timed"),
        ("seed", 1, "of weights and text"),
    ]
    for name, default, text in numbers:
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} ({default})")
    parser.add_argument(
        "--dtype", choices=["float32", "float64"], default="float32", help="of weights (float32)"
    )
    parser.add_argument("--out", default="out/ulysses", metavar="DIR", help="where the picture goes")
    parser.add_argument("--device", **launch.DEVICE_OPTION)
    args = launch.parsed(parser, arguments)
    for name, _, _ in numbers:
        value = getattr(args, name.replace("-", "_"))
        if value < 1:
            parser.error(f"--{name} must be positive, got {value}")
    if args.kv_heads > args.heads:
        parser.error(f"--kv-heads {args.kv_heads} must be at most --heads {args.heads}")
    args.dtype = getattr(torch, args.dtype)
    return args


def main(arguments: list[str] | None = None) -> int:
    return launch.run(run_rank, parse_arguments(arguments))


if __name__ == "__main__":
    sys.exit(main())
