"""Flight records: what is recorded, what it costs, where it is written, and what the doctor reports."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import stat
import time
from pathlib import Path

import pytest
import torch
from ranks import on_ranks

from pipecomm_ext import (
    Communicator,
    PipeCommError,
    PipeCommMismatch,
    PipeCommTimeout,
    Recv,
    Send,
)
from pipecomm_ext import __main__ as command_line
from pipecomm_ext.diagnostics import flight_report

over_transports = pytest.mark.parametrize("transport", ["tcp", "shm"])
NUM_KEPT = 1024  # operations that have ended
LARGE = 1 << 18  # elements of a message whose payload is sent separately


def last(comm: Communicator) -> dict:
    return comm.flight_record()[-1]


def exchange_other_lengths(comm: Communicator) -> None:
    sent, received = torch.zeros(2 + comm.rank), torch.empty(2 + comm.rank)
    comm.batch_p2p([Send(sent, 1 - comm.rank), Recv(received, 1 - comm.rank)])


# ---- what is on record -----------------------------------------------------------------------------------


@over_transports
@on_ranks(2)
def test_a_message_is_recorded_with_all_that_is_known_of_it(world, transport):
    comm = world.shared_comm(transport=transport)
    peer = 1 - world.rank
    comm.barrier()
    before = time.time()
    work = (comm.isend if world.rank == 0 else comm.irecv)(torch.zeros(3, 5, dtype=torch.bfloat16), peer, 1)
    work.wait()
    operation = last(comm)
    assert (operation["op"], operation["on"], operation["state"]) == ("p2p", "host", "done")
    assert operation["num_messages"] == 1 and operation["failure"] is None
    assert before - 0.01 < operation["posted_at"] <= operation["ended_at"] < time.time() + 0.01
    (message,) = operation["messages"]
    assert message.pop("seq") >= 0
    assert message == {
        "direction": "send" if world.rank == 0 else "recv", "peer": peer, "channel": 1, "state": "done",
        "bytes": 30, "dtype": "bfloat16", "shape": [3, 5], "signature": 0, "refuses": False,
    }  # fmt: skip


@over_transports
@on_ranks(3)
def test_every_kind_of_operation_is_recorded_in_the_order_of_calls(world, transport):
    comm = world.shared_comm(transport=transport)
    comm.barrier()
    number = last(comm)["number"]
    right, left = (world.rank + 1) % 3, (world.rank - 1) % 3
    tensor, received = torch.zeros(2), torch.empty(2)
    to_myself = [Send(tensor, world.rank), Recv(tensor.clone(), world.rank)]
    comm.batch_p2p([Send(tensor, right), Recv(received, left), *to_myself])
    comm.broadcast(tensor, 1)
    comm.all_to_all(
        [torch.zeros(peer + 1) for peer in range(3)], [torch.empty(world.rank + 1) for _ in range(3)]
    )
    comm.barrier()
    operations = [operation for operation in comm.flight_record() if operation["number"] > number]
    assert [operation["op"] for operation in operations] == ["p2p", "broadcast", "all_to_all", "barrier"]
    assert [operation["number"] for operation in operations] == list(range(number + 1, number + 5))
    assert {operation["state"] for operation in operations} == {"done"}
    batch, _, exchange, _ = operations
    ends = [(message["direction"], message["peer"]) for message in batch["messages"]]
    assert ends == [("send", right), ("recv", left)]
    sends = {each["peer"]: each["bytes"] for each in exchange["messages"] if each["direction"] == "send"}
    assert sends == {peer: 4 * (peer + 1) for peer in range(3) if peer != world.rank}
    signatures = {message["signature"] for message in exchange["messages"]}
    assert len(signatures) == 1 and signatures != {0}


@over_transports
@on_ranks(2)
def test_a_pending_operation_stays_on_record_however_many_pass_it(world, transport):
    comm = world.shared_comm(transport=transport)
    peer = 1 - world.rank
    stuck = comm.irecv(torch.empty(4), peer, 1)
    for _ in range(NUM_KEPT + 100):
        if world.rank == 0:
            comm.send(torch.zeros(1), peer)
        else:
            comm.recv(torch.zeros(1), peer)
    record = comm.flight_record()
    assert len(record) == NUM_KEPT + 1
    assert record[0]["state"] == "pending" and record[0]["ended_at"] is None
    assert [(message["direction"], message["state"]) for message in record[0]["messages"]] == [
        ("recv", "posted")
    ]
    numbers = [operation["number"] for operation in record[1:]]
    assert numbers == list(range(numbers[0], numbers[0] + NUM_KEPT))
    comm.barrier()  # the other rank has its record, too
    comm.isend(torch.zeros(4), peer, 1)
    stuck.wait()
    number = record[0]["number"]
    (ended,) = [operation for operation in comm.flight_record() if operation["number"] == number]
    assert ended["state"] == "done"
    comm.barrier()


@over_transports
@on_ranks(2)
def test_a_large_message_starts_when_it_meets_its_other_end(world, transport):
    comm = world.shared_comm(transport=transport)
    comm.barrier()
    if world.rank == 0:
        time.sleep(0.2)
        comm.send(torch.zeros(LARGE), 1)
    else:
        comm.recv(torch.empty(LARGE), 0)
        operation = last(comm)
        assert operation["posted_at"] + 0.15 < operation["started_at"] <= operation["ended_at"]
    comm.barrier()


@over_transports
@on_ranks(2)
def test_a_failed_operation_is_recorded_with_its_failure(world, transport):
    comm = world.shared_comm(transport=transport)
    with pytest.raises(PipeCommMismatch) as raised:
        exchange_other_lengths(comm)
    operation = last(comm)
    assert operation["state"] == "failed" and operation["failure"]["kind"] == "mismatch"
    assert operation["failure"]["message"] in str(raised.value)
    with pytest.raises(ValueError if world.rank == 0 else PipeCommMismatch):
        comm.broadcast(torch.zeros(2), 0 if world.rank == 1 else 7)
    message = last(comm)["messages"][0]
    assert message["refuses"] == (world.rank == 0)
    comm.barrier()


@on_ranks(1)
def test_operations_of_a_single_rank_are_recorded_and_outlive_the_communicator(world):
    comm = world.fresh_comm()
    assert comm.flight_record() == []
    comm.batch_p2p([])
    comm.batch_p2p([Send(torch.zeros(1), 0), Recv(torch.zeros(1), 0)])
    comm.close()
    assert [operation["num_messages"] for operation in comm.flight_record()] == [0, 0]
    with pytest.raises(PipeCommError):
        comm.barrier()
    assert len(comm.flight_record()) == 2


@on_ranks(3)
def test_of_a_large_batch_the_first_messages_are_kept(world):
    comm = world.comm
    peers = [peer for peer in range(3) if peer != world.rank]
    ops = [kind(torch.zeros(1), peer) for peer in peers for kind in (Send, Recv) for _ in range(50)]
    comm.batch_p2p(ops)
    operation = last(comm)
    assert operation["num_messages"] == 200 and len(operation["messages"]) == 64
    comm.barrier()


# ---- files -----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_dump_is_private_json_lines(world, tmp_path):
    comm = world.fresh_comm()
    comm.barrier()
    folder = tmp_path / "made" / "here"
    paths = [Path(comm.dump_flight(folder)) for _ in range(2)]
    assert len(set(paths)) == 2 and all(path.parent == folder for path in paths)
    for path in paths:
        assert re.fullmatch(rf"flight-{comm.id}-rank{world.rank}-\d+-\d+\.jsonl", path.name)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        head, *operations = map(json.loads, path.read_text().splitlines())
        assert head["kind"] == "communicator" and head["reason"] == "asked for" and head["failure"] is None
        assert (head["rank"], head["size"], head["transport"]) == (world.rank, 2, comm.transport)
        assert any("test_flight.py" in frame for frames in head["threads"].values() for frame in frames)
        assert [operation["op"] for operation in operations] == ["barrier"]
    assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0
    comm.barrier()


@on_ranks(1)
def test_folders_in_which_files_can_be_replaced_are_refused(world, tmp_path):
    comm = world.comm
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="other users can write to .*shared"):
        comm.dump_flight(folder)
    folder.chmod(0o1777)
    comm.dump_flight(folder)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OSError):
        comm.dump_flight(file)
    os.environ["PIPECOMM_FLIGHT_DIR"] = str(file)
    try:
        with pytest.raises(ValueError, match="PIPECOMM_FLIGHT_DIR cannot be written to"):
            world.fresh_comm()
    finally:
        del os.environ["PIPECOMM_FLIGHT_DIR"]


@on_ranks(1)
def test_a_planted_file_is_not_written_through(world, tmp_path):
    from pipecomm_ext.core import flight

    comm = world.comm
    number = next(flight._dump_numbers) + 1
    name = f"flight-{comm.id}-rank0-{os.getpid()}-{number}.jsonl"
    (tmp_path / "victim").write_text("precious")
    (tmp_path / name).symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        comm.dump_flight(tmp_path)
    assert (tmp_path / "victim").read_text() == "precious"


@on_ranks(1)
def test_a_full_disk_keeps_no_part_of_a_record(world, tmp_path):
    comm, limits = world.comm, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            comm.dump_flight(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []


# ---- errors and the signal -------------------------------------------------------------------------------


def dumps(folder: Path) -> list[dict]:
    return [json.loads(path.read_text().splitlines()[0]) for path in sorted(folder.glob("flight-*"))]


def await_dumps(folder: Path, count: int) -> list[dict]:
    """The heads of the files, once `count` of them are complete."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        paths = list(folder.glob("flight-*"))
        if len(paths) >= count and all(path.read_text().endswith("\n") for path in paths):
            return dumps(folder)
        time.sleep(0.02)
    raise AssertionError(f"{len(list(folder.glob('flight-*')))} of {count} dumps")


