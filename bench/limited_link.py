"""A network namespace of this process, whose only link carries a limited number of bits per second."""

from __future__ import annotations

import ctypes
import os
import subprocess

from tools import find_tool, missing

CLONE_NEWNET = 0x40000000  # of <sched.h>
# The queue's limit, and what passes at once after a pause.
BURST, LATENCY = "1mb", "100ms"


def limit(rate: str) -> str | None:
    """Moves this process, and those that it starts, into a new network namespace; or returns why it cannot.

    All ranks share the link, its loopback device, as hosts share a switch; shared memory is not affected.
    """
    if reason := missing("ip", "tc"):
        return reason
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        return f"unshare(CLONE_NEWNET): {os.strerror(ctypes.get_errno())} (it takes root)"
    shape = f"tc qdisc add dev lo root tbf rate {rate} burst {BURST} latency {LATENCY}"
    for command in ("ip link set lo up", shape):
        name, *arguments = command.split()
        done = subprocess.run([find_tool(name), *arguments], capture_output=True, text=True)
        if done.returncode:
            return f"{command}: {done.stderr.strip()}"
    return None
