"""`python -m pipecomm_ext doctor --flight DIR`: which rank waited for which, from the flight records of all.

A rank waits while one of its operations is not done. The two ends of a message are found by (source,
destination, channel, number). If the other end was never posted, this rank waits for the rank that should
have posted it. Following that from rank to rank ends at a rank that waits for no other, at one without a
record, or in a circle. The report also tells which connections are not made.
"""

from __future__ import annotations

import itertools
import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..communicator import MAX_CHANNELS  # the channels of collectives come after those
from ..core.flight import FORMAT_VERSION
from .connection_report import EVENT_FIELDS, unmade_connections

STUCK_AFTER_S = 1.0  # younger operations of a healthy communicator are simply in flight
MAX_FILE_BYTES = 64 << 20
_MAX_SENTENCES = 16

_HEAD_FIELDS = {
    "id": str,
    "rank": int,
    "size": int,
    "time": (int, float),
    "threads": dict,
    "host": str,
    "pid": int,
}
_OPERATION_FIELDS = {"number": int, "op": str, "state": str, "posted_at": (int, float), "messages": list}
_MESSAGE_FIELDS = {
    "direction": str,
    "peer": int,
    "channel": int,
    "seq": int,
    "state": str,
    "bytes": int,
    "dtype": str,
    "shape": list,
}


def report(folder: str) -> int:
    """Prints a paragraph for each communicator. Returns 0 if all is well, 1 if not, 2 without any record."""
    try:
        histories, problems = load(Path(folder))
    except OSError as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 2
    for problem in problems:
        print(f"doctor: {problem}", file=sys.stderr)
    if not histories:
        print(
            f"doctor: no flight records (flight-*.jsonl) in {folder}; set PIPECOMM_FLIGHT_DIR, or call "
            "Communicator.dump_flight on all ranks",
            file=sys.stderr,
        )
        return 2
    is_well = not problems
    for history in histories:
        history_is_well, text = explain(history, histories)
        is_well &= history_is_well
        print(textwrap.fill(text, width=110, break_long_words=False, break_on_hyphens=False))
    return 0 if is_well else 1


# ---- reading ----------------------------------------------------------------------------------------------


@dataclass
class RankRecord:
    """The latest record of one rank in one communicator."""

    head: dict[str, Any]
    operations: list[dict[str, Any]]

    def waiting(self) -> list[dict[str, Any]]:
        """Operations with messages that have not met their other end, oldest first."""
        has_failed = self.head["failure"] is not None
        waiting = [
            operation
            for operation in self.operations
            if operation["state"] in ("pending", "failed")
            and any(message["state"] != "done" for message in operation["messages"])
            and (has_failed or self.seconds_waited(operation) >= STUCK_AFTER_S)
        ]
        return sorted(waiting, key=lambda operation: operation["posted_at"])

    def seconds_waited(self, operation: dict[str, Any]) -> float:
        return max(0.0, (operation.get("ended_at") or self.head["time"]) - operation["posted_at"])

    def messages_of(self, direction: str, peer: int, channel: int) -> dict[int, tuple[dict, dict]]:
        """The messages in one direction, with one peer, on one channel: (operation, message) by number."""
        return {
            message["seq"]: (operation, message)
            for operation in self.operations
            for message in operation["messages"]
            if (message["direction"], message["peer"], message["channel"]) == (direction, peer, channel)
        }


@dataclass
class History:
    """The records of one communicator, by rank."""

    id: str
    size: int
    ranks: dict[int, RankRecord] = field(default_factory=dict)


def load(folder: Path) -> tuple[list[History], list[str]]:
    """Returns the communicators that have records in the folder, and what is wrong with files there."""
    histories: dict[str, History] = {}
    problems = []
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
    for path in sorted(folder.glob("flight-*.jsonl")):
        try:
            record = _read(path)
        except (OSError, ValueError) as error:
            problems.append(f"{path.name} cannot be read: {error}")
            continue
        head = record.head
        history = histories.setdefault(head["id"], History(head["id"], head["size"]))
        known = history.ranks.get(head["rank"])
        if known is None or known.head["time"] < head["time"]:
            history.ranks[head["rank"]] = record
    return sorted(histories.values(), key=lambda history: history.id), problems