def doctors_words(folder: Path, capsys) -> str:
    assert command_line.main(["doctor", "--flight", str(folder)]) == 1
    return " ".join(capsys.readouterr().out.split())


def be_recorded(world, folder, scene, **kwargs):
    """A rank of a disposable world whose failures are written to `folder`."""
    os.environ["PIPECOMM_FLIGHT_DIR"] = folder
    comm = Communicator(world.group, device="cpu", **kwargs)
    comm.barrier()
    world.meet()
    world.mark("ready")
    return scene(world, comm)


def cross_receives(world, comm):
    """Both ranks receive before they send."""
    try:
        comm.recv(torch.empty(4), 1 - world.rank)
    except PipeCommTimeout:
        comm.close()
        return True


def test_a_deadlock_is_written_by_all_ranks_and_explained(ranks, tmp_path, capsys):
    with ranks.disposable(2, be_recorded, str(tmp_path), cross_receives, timeout=1.5) as world:
        outcomes = world.collect()
    assert [outcome.value for outcome in outcomes] == [True, True], outcomes
    heads = await_dumps(tmp_path, 2)
    assert [head["rank"] for head in heads] == [0, 1]
    assert {head["reason"] for head in heads} == {"failure of the communicator"}
    assert {head["failure"]["kind"] for head in heads} == {"timeout"}
    text = doctors_words(tmp_path, capsys)
    assert "Ranks 0 and 1 wait for each other in a circle, a deadlock" in text
    for rank in (0, 1):
        assert re.search(
            rf"Rank {rank} waited \d\.\d s at .+?test_flight\.py:\d+ in cross_receives for rank {1 - rank}, "
            r"which has posted no such send: recv #0 on channel 0 of float32\[4\] \(16 B\)",
            text,
        ), text
    assert "It failed (timeout, first on rank" in text


