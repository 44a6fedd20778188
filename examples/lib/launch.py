"""Runs a script's body on several ranks of this machine, or as one of the ranks that torchrun started."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

GRACE_S = 5.0  # for the other ranks to report, once one has failed
DEVICE_OPTION = {
    "choices": ["auto", "cpu", "cuda"],
    "default": "auto",
    "help": "cuda: ranks share GPUs if need be; auto: a GPU a rank if there are that many, else cpu",
}
# NCCL between ranks on one GPU, with few thread blocks, since all ranks' blocks must fit at once.
SHARED_GPU = {"NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4", "NCCL_RAS_ENABLE": "0"}
# From NCCL 2.30 on, two ranks may share a GPU.
TWO_RANKS = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NET_GDR_LEVEL": "LOC", "CUDA_MODULE_LOADING": "EAGER"}
# Otherwise they count as on different hosts, and use sockets on the loopback device.
AS_HOSTS = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NET_PLUGIN": "none",
}

Body = Callable[[argparse.Namespace], int]


def run(body: Body, args: argparse.Namespace, preload: tuple[str, ...] = ()) -> int:
    """Calls body(args) on `args.ranks` ranks, each with the default group initialised; returns the exit code.

    Under torchrun, or if it has joined a default group already, this process is one of them, and the number
    of ranks there replaces `args.ranks`. Otherwise the ranks are started here and none outlives this call.
    `args.device` "auto" becomes "cuda" if there is a GPU for each rank, else "cpu"; with "cuda", ranks share
    GPUs if necessary. `body` is module-level and returns an exit code; `preload` names modules to import
    once for all ranks. If ranks fail, the first cause is printed, not its consequences on other ranks.
    """
    if dist.is_initialized():
        args.ranks = dist.get_world_size()
        return _run_rank(body, args, dist.get_rank())
    if "RANK" in os.environ:
        args.ranks = int(os.environ["WORLD_SIZE"])
        return _run_rank(body, args, int(os.environ.get("LOCAL_RANK", 0)))
    return _start_ranks(body, args, preload)


def parsed(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Parses the arguments; arguments that no rank could run with end the program with one line."""
    args = parser.parse_args(arguments)
    if args.device == "cuda" and torch.cuda.device_count() == 0:
        parser.error("--device cuda: this process sees no CUDA device; use --device cpu")
    return args


def num_ranks_of(args: argparse.Namespace) -> int:
    """The number of ranks: the launcher's, if there is one."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", args.ranks))


def has_ranks() -> bool:
    """Whether this process is one of ranks that were started elsewhere."""
    return dist.is_initialized() or "RANK" in os.environ


def _run_rank(body: Body, args: argparse.Namespace, local_rank: int, **group_arguments) -> int:
    torch.set_num_threads(1)  # ranks share the cores
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.device_count() >= args.ranks else "cpu"
    if args.device == "cuda":
        take_gpu(local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", args.ranks)))
    if dist.is_initialized():
        return body(args)
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo", **group_arguments)
    try:
        return body(args)
    finally:
        dist.destroy_process_group()


def take_gpu(local_rank: int, num_local_ranks: int) -> None:
    """Makes a GPU the current one, before NCCL is used: one for each rank of the machine if there are enough.

    Processes of ranks that share a GPU run on it in turns, so results are right but times on the device are
    meaningless.
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise RuntimeError("this process sees no CUDA device; use --device cpu")
    if num_gpus < num_local_ranks:
        os.environ.update(shared_gpu(local_rank, num_local_ranks, num_gpus, torch.cuda.nccl.version()))
    torch.cuda.set_device(local_rank % num_gpus)


def shared_gpu(
    local_rank: int, num_local_ranks: int, num_gpus: int, nccl_version: tuple[int, ...]
) -> dict[str, str]:
    """The environment in which NCCL lets ranks share a GPU. All ranks of the machine get the same kind."""
    if nccl_version >= (2, 30) and num_local_ranks <= 2 * num_gpus:
        return SHARED_GPU | TWO_RANKS
    return SHARED_GPU | AS_HOSTS | {"NCCL_HOSTID": f"{socket.gethostname()}-{local_rank}"}


def _started_rank(rank: int, body: Body, args: argparse.Namespace, directory: str) -> None:
    gc.freeze()  # a collection would copy the pages of everything that the server has imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the script, which ends its ranks
    store = dist.FileStore(os.path.join(directory, "store"), args.ranks)
    try:
        sys.exit(_run_rank(body, args, rank, store=store, rank=rank, world_size=args.ranks))
    except Exception as error:
        kind = "cause" if getattr(error, "origin_rank", None) in (None, rank) else "consequence"
        report = Path(directory, f"{kind}-{time.monotonic_ns():020}")
        report.write_text(f"rank {rank} failed:\n{traceback.format_exc()}", encoding="utf-8")
        sys.exit(1)


def _start_ranks(body: Body, args: argparse.Namespace, preload: tuple[str, ...]) -> int:
    print(f"starting {args.ranks} ranks", file=sys.stderr, flush=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", *preload])
    with tempfile.TemporaryDirectory(prefix="pipecomm-launch-") as directory:
        ranks = [
            context.Process(target=_started_rank, args=(rank, body, args, directory))
            for rank in range(args.ranks)
        ]
        try:
            for process in ranks:
                process.start()
            exit_codes = _wait_for(ranks)
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            return 130
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()
        for rank, exit_code in enumerate(exit_codes):
            if exit_code is not None and exit_code < 0:
                print(f"rank {rank} died: {signal.Signals(-exit_code).name}", file=sys.stderr)
        reports = sorted(Path(directory).glob("c*-*"))  # causes, then consequences, each in the order of time
        if reports:
            print(reports[0].read_text(), end="", file=sys.stderr)
        return max((abs(code) if code in (0, 1, 2) else 1) for code in exit_codes)


def _wait_for(ranks: list) -> list[int | None]:
    """Exit codes once all ranks ended, or GRACE_S after the first failed (None for those still running)."""
    until = None
    while any(process.exitcode is None for process in ranks):
        if until is None and any(process.exitcode for process in ranks):
            until = time.monotonic() + GRACE_S
        if until is not None and time.monotonic() > until:
            break
        wait([process.sentinel for process in ranks if process.exitcode is None], timeout=0.5)
    return [process.exitcode for process in ranks]