def _read(path: Path) -> RankRecord:
    num_bytes = path.stat().st_size
    if num_bytes > MAX_FILE_BYTES:
        raise ValueError(f"it has {num_bytes} bytes, more than {MAX_FILE_BYTES}")
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines:
        raise ValueError("it is empty")
    head = _checked(lines[0], _HEAD_FIELDS, "communicator")
    if head.get("version") != FORMAT_VERSION:
        raise ValueError(f"it has format version {head.get('version')}, not {FORMAT_VERSION}")
    if not 0 <= head["rank"] < head["size"]:
        raise ValueError(f"rank {head['rank']} of {head['size']}")
    head.setdefault("failure", None)
    if head["failure"] is not None and not isinstance(head["failure"].get("message"), str):
        raise ValueError("a failure without a message")
    if not isinstance(head.setdefault("connections", []), list):  # earlier releases recorded none
        raise ValueError(f"a communicator whose connections is {head['connections']!r}")
    for event in head["connections"]:
        _check_fields(event, EVENT_FIELDS, "connection")
    operations = []
    for line in lines[1:]:
        operation = _checked(line, _OPERATION_FIELDS, "operation")
        for message in operation["messages"]:
            _check_fields(message, _MESSAGE_FIELDS, "message")
        operations.append(operation)
    return RankRecord(head, operations)


def _checked(line: str, fields: dict[str, Any], kind: str) -> dict[str, Any]:
    value = json.loads(line)
    if not isinstance(value, dict) or value.get("kind") != kind:
        raise ValueError(f"a line that is not of kind {kind}: {line[:80]}")
    _check_fields(value, fields, kind)
    return value


def _check_fields(value: Any, fields: dict[str, Any], kind: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"a {kind} that is not an object")
    for name, types in fields.items():
        if not isinstance(value.get(name), types):
            raise ValueError(f"a {kind} whose {name} is {value.get(name)!r}")


# ---- explaining -------------------------------------------------------------------------------------------


def explain(history: History, all_histories: list[History]) -> tuple[bool, str]:
    """Returns whether all is well in this communicator, and a paragraph about it."""
    head = next(iter(history.ranks.values())).head
    kind = f"{head.get('transport')}, {head.get('device')} tensors"
    title = f"Communicator {history.id} ({history.size} ranks, {kind}):"
    missing = [rank for rank in range(history.size) if rank not in history.ranks]
    waits = {rank: wait for rank in history.ranks if (wait := _first_wait(history, rank)) is not None}
    sentences = list(_failures(history))
    sentences += [_wait_text(history, wait) for wait in list(waits.values())[:_MAX_SENTENCES]]
    sentences += _causes(history, waits, all_histories)
    sentences += itertools.islice(_connections(history), _MAX_SENTENCES)
    if missing and not any(f"Rank {rank} left no record" in text for text in sentences for rank in missing):
        sentences.append(f"{_ranks(missing)} left no record.")
    if not sentences:
        num_operations = sum(len(record.operations) for record in history.ranks.values())
        return True, f"{title} no rank waits, nothing failed; {num_operations} operations on record."
    return False, f"{title} {' '.join(sentences)}"


@dataclass(frozen=True)
class _Wait:
    """Rank `rank` waits in `operation` for the other end of `message`; `why`: what that rank has done."""

    rank: int
    operation: dict[str, Any]
    message: dict[str, Any]
    why: str
    is_absent: bool


def _first_wait(history: History, rank: int) -> _Wait | None:
    """The longest wait of a rank, preferably for a message that its peer has not posted, or None."""
    waits = []
    for operation in history.ranks[rank].waiting()[:1]:
        for message in operation["messages"]:
            if message["state"] != "done":
                why, is_absent = _other_end(history, rank, message)
                waits.append(_Wait(rank, operation, message, why, is_absent))
    return next((wait for wait in waits if wait.is_absent), waits[0] if waits else None)


def _other_end(history: History, rank: int, message: dict[str, Any]) -> tuple[str, bool]:
    """Returns what the peer's record shows of the other end of a message, and whether the peer has not posted
    it.
    """
    peer, direction = message["peer"], "recv" if message["direction"] == "send" else "send"
    if peer not in history.ranks:
        return "which left no record", True
    posted = history.ranks[peer].messages_of(direction, rank, message["channel"])
    if message["seq"] in posted:
        operation, other = posted[message["seq"]]
        if _tensor(other) != _tensor(message):
            return f"which has posted {operation['op']} of {_tensor(other)} there", False
        if other["state"] == "done":
            return f"which has done its {direction}", False
        return f"which has posted its {direction} too", False
    earlier = [seq for seq in posted if seq < message["seq"]]
    if earlier:
        return f"which has not posted the {direction} (its latest there is #{max(earlier)})", True
    if posted:
        return f"whose record does not reach back to the {direction}", False
    return f"which has posted no such {direction}", True


