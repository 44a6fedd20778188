"""Which route is fastest: a model of latencies and bandwidths that every rank evaluates alike."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_CHUNKS = 16
MIN_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class TransportCosts:
    """Of one hop, and of the bytes that one rank sends or receives, between stages and within one."""

    hop_s: float
    link_bytes_per_s: float
    stage_bytes_per_s: float


_COSTS = {
    # The sender's core copies into the receiver's memory.
    "shm": TransportCosts(60e-6, 5e9, 5e9),
    # gloo over loopback or a network: every message costs both ends.
    "c10d": TransportCosts(300e-6, 1.2e9, 1.2e9),
    # A NIC per GPU between stages, NVLink within one.
    "nccl": TransportCosts(20e-6, 48e9, 370e9),
}


def choose(
    transport: str, num_bytes: int, num_speakers: int, num_receivers: int, algorithm: str = "auto"
) -> tuple[str, int]:
    """(algorithm, number of chunks) for a tensor that `num_speakers` ranks can send parts of, and all of
    `num_receivers` need: `algorithm`, unless that is "auto"."""
    costs = _COSTS[transport]
    times = {
        "direct": _direct_s(costs, num_bytes, num_speakers, num_receivers),
        "sharded": _sharded_s(costs, num_bytes, num_speakers, num_receivers),
        "leader": _by_leader_s(costs, num_bytes, num_receivers, 1),
    }
    num_chunks = best_num_chunks(costs, num_bytes, num_receivers)
    if num_chunks > 1:
        times["pipelined"] = _by_leader_s(costs, num_bytes, num_receivers, num_chunks)
    best = min(times, key=times.__getitem__) if algorithm == "auto" else algorithm
    return best, num_chunks if best == "pipelined" else 1


def best_num_chunks(costs: TransportCosts, num_bytes: int, num_receivers: int) -> int:
    """Where the latency of one more chunk costs what it saves of the second hop."""
    second_hop_s = num_bytes * (num_receivers - 1) / costs.stage_bytes_per_s
    most = min(MAX_CHUNKS, num_bytes // MIN_CHUNK_BYTES)
    return max(1, min(most, round(math.sqrt(second_hop_s / costs.hop_s))))


def _direct_s(costs: TransportCosts, num_bytes: int, num_speakers: int, num_receivers: int) -> float:
    """Every speaker sends its part to every receiver."""
    busiest = max(num_receivers / num_speakers, 1)
    return costs.hop_s + busiest * num_bytes / costs.link_bytes_per_s


def _sharded_s(costs: TransportCosts, num_bytes: int, num_speakers: int, num_receivers: int) -> float:
    """Every byte crosses once, over as many pairs as there are; then an all-gather."""
    num_rails = min(num_speakers, num_receivers)
    gathered = num_bytes * (num_receivers - 1) / num_receivers
    return (
        2 * costs.hop_s
        + num_bytes / (num_rails * costs.link_bytes_per_s)
        + gathered / costs.stage_bytes_per_s
    )


def _by_leader_s(costs: TransportCosts, num_bytes: int, num_receivers: int, num_chunks: int) -> float:
    """To the leader, which passes on each chunk while it receives the next one."""
    link_s = num_bytes / num_chunks / costs.link_bytes_per_s
    stage_s = num_bytes / num_chunks * (num_receivers - 1) / costs.stage_bytes_per_s
    return (num_chunks + 1) * costs.hop_s + link_s + stage_s + (num_chunks - 1) * max(link_s, stage_s)
