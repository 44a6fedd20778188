"""A network of this process's own, whose only link carries a limited number of bits in a second."""

from __future__ import annotations

import ctypes
import os
import subprocess

CLONE_NEWNET = 0x40000000  # of <sched.h>
# What waits in the queue, and what passes at once after a pause.
BURST, LATENCY = "1mb", "100ms"


def limit(rate: str) -> str | None:
    """Moves this process, and those that it starts, into a network of its own; or says why it cannot.

    All ranks share the link, its loopback device, as hosts share a switch; shared memory is not concerned.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        return f"unshare(CLONE_NEWNET): {os.strerror(ctypes.get_errno())} (it takes root)"
    shape = f"tc qdisc add dev lo root tbf rate {rate} burst {BURST} latency {LATENCY}"
    for command in ("ip link set lo up", shape):
        try:
            done = subprocess.run(command.split(), capture_output=True, text=True)
        except FileNotFoundError as error:
            return f"{error.filename} is not installed (package iproute2)"
        if done.returncode:
            return f"{command}: {done.stderr.strip()}"
    return None