def wait_for_a_dead_one(world, comm):
    if world.rank == 2:
        time.sleep(60)
    try:
        if world.rank == 0:
            comm.recv(torch.empty(4), 1)
        else:
            comm.recv(torch.empty(4), 2)
    except PipeCommError:
        comm.close()


def test_the_end_of_a_chain_of_waiting_is_found(ranks, tmp_path, capsys):
    with ranks.disposable(3, be_recorded, str(tmp_path), wait_for_a_dead_one, timeout=20) as world:
        world.await_marks("ready")
        time.sleep(0.3)
        world.signal(2, signal.SIGKILL)
        outcomes = world.collect()
    assert [outcome.status for outcome in outcomes] == ["returned", "returned", "died"], outcomes
    await_dumps(tmp_path, 2)
    text = doctors_words(tmp_path, capsys)
    assert "It failed (peer_lost, first on rank 2): lost the connection to rank 2" in text
    assert re.search(
        r"Rank 0 waited \S+ s at .+?:\d+ in wait_for_a_dead_one for rank 1, which has posted no such send",
        text,
    ), text
    assert "for rank 2, which left no record: recv #0 on channel 0" in text
    assert "Rank 2 left no record: it died" in text


def wait_to_be_asked(world, comm):
    if world.rank == 0:
        comm.recv(torch.empty(4), 1, 1)
    else:
        while not (Path(os.environ["PIPECOMM_FLIGHT_DIR"]) / "go").exists():
            time.sleep(0.05)
        comm.send(torch.zeros(4), 0, 1)
    comm.barrier()
    return True


