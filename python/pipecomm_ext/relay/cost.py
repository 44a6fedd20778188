"""Which route is fastest: a model of latencies and bandwidths with the same result on every rank."""

from __future__ import annotations

import math

from ..transports import TRANSPORTS

MAX_CHUNKS = 16
MIN_CHUNK_BYTES = 1 << 18


def choose(
    crossing: str,
    within: str,
    num_bytes: int,
    num_speakers: int,
    num_receivers: int,
    algorithm: str = "auto",
    num_cores: int | None = None,
) -> tuple[str, int]:
    """("direct" or "sharded", number of chunks) for a tensor of which `num_speakers` ranks can send parts.

    `crossing` is the transport between the two stages, `within` the one between the receivers, the slowest if
    there are several. All of `num_receivers` need the whole tensor. The route is `algorithm` unless that is
    "auto". `num_cores` are those of the host whose memory the ranks share; None: they do not share memory.
    """
    costs, within_costs = TRANSPORTS[crossing].costs, TRANSPORTS[within].costs
    # On a device both hops of a link are on one stream: no chunk could be gathered while the next arrives.
    most_chunks = 1 if TRANSPORTS[crossing].waits_on_device else MAX_CHUNKS
    # On either route each receiver's copy is written once.
    written_s = num_bytes * num_receivers / (costs.core_bytes_per_s * (num_cores or math.inf))
    crossing_s = num_bytes / costs.link_bytes_per_s
    # Every speaker sends its part to every receiver.
    direct_s = costs.hop_s + max(written_s, crossing_s * max(num_receivers / num_speakers, 1))

    # Two hops. Every byte crosses once, over as many pairs as there are; then the receivers gather the parts.
    first_s = crossing_s / min(num_speakers, num_receivers)
    second_s = num_bytes * (num_receivers - 1) / num_receivers / within_costs.stage_bytes_per_s
    # One more chunk costs a hop, and lets more of the shorter hop overlap with the longer one.
    best = round(math.sqrt(min(first_s, second_s) / costs.hop_s))
    num_chunks = max(1, min(most_chunks, num_bytes // MIN_CHUNK_BYTES, best))
    overlapped_s = (num_chunks - 1) * max(first_s, second_s) / num_chunks
    moving_s = max(written_s, (first_s + second_s) / num_chunks + overlapped_s)
    sharded_s = (num_chunks + 1) * costs.hop_s + moving_s

    if algorithm == "direct" or (algorithm == "auto" and direct_s <= sharded_s):
        return "direct", 1
    return "sharded", num_chunks
