"""Several hosts on one machine, for tests: ranks that share neither network nor memory nor processes.

    with HostPool(HostPlan(num_ranks=2), HostPlan(num_ranks=2)) as hosts:   # a pool as of ranks.py
        hosts.run(4, body)                       # ranks 0 and 1 on the first host, 2 and 3 on the second
        with hosts.disposable(4, body) as world:
            world.cut_link(1)                    # silently: no rank is notified
            world.kill_host(1)

A host is a network, PID, mount, UTS and IPC namespace with a name, an address, an /etc/hosts, a /proc and a
/dev/shm of its own. A further network namespace is the switch: a bridge, to which a veth pair connects each
host. All of it belongs to processes and ends with them. Needs root, `ip` and some tools of util-linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from ranks import RankGroup, RankPool, RankProcess, die_with, serve_rank
from tools import find_tool, needs
from tools import missing as missing_tools

# Of <sched.h>, <sys/mount.h> and <sys/prctl.h>.
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG = 1
MASTER_PORT = 29500  # any: each network has all ports
INTERFACE = "eth0"  # of every host

libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class HostPlan:
    """The properties of a host."""

    num_ranks: int
    resolves_itself_to_loopback: bool = False  # 127.0.1.1, as an installed Debian or Ubuntu does
    gloo_interface: str | None = INTERFACE  # GLOO_SOCKET_IFNAME of its ranks


def host_name(host: int) -> str:
    return f"host{host}"


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def hosts_file(host: int, plans: list[HostPlan]) -> str:
    """The host's /etc/hosts."""
    lines = ["127.0.0.1 localhost"]
    for other, plan in enumerate(plans):
        is_wrong = other == host and plan.resolves_itself_to_loopback
        lines.append(f"{'127.0.1.1' if is_wrong else address(other)} {host_name(other)}")
    return "\n".join(lines) + "\n"


@functools.cache
def missing() -> str | None:
    """Why hosts cannot be made here, or None."""
    if reason := missing_tools("ip", "nsenter", "unshare"):
        return reason
    if not hasattr(os, "pidfd_open"):
        return "this Python has no os.pidfd_open"
    attempt = (
        "$0 link add name port0 type veth peer name eth0 && $0 link add name switch type bridge"
        " && $0 link set port0 master switch"
    )
    namespaces = ["--net", "--uts", "--ipc", "--pid", "--fork", "--mount-proc"]
    done = subprocess.run(
        [find_tool("unshare"), *namespaces, "sh", "-c", attempt, find_tool("ip")],
        capture_output=True,
        text=True,
    )
    return None if done.returncode == 0 else f"namespaces and veth pairs: {done.stderr.strip()}"


@functools.cache
def cannot_limit() -> str | None:
    """Why the rate of a link cannot be limited where there are hosts, or None."""
    [unshare, tc] = needs("unshare", "tc")
    command = [unshare, "--net", tc, *shaped("lo", "1gbit")]
    done = subprocess.run(command, capture_output=True, text=True)
    return None if done.returncode == 0 else f"tc: {done.stderr.strip()}"


def shaped(interface: str, rate: str) -> list[str]:
    """The arguments of `tc` that limit a link."""
    return f"qdisc add dev {interface} root tbf rate {rate} burst 1mb latency 100ms".split()


# ---- what becomes a host -----------------------------------------------------------------------------------


def checked(result: int) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def mount(source: str, target: str, kind: str | None, flags: int = 0) -> None:
    texts = [text and text.encode() for text in (source, target, kind)]
    checked(libc.mount(*texts, ctypes.c_ulong(flags), None))


def fork(body: Callable[[], None]) -> int:
    """A child that runs `body` and ends with this process."""
    pid = os.fork()
    if pid != 0:
        return pid
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        body()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def switch_main(control: Connection, lifeline: Connection) -> None:
    """The network that connects the others, until it is killed."""
    die_with(lifeline)
    checked(libc.unshare(CLONE_NEWNET))
    control.send(os.getpid())
    signal.pause()


def host_main(
    host: int,
    plans: list[HostPlan],
    directory: str,
    control: Connection,
    lifeline: Connection,
    rank_arguments: list[tuple[Any, ...]],
    size: int,
) -> None:
    """A host, until it is killed: its first process, and, once the network is up, its ranks.

    This process keeps the host's network, but is itself outside its PID namespace.
    """
    die_with(lifeline)
    namespaces = CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC
    checked(libc.unshare(namespaces))
    socket.sethostname(host_name(host))
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    names = Path(directory, f"hosts{host}")
    names.write_text(hosts_file(host, plans), encoding="utf-8")
    mount(str(names), "/etc/hosts", None, MS_BIND)
    mount("tmpfs", "/dev/shm", "tmpfs")
    is_up, tell_up = os.pipe()
    first = fork(lambda: first_process(tell_up))
    os.read(is_up, 1)
    control.send((os.getpid(), first))
    control.recv()  # the network is up
    pids = []
    while rank_arguments:
        rank, device, pipe, rank_lifeline = rank_arguments.pop(0)
        others = [*rank_arguments]

        def body(rank=rank, device=device, pipe=pipe, rank_lifeline=rank_lifeline, others=others):
            for _, _, *connections in others:
                for connection in connections:
                    connection.close()
            control.close()
            os.environ.update(rank_environment(host, plans, rank, size))
            serve_rank(rank, size, device, directory, pipe, rank_lifeline, "env://")

        pids.append(fork(body))
        pipe.close()
        rank_lifeline.close()
    control.send(pids)
    signal.pause()


def first_process(tell_up: int) -> None:
    """The PID namespace lives as long as this process."""
    mount("proc", "/proc", "proc")
    os.write(tell_up, b".")
    os.closerange(3, 1024)  # file descriptors of ranks must close with them
    while True:
        signal.pause()