def _wait_text(history: History, wait: _Wait) -> str:
    seconds = history.ranks[wait.rank].seconds_waited(wait.operation)
    site = f" at {wait.operation['call_site']}" if wait.operation.get("call_site") else ""
    name = "" if wait.operation["op"] == "p2p" else f"{wait.operation['op']}: "
    return (
        f"Rank {wait.rank} waited {seconds:.1f} s{site} for rank {wait.message['peer']}, {wait.why}: "
        f"{name}{_message(wait.message)}."
    )


def _causes(history: History, waits: dict[int, _Wait], all_histories: list[History]) -> Iterator[str]:
    """Yields where the chains of waiting end: in circles, or at ranks that wait for no other rank here."""
    told: set[int] = set()
    for start in waits:
        chain = [start]
        while chain[-1] in waits and waits[chain[-1]].is_absent:
            following = waits[chain[-1]].message["peer"]
            if following in chain:
                circle = chain[chain.index(following) :]
                if not told & set(circle):
                    yield (
                        f"{_ranks(sorted(circle))} wait for each other in a circle, a deadlock: put what "
                        "belongs together into one batch, or give all ranks the same order."
                    )
                told |= set(circle)
                break
            chain.append(following)
        last = chain[-1]
        if last in waits or last in told:
            continue
        told.add(last)
        yield _at_the_end(history, last, all_histories)


def _at_the_end(history: History, rank: int, all_histories: list[History]) -> str:
    """Returns what is known of a rank that others wait for but that waits for none in this communicator."""
    if rank not in history.ranks:
        return (
            f"Rank {rank} left no record: it died, or could not write one; what the others wait for is to be "
            "found there."
        )
    record = history.ranks[rank]
    me = (record.head["host"], record.head["pid"])
    for other in all_histories:
        for other_record in other.ranks.values():
            is_me = (other_record.head["host"], other_record.head["pid"]) == me
            if other is not history and is_me and other_record.waiting():
                return f"Rank {rank} waits for no rank here, but for one in communicator {other.id}."
    ended = [op for op in record.operations if op.get("ended_at")]
    last = max(ended, key=lambda op: op["ended_at"], default=None)
    past = (
        f"its last operation, {last['op']} #{last['number']}, ended "
        f"{max(0.0, record.head['time'] - last['ended_at']):.1f} s before"
        if last
        else "it has ended no operation"
    )
    stack: list[str] = next(
        (frames for name, frames in record.head["threads"].items() if name.startswith("MainThread")), []
    )
    where = f"; its main thread was at {stack[0]}" if stack else ""
    return f"Rank {rank} waits for no rank, but others wait for it: {past}{where}."


def _failures(history: History) -> Iterator[str]:
    failures = [record.head["failure"] for record in history.ranks.values() if record.head["failure"]]
    if failures:
        origin = failures[0].get("origin_rank")
        told_by = history.ranks.get(origin)
        # Otherwise the text of the rank that detected the failure: the others quote it.
        failure = (told_by and told_by.head["failure"]) or min(failures, key=lambda f: len(f["message"]))
        where = f", first on rank {origin}" if isinstance(origin, int) and origin >= 0 else ""
        yield f"It failed ({failure.get('kind')}{where}): {failure['message']}."
        return
    for rank, record in sorted(history.ranks.items()):
        failed = [op for op in record.operations if op["state"] == "failed"]
        if failed:
            yield (
                f"On rank {rank} {len(failed)} operations failed, the last of them {failed[-1]['op']} "
                f"#{failed[-1]['number']}: {failed[-1]['failure']['message']}."
            )


def _connections(history: History) -> Iterator[str]:
    for rank, record in sorted(history.ranks.items()):
        has_failed = record.head["failure"] is not None
        yield from unmade_connections(rank, record.head, 0.0 if has_failed else STUCK_AFTER_S)


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    return f"Ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _tensor(message: dict[str, Any]) -> str:
    return f"{message['dtype']}{message['shape']} ({message['bytes']} B)"


def _message(message: dict[str, Any]) -> str:
    channel = message["channel"]
    where = "of the collectives" if channel >= MAX_CHANNELS else f"on channel {channel}"
    started = ", under way" if message["state"] == "started" else ""
    return f"{message['direction']} #{message['seq']} {where} of {_tensor(message)}{started}"
