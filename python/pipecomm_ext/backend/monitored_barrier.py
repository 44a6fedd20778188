"""A barrier through the store of the group, which reports the ranks that have not arrived."""

from __future__ import annotations

import time
from datetime import timedelta

from ..core.process_groups import StoreGroup
from ..core.rendezvous import stores_of
from ..errors import PipeCommTimeout

_STORE_LIMIT_S = 10.0
_LONGEST_REST_S = 0.05
_PASSED = b"passed"


def monitored_barrier(group: StoreGroup, number: int, timeout: timedelta, wait_all_ranks: bool) -> None:
    """Rank 0 waits for all others in rank order. Its error names the first one that has not arrived within
    the timeout, or, with `wait_all_ranks`, all of them. The others then raise, too.
    """
    prefix, seconds = f"pipecomm/monitored_barrier/{number}", timeout.total_seconds()
    front, _ = stores_of(group)
    deadline = time.monotonic() + seconds
    if group.rank != 0:
        front.set(f"{prefix}/{group.rank}", b"", _STORE_LIMIT_S)
        verdict = _await(group, f"{prefix}/verdict", deadline + max(1.0, seconds))
        if verdict != _PASSED:
            said = "" if verdict is None else f": {verdict.decode(errors='replace')}"
            raise _timeout(
                group,
                f"Rank {group.rank} successfully reached monitoredBarrier, but received errors while waiting "
                f"for send/recv from rank 0: it has not let it pass in {seconds} s{said}",
            )
        return
    missing = []
    for rank in range(1, group.size):
        if not wait_all_ranks and time.monotonic() >= deadline:
            missing.append(0)
            break
        if _await(group, f"{prefix}/{rank}", deadline) is None:
            missing.append(rank)
            if not wait_all_ranks:
                break
    text = ""
    if missing == [0]:
        text = f"Rank 0 timed out in monitoredBarrier after {round(1000 * seconds)} ms"
    elif missing:
        who = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        text = f"{who} failed to pass monitoredBarrier in {round(1000 * seconds)} ms"
    front.set(f"{prefix}/verdict", text.encode() or _PASSED, _STORE_LIMIT_S)
    if text:
        raise _timeout(group, text, missing[0])


def _await(group: StoreGroup, key: str, deadline: float) -> bytes | None:
    front, _ = stores_of(group)
    rest_s = 0.0005
    while (data := front.find(key, _STORE_LIMIT_S)) is None and time.monotonic() < deadline:
        time.sleep(rest_s)
        rest_s = min(2 * rest_s, _LONGEST_REST_S)
    return data


def _timeout(group: StoreGroup, text: str, peer: int | None = None) -> PipeCommTimeout:
    return PipeCommTimeout(text, op="monitored_barrier", rank=group.rank, peer=peer, origin_rank=group.rank)