def test_the_signal_writes_records_and_disturbs_nothing(ranks, tmp_path, capsys):
    with ranks.disposable(2, be_recorded, str(tmp_path), wait_to_be_asked) as world:
        world.await_marks("ready")
        time.sleep(1.2)
        for rank in (0, 1):
            world.signal(rank, signal.SIGUSR1)
        heads = await_dumps(tmp_path, 2)
        (tmp_path / "go").touch()
        outcomes = world.collect()
    assert [outcome.value for outcome in outcomes] == [True, True], outcomes
    assert {head["reason"] for head in heads} == {"signal SIGUSR1"}
    text = doctors_words(tmp_path, capsys)
    assert "for rank 1, which has posted no such send: recv #0 on channel 1 of float32[4] (16 B)." in text
    assert "Rank 1 waits for no rank, but others wait for it: its last operation, barrier #0, ended" in text
    assert re.search(r"its main thread was at .+?test_flight\.py:\d+ in wait_to_be_asked", text), text


def start_beside_a_handler(world, folder):
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    os.environ["PIPECOMM_FLIGHT_DIR"] = folder
    with pytest.warns(RuntimeWarning, match="SIGUSR1 has a handler, which is left alone") as warned:
        comm = Communicator(world.group, device="cpu")
    assert {warning.filename for warning in warned} == {__file__}
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.1)
    comm.close()
    return heard


def test_a_handler_of_the_user_is_left_alone(ranks, tmp_path):
    with ranks.disposable(1, start_beside_a_handler, str(tmp_path)) as world:
        (outcome,) = world.collect()
    assert outcome.value == [1], outcome
    assert dumps(tmp_path) == []


def fail_twice(world, comm):
    for _ in range(3):
        with pytest.raises(PipeCommMismatch):
            exchange_other_lengths(comm)
    await_dumps(Path(os.environ["PIPECOMM_FLIGHT_DIR"]), 2)  # written by a thread of its own
    with world.breaking():
        comm.abort("enough")
    comm.close()
    return comm.id


def test_failures_are_written_once_each_kind(ranks, tmp_path, capsys):
    with ranks.disposable(2, be_recorded, str(tmp_path), fail_twice) as world:
        outcomes = world.collect()
    assert {outcome.status for outcome in outcomes} == {"returned"}, outcomes
    heads = await_dumps(tmp_path, 4)
    reasons = {"failure of the operation", "failure of the communicator"}
    for rank in (0, 1):
        mine = [head["reason"] for head in heads if head["rank"] == rank]
        assert len(mine) == len(set(mine)) and set(mine) <= reasons
    assert "aborted" in doctors_words(tmp_path, capsys)


# ---- the doctor ------------------------------------------------------------------------------------------


def leave_records(world, folder):
    comm = world.fresh_comm()
    comm.barrier()
    comm.dump_flight(folder)
    comm.barrier()


