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
    core_bytes_per_s: float = math.inf  # that a core of the host copies, if cores do that


_COSTS = {
    # The sender's threads, two at most, copy into the receiver's memory.
    "shm": TransportCosts(100e-6, 10e9, 10e9, core_bytes_per_s=5e9),
    # gloo over loopback or a network: every message costs both ends.
    "c10d": TransportCosts(300e-6, 1.2e9, 1.2e9),
    # A NIC per GPU between stages, NVLink within one.
    "nccl": TransportCosts(20e-6, 48e9, 370e9),
}


def choose(
    transport: str,
    num_bytes: int,
    num_speakers: int,
    num_receivers: int,
    algorithm: str = "auto",
    num_cores: int | None = None,
) -> tuple[str, int]:
    """(algorithm, number of chunks) for a tensor that `num_speakers` ranks can send parts of, and all of
    `num_receivers` need: `algorithm`, unless that is "auto". `num_cores`: of the host whose memory the ranks
    share, or None.
    """
    costs = _COSTS[transport]
    # Whatever the route, every receiver's copy is written once.
    all_cores_s = num_bytes * num_receivers / (costs.core_bytes_per_s * (num_cores or math.inf))
    to_leader_s = num_bytes / costs.link_bytes_per_s
    from_leader_s = num_bytes * (num_receivers - 1) / costs.stage_bytes_per_s
    to_pieces_s = to_leader_s / min(num_speakers, num_receivers)
    gather_s = num_bytes * (num_receivers - 1) / num_receivers / costs.stage_bytes_per_s
    most = num_bytes // MIN_CHUNK_BYTES
    candidates = {
        # Every speaker sends its part to every receiver.
        "direct": (
            costs.hop_s + max(all_cores_s, to_leader_s * max(num_receivers / num_speakers, 1)),
            1,
        ),
        "leader": (_chunked_s(costs, to_leader_s, from_leader_s, all_cores_s, 1), 1),
        "pipelined": _best_chunks(costs, to_leader_s, from_leader_s, all_cores_s, most),
        # Every byte crosses once, over as many pairs as there are.
        "sharded": _best_chunks(costs, to_pieces_s, gather_s, all_cores_s, most),
    }
    if algorithm == "auto":
        algorithm = min(candidates, key=lambda name: candidates[name][0])
    return algorithm, candidates[algorithm][1]


def _best_chunks(
    costs: TransportCosts, first_s: float, second_s: float, least_s: float, most: int
) -> tuple[float, int]:
    """(time, number of chunks) where one more hop costs what it saves of the shorter one."""
    best = round(math.sqrt(min(first_s, second_s) / costs.hop_s))
    num_chunks = max(1, min(MAX_CHUNKS, most, best))
    return _chunked_s(costs, first_s, second_s, least_s, num_chunks), num_chunks


def _chunked_s(
    costs: TransportCosts, first_s: float, second_s: float, least_s: float, num_chunks: int
) -> float:
    """Two hops, of which one chunk's second overlaps the next one's first."""
    overlapped_s = (num_chunks - 1) * max(first_s, second_s) / num_chunks
    moving_s = max(least_s, (first_s + second_s) / num_chunks + overlapped_s)
    return (num_chunks + 1) * costs.hop_s + moving_s