def rank_environment(host: int, plans: list[HostPlan], rank: int, size: int) -> dict[str, str]:
    """The environment that torchrun sets on each host."""
    first_rank = sum(plan.num_ranks for plan in plans[:host])
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank - first_rank),
        "LOCAL_WORLD_SIZE": str(plans[host].num_ranks),
        "GROUP_RANK": str(host),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(MASTER_PORT),
    }
    if plans[host].gloo_interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = plans[host].gloo_interface
    return environment


# ---- the test's side ---------------------------------------------------------------------------------------


class DistantProcess:
    """A process of another parent, with the part of multiprocessing.Process's interface that is needed."""

    exitcode = None  # known to its parent only

    def __init__(self, pid: int):
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def join(self, timeout: float | None = None) -> None:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.poll(None if timeout is None else 1000 * timeout)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        os.close(self._pidfd)


@dataclass
class HostProcess:
    process: Any
    control: Connection
    lifeline: Connection
    pid: int = 0  # of the process that keeps the network
    first_pid: int = 0  # of the host's first process


class HostGroup(RankGroup):
    """The processes of one world on several hosts, as the test process holds them."""

    def __init__(self, plans: list[HostPlan], device: str, parent_directory: str):
        self.plans = plans
        self.hosts: list[HostProcess] = []
        self._switch: HostProcess | None = None
        super().__init__(sum(plan.num_ranks for plan in plans), device, parent_directory)

    def _start_ranks(self, context: Any, device: str) -> None:
        self._switch = self._start(context, switch_main)
        self._switch.pid = self._switch.control.recv()
        self.run_ip(self._switch.pid, "link add name switch type bridge", "link set switch up")
        rank = 0
        kept: list[list[tuple[Connection, Connection]]] = []
        for host, plan in enumerate(self.plans):
            arguments, ours = [], []
            for _ in range(plan.num_ranks):
                pipe, rank_pipe = context.Pipe()
                rank_lifeline, lifeline = context.Pipe(duplex=False)
                arguments.append((rank, device, rank_pipe, rank_lifeline))
                ours.append((pipe, lifeline))
                rank += 1
            kept.append(ours)
            self.hosts.append(
                self._start(context, host_main, host, self.plans, str(self.directory), ranks=arguments)
            )
        for host, process in enumerate(self.hosts):
            process.pid, process.first_pid = process.control.recv()
            self._connect(host)
        for process, ours in zip(self.hosts, kept, strict=True):
            process.control.send("connected")
            for pid, connections in zip(process.control.recv(), ours, strict=True):
                self._ranks.append(RankProcess(DistantProcess(pid), *connections))

    def _start(self, context: Any, main: Callable, *arguments: Any, ranks: list | None = None) -> HostProcess:
        control, host_control = context.Pipe()
        host_lifeline, lifeline = context.Pipe(duplex=False)
        rest = () if ranks is None else (ranks, sum(plan.num_ranks for plan in self.plans))
        process = context.Process(
            target=main, args=(*arguments, host_control, host_lifeline, *rest), daemon=True
        )
        process.start()
        for connection in (host_control, host_lifeline, *(end for one in ranks or [] for end in one[2:])):
            connection.close()
        return HostProcess(process, control, lifeline)

    def _connect(self, host: int) -> None:
        pid = self.hosts[host].pid
        self.run_ip(
            self._switch.pid,
            f"link add name port{host} type veth peer name {INTERFACE} netns {pid}",
            f"link set port{host} master switch up",
        )
        self.run_ip(
            pid,
            "link set lo up",
            f"addr add {address(host)}/24 dev {INTERFACE}",
            f"link set {INTERFACE} up",
        )

    def run_ip(self, pid: int, *commands: str) -> None:
        """`ip` in the network of a process."""
        done = subprocess.run(
            [find_tool("nsenter"), "--target", str(pid), "--net", find_tool("ip"), "-batch", "-"],
            input="\n".join(commands) + "\n",
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{commands}: {done.stderr}"

    def limit_rate(self, host: int, rate: str) -> None:
        """Limits the rate at which the host receives, e.g. "400mbit"; without `tc` the test is skipped."""
        if reason := cannot_limit():
            pytest.skip(f"the rate of a link cannot be limited here: {reason}")
        entered = [find_tool("nsenter"), "--target", str(self._switch.pid), "--net"]
        subprocess.run([*entered, find_tool("tc"), *shaped(f"port{host}", rate)], check=True)

    def cut_link(self, host: int) -> float:
        """Cuts the link silently; returns the time of doing so."""
        self.run_ip(self._switch.pid, f"link set port{host} down")
        return time.monotonic()

    def kill_host(self, host: int) -> float:
        """Ends all of its processes at once; its network tells the others, unless its link is cut."""
        os.kill(self.hosts[host].first_pid, signal.SIGKILL)
        return time.monotonic()

    def close(self, grace_s: float = 0.0) -> None:
        super().close(grace_s)
        for host in [*self.hosts, *([self._switch] if self._switch else [])]:
            host.process.kill()
            host.process.join()
            host.process.close()
            host.control.close()
            host.lifeline.close()
        self.hosts.clear()
        self._switch = None


class HostPool(RankPool):
    """A pool of worlds on such hosts; all have the same size. Without hosts, the test is skipped."""

    def __init__(self, *plans: HostPlan, device: str = "cpu"):
        if reason := missing():
            pytest.skip(f"no hosts can be made here: {reason}")
        super().__init__(device)
        self.plans = list(plans)

    def _new_world(self, size: int) -> HostGroup:
        assert size == sum(plan.num_ranks for plan in self.plans), size
        return HostGroup(self.plans, self.device, self._directory)
