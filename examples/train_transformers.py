"""Trains a Llama of Hugging Face transformers on real text, split along the sequence over ranks.

    python examples/train_transformers.py --ranks 4 --verify            starts its own 4 processes
    torchrun --nproc-per-node 4 examples/train_transformers.py          the same under a launcher

The model is transformers' own, made from a config. What is changed for split sequences: register(),
attn_implementation, split_batch() and sum_gradients(). Neither the sequence nor the heads
need to divide by the ranks. At the end the model continues a line of text, whose prompt is computed split.

--verify trains the unsplit model along on every rank, and compares loss and gradients of each step.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from lib import launch
from lib.report import draw_losses, progress_bar, relative_difference
from lib.text_model import VOCABULARY, TextBatches

from pipecomm_ext import Communicator, cal_split_sizes

VERIFY_LIMIT = 1e-4  # of float32; relative to the largest value
PROMPT = b"import os\nimport sys\n\ndef "
NUM_NEW_TOKENS = 24


def make_model(args: argparse.Namespace, attention: str):
    """Makes the model, with the same weights at every call."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=max(args.seq_len, 64),
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(args.seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(args.device)


class UnsplitModel:
    """The same model in one process; follows the split one."""

    def __init__(self, args: argparse.Namespace):
        self.model = make_model(args, "sdpa")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.worst = 0.0

    def follow(self, batch: dict, split_loss: torch.Tensor, split_gradients: list[torch.Tensor]) -> None:
        """Compares a step, then makes it with the split model's gradients, so that each step is compared
        separately."""
        self.optimizer.zero_grad()
        loss = self.model(**batch).loss
        loss.backward()
        differences = [relative_difference(split_loss, loss.detach())]
        for parameter, gradient in zip(self.model.parameters(), split_gradients, strict=True):
            differences.append(relative_difference(gradient, parameter.grad))
            parameter.grad = gradient.clone()
        # Keeps a NaN.
        self.worst = torch.tensor([self.worst, *differences]).max().item()
        self.optimizer.step()


def run_rank(args: argparse.Namespace) -> int:
    from pipecomm_ext.integrations import transformers as pipecomm_transformers

    batches = TextBatches(args.batch_size, args.seq_len, args.seed)
    with Communicator(device=args.device) as comm:
        pipecomm_transformers.register(comm)
        model = make_model(args, "pipecomm_ulysses")
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        unsplit = UnsplitModel(args) if args.verify else None
        losses, seconds = [], 0.0
        progress = progress_bar(args.steps, is_shown=comm.rank == 0)
        for step in range(args.steps):
            inputs, targets = (rows.to(args.device).contiguous() for rows in batches(step))
            batch = {"input_ids": inputs, "labels": targets, "shift_labels": targets}
            start = time.perf_counter()
            loss = model(**pipecomm_transformers.split_batch(batch, comm)).loss
            optimizer.zero_grad()
            loss.backward()
            pipecomm_transformers.sum_gradients(model, comm)
            loss = loss.detach()
            dist.all_reduce(loss)
            seconds += time.perf_counter() - start
            losses.append(loss.item())
            if unsplit is not None:
                unsplit.follow(batch, loss, [parameter.grad for parameter in model.parameters()])
            optimizer.step()
            progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            progress.update()
        progress.close()

        model.eval()
        prompt = torch.tensor([list(PROMPT)], device=args.device)
        tokens = pipecomm_transformers.generate(
            model, prompt, torch.ones_like(prompt), comm, max_new_tokens=NUM_NEW_TOKENS, do_sample=False
        )
        return report(args, comm, losses, seconds, tokens[0], unsplit)


def report(
    args: argparse.Namespace,
    comm: Communicator,
    losses: list[float],
    seconds: float,
    tokens: torch.Tensor,
    unsplit: UnsplitModel | None,
) -> int:
    """Prints on the first rank; returns the exit code."""
    sizes = cal_split_sizes(args.seq_len, comm.size)
    lines = [
        f"ranks      {comm.size}, {comm.transport}: {comm.transport_reason}",
        f"model      Llama of {args.layers} layers, {args.heads} heads, {args.kv_heads} key/value heads",
        f"tokens     {args.batch_size} x {args.seq_len} bytes, a rank holds {sizes}",
        f"loss       {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte in {args.steps} steps",
        f"time       {1e3 * seconds / args.steps:.1f} ms a step",
    ]
    exit_code = 0
    if unsplit is not None:
        is_equal = unsplit.worst <= VERIFY_LIMIT  # False for NaN
        exit_code = 0 if is_equal else 1
        verdict = "equal to" if is_equal else "DIFFERS from"
        lines.append(
            f"verify     {verdict} the unsplit model in {args.steps} steps: largest relative difference "
            f"{unsplit.worst:.1e}, limit {VERIFY_LIMIT:.0e}"
        )
    if comm.rank == 0:
        picture = Path(args.out) / "loss.png"
        draw_losses(losses, picture, f"A Llama over sequences split on {comm.size} ranks")
        lines.append(f"picture    {picture}")
        text = bytes(tokens.tolist()).decode("ascii", "replace")
        lines.append("continued  the prompt, and what the model adds:")
        lines += [f"    {line}" for line in text.split("\n")]
        print("\n".join(lines))
    return exit_code


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = [
        ("ranks", 4, "processes, as many as you like"),
        ("steps", 50, "optimizer steps"),
        ("batch-size", 4, "sequences a step"),
        ("seq-len", 254, "bytes a sequence, any number from the number of ranks on"),
        ("layers", 2, "decoder layers"),
        ("hidden", 64, "width, a multiple of twice the heads"),
        ("heads", 8, "query heads"),
        ("kv-heads", 2, "key/value heads, a divisor of the query heads"),
        ("seed", 1, "of weights and text"),
    ]
    for name, default, text in numbers:
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} ({default})")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (3e-3)")
    parser.add_argument("--out", default="out/transformers", metavar="DIR", help="where the picture goes")
    parser.add_argument("--device", **launch.DEVICE_OPTION)
    parser.add_argument(
        "--verify", action="store_true", help="compare with the unsplit model; exit code 1 if unequal"
    )
    args = launch.parsed(parser, arguments)
    for name, _, _ in numbers:
        value = getattr(args, name.replace("-", "_"))
        if value < 1:
            parser.error(f"--{name} must be positive, got {value}")
    if args.hidden % (2 * args.heads):
        parser.error(f"--hidden {args.hidden} must be a multiple of twice --heads {args.heads}")
    if args.heads % args.kv_heads:
        parser.error(f"--kv-heads {args.kv_heads} must divide --heads {args.heads}")
    num_ranks = launch.num_ranks_of(args)
    if args.seq_len < num_ranks:
        parser.error(f"--seq-len {args.seq_len} cannot be split over {num_ranks} ranks")
    return args


def main(arguments: list[str] | None = None) -> int:
    preload = "transformers.models.llama.modeling_llama", "torch._dynamo"
    return launch.run(run_rank, parse_arguments(arguments), preload=preload)


if __name__ == "__main__":
    sys.exit(main())