def test_the_doctor_is_content_with_healthy_ranks(ranks, tmp_path, capsys):
    ranks.run(2, leave_records, str(tmp_path))
    assert command_line.main(["doctor", "--flight", str(tmp_path)]) == 0
    assert (
        "(2 ranks, shm, cpu tensors): no rank waits, nothing failed; 2 operations on record"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("folder", ["", "nowhere"])
def test_the_doctor_says_so_if_there_are_no_records(folder, tmp_path, capsys):
    assert command_line.main(["doctor", "--flight", str(tmp_path / folder)]) == 2
    assert capsys.readouterr().err


def message(direction="recv", peer=0, channel=0, seq=0, state="posted", shape=(4,), **kwargs) -> dict:
    num_bytes = 4 * torch.Size(shape).numel()
    fields = dict(direction=direction, peer=peer, channel=channel, seq=seq, state=state, bytes=num_bytes)
    return {**fields, "dtype": "float32", "shape": list(shape), "signature": 0, "refuses": False, **kwargs}


def operation(number, *messages, op="p2p", state="pending", posted_at=10.0, ended_at=None, **kwargs) -> dict:
    fields = dict(kind="operation", number=number, op=op, on="host", state=state, posted_at=posted_at)
    fields |= dict(started_at=None, ended_at=ended_at, call_site=None, num_messages=len(messages))
    return {**fields, "messages": list(messages), "failure": None, **kwargs}


def write(folder: Path, rank: int, /, *operations, size=2, id="0badcafe", name="", **kwargs) -> Path:
    head = dict(
        kind="communicator", version=1, id=id, group="g", rank=rank, size=size, device="cpu", transport="shm"
    )
    head |= dict(
        host="h", pid=100 + rank, time=40.0, reason="asked for", closed=False, failure=None, threads={}
    )
    path = folder / f"flight-{id}-rank{rank}{name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [{**head, **kwargs}, *operations]))
    return path


def diagnosis(folder: Path, capsys) -> str:
    """The doctor's diagnosis; empty if there is no problem."""
    status = flight_report.report(str(folder))
    text = " ".join(capsys.readouterr().out.split())
    assert status == ("no rank waits" not in text), text
    return text if status else ""


def test_a_rank_that_is_behind_on_a_channel_is_told(tmp_path, capsys):
    done = operation(3, message("send", 0, seq=6, state="done"), state="done", posted_at=11.0, ended_at=12.0)
    write(tmp_path, 0, operation(9, message(peer=1, seq=8), call_site="train.py:7 in step"))
    write(tmp_path, 1, done, threads={"MainThread (1)": ["load.py:3 in load", "train.py:9 in main"]})
    text = diagnosis(tmp_path, capsys)
    assert (
        "Rank 0 waited 30.0 s at train.py:7 in step for rank 1, which has not posted the send (its latest "
        "there is #6): recv #8 on channel 0 of float32[4] (16 B). Rank 1 waits for no rank, but "
        "others wait for it: its last operation, p2p #3, ended 28.0 s before; its main thread was at "
        "load.py:3 in load." in text
    )


def test_ends_that_differ_and_ends_that_are_under_way_are_told_apart(tmp_path, capsys):
    write(tmp_path, 0, operation(0, message(peer=1), message("send", 1, state="started", shape=(9,))))
    sent = message("send", 0, shape=(5,))
    write(tmp_path, 1, operation(0, sent, message(peer=0, shape=(9,), state="started")))
    text = diagnosis(tmp_path, capsys)
    assert "Rank 0 waited 30.0 s for rank 1, which has posted p2p of float32[5] (20 B) there: recv #0" in text
    assert "circle" not in text


def test_a_circle_of_three_is_found_in_collectives_too(tmp_path, capsys):
    for rank in range(3):
        message_of_collective = message(peer=(rank + 1) % 3, channel=15, seq=4)
        write(tmp_path, rank, operation(5, message_of_collective, op="all_to_all"), size=3)
    text = diagnosis(tmp_path, capsys)
    assert "Ranks 0, 1 and 2 wait for each other in a circle" in text
    assert "all_to_all: recv #4 of the collectives of float32[4] (16 B)" in text


def test_a_rank_that_waits_in_another_communicator_is_referred_to_it(tmp_path, capsys):
    write(tmp_path, 0, operation(0, message(peer=1)))
    write(tmp_path, 1)
    write(tmp_path, 1, operation(0, message(peer=0)), id="feedface")
    text = diagnosis(tmp_path, capsys)
    assert "Rank 1 waits for no rank here, but for one in communicator feedface." in text
    assert "Communicator feedface" in text and "Rank 0 left no record" in text


def test_what_is_young_or_has_a_later_record_is_no_complaint(tmp_path, capsys):
    write(tmp_path, 0, operation(0, message(peer=1), posted_at=39.5))
    write(tmp_path, 1)
    assert not diagnosis(tmp_path, capsys)
    write(tmp_path, 0, operation(0, message(peer=1)), name="-1")
    write(tmp_path, 0, time=50.0, name="-0")
    assert not diagnosis(tmp_path, capsys)


def report_of_one_more(file: Path, content: bytes, capsys) -> str:
    write(file.parent, 0)
    write(file.parent, 1)
    file.write_bytes(content)
    assert flight_report.report(str(file.parent)) == 1
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "it is empty"),
        (b"not json\n", "Expecting value"),
        (b"[]\n", "a line that is not of kind communicator"),
        (b'{"kind": "communicator", "id": 5}\n', "a communicator whose id is 5"),
        (b"\xff", "'utf-8' codec can't decode"),
    ],
)
def test_malformed_files_are_named_and_not_trusted(content, complaint, tmp_path, capsys):
    text = report_of_one_more(tmp_path / "flight-x.jsonl", content, capsys)
    assert f"flight-x.jsonl cannot be read: {complaint}" in text


IMPOSSIBLE = [{"rank": 2}, {"rank": -1}, {"version": 2}, {"time": "now"}, {"threads": []}]


@pytest.mark.parametrize("broken", [*IMPOSSIBLE, {"failure": {"message": 1}}], ids=str)
def test_records_with_impossible_fields_are_refused(broken, tmp_path, capsys):
    content = write(tmp_path, 1, **broken).read_bytes()
    assert "cannot be read" in report_of_one_more(tmp_path / "flight-x.jsonl", content, capsys)


def test_nothing_on_the_wire_or_in_files_is_unpickled():
    words = ["import (?:pickle|marshal|shelve|dill)", r"torch\.(?:load|save)\(", r"\b(?:\w+_)?object_list\b"]
    for path in Path(flight_report.__file__).parent.rglob("*.py"):
        assert re.findall("|".join(words), path.read_text(encoding="utf-8")) == [], path
