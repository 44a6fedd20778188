"""The states of connections in the flight record, and what the doctor tells of them."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from ranks import on_ranks

from pipecomm_ext import Communicator, PipeCommAborted, PipeCommPeerLost
from pipecomm_ext import __main__ as command_line
from pipecomm_ext.diagnostics import flight_report
from pipecomm_ext.diagnostics.connection_report import unmade_connections

STUCK_S = 1.2  # longer than the doctor waits
NOWHERE = "255.255.255.255"  # which no system lets a program connect to


def states(events: list[dict], connection: str, peer: int | None) -> list[str]:
    return [event["state"] for event in events if (event["connection"], event["peer"]) == (connection, peer)]


def doctors_words(folder: str | Path, capsys) -> str:
    assert command_line.main(["doctor", "--flight", str(folder)]) == 1
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@on_ranks(3)
def test_the_events_of_connections_that_are_made(world, transport):
    before = time.time()
    comm = world.fresh_comm(transport=transport)
    comm.barrier()
    events = comm.connection_events()
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    for event in events:
        assert set(event) == {"time", "connection", "peer", "state", "detail", "peer_now"}
        assert before - 0.01 < event["time"] < time.time() + 0.01
    for peer in set(range(3)) - {world.rank}:
        if transport == "tcp":
            assert states(events, "tcp", peer)[-2:] == ["attached", "connected"]
        else:
            route = states(events, "route", peer)
            assert "settling" in route and (route[0] in ("wanted", "mapped", "met"))
        now = [event["peer_now"] for event in events if event["peer"] == peer]
        assert now == [None] * (len(now) - 1) + ["is connected"], [
            event for event in events if event["peer"] == peer
        ]
    world.meet()
    comm.close()
    assert states(comm.connection_events(), "communicator", None) == ["closing", "closed"]


def seek_each_other_in_vain(world, folder: str) -> None:
    from pipecomm_ext.transports import tcp

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tcp, "hosts_of", lambda record, own: [NOWHERE])
        comm = world.fresh_comm(transport="tcp")
        time.sleep(STUCK_S)
        comm.dump_flight(folder)
        world.meet()
        with pytest.raises(PipeCommAborted):
            comm.abort("enough")
            comm.barrier()
        comm.close()


def come_late(world, folder: str) -> None:
    if world.rank == 1:
        world.meet()
    comm = world.fresh_comm()
    if world.rank == 0:
        time.sleep(STUCK_S)
        comm.dump_flight(folder)
        world.meet()
    comm.barrier()


def disagree_about_the_secret(world, folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPECOMM_SECRET", f"of rank {world.rank}")
        comm = world.fresh_comm(transport="tcp")
        with world.breaking(), pytest.raises(PipeCommPeerLost):
            comm.barrier()
        comm.dump_flight(folder)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            seek_each_other_in_vain,
            rf"Rank 0 has not connected to rank 1 for \d\.\d s \(tcp connecting, {NOWHERE} port \d+\): "
            rf"{NOWHERE}:\d+: connect: Network is unreachable\.",
        ),
        (
            come_late,
            r"Rank 0 has not connected to rank 1 for \d\.\d s \(route wanted\): rank 1 has not made its "
            r"communicator\.",
        ),
        (
            disagree_about_the_secret,
            r"Rank \d lost rank \d \d\.\d s before \(tcp, \S+:\d+: does not prove that it belongs",
        ),
    ],
)
def test_connections_that_are_not_made_are_told(ranks, tmp_path, capsys, body, sentence):
    ranks.run(2, body, str(tmp_path))
    text = doctors_words(tmp_path, capsys)
    assert re.search(sentence, text), text


def lose_a_peer(world, folder: str) -> list[str]:
    comm = Communicator(world.group, device="cpu", transport="tcp")
    comm.barrier()
    world.meet()
    world.mark("ready")
    with pytest.raises(PipeCommPeerLost):
        comm.recv(torch.empty(4), 1 - world.rank)
    comm.dump_flight(folder)
    comm.close()
    return [
        *states(comm.connection_events(), "tcp", 1),
        *states(comm.connection_events(), "communicator", None),
    ]


def test_a_lost_connection_is_told(ranks, tmp_path, capsys):
    with ranks.disposable(2, lose_a_peer, str(tmp_path)) as world:
        world.await_marks("ready")
        time.sleep(0.2)
        world.signal(1, signal.SIGKILL)
        outcomes = world.collect()
    assert outcomes[0].value[-5:] == ["connected", "lost", "failed", "closing", "closed"], outcomes
    text = doctors_words(tmp_path, capsys)
    assert re.search(r"Rank 0 lost rank 1 \d\.\d s before \(tcp, .+?\)\.", text), text


# ---- the doctor, from records that are written here --------------------------------------------------------


def event(at: float, state: str, connection: str = "tcp", peer: int | None = 1, detail: str = "", now=None):
    names = ("time", "connection", "peer", "state", "detail", "peer_now")
    return dict(zip(names, (at, connection, peer, state, detail, now), strict=True))


def told(*events: dict, at_least_s: float = 1.0) -> list[str]:
    return list(unmade_connections(0, {"time": 40.0, "connections": list(events)}, at_least_s))


def test_the_time_counts_from_the_first_attempt():
    cut = "the connection was closed"
    events = [event(10.0, "connected"), event(15.0, "attached"), event(39.0, "connecting", detail=cut)]
    assert told(*events) == [f"Rank 0 has not connected to rank 1 for 25.0 s (tcp connecting, {cut})."]
    assert told(event(39.5, "connecting")) == []
    assert len(told(event(39.5, "connecting"), at_least_s=0.0)) == 1


def test_each_pair_is_told_once():
    route, over_tcp = event(5.0, "mapped", "route"), event(10.0, "connecting", now="is not connected (no)")
    assert told(route, over_tcp) == ["Rank 0 has not connected to rank 1 for 30.0 s (tcp connecting): no."]
    assert told(route) == ["Rank 0 has not connected to rank 1 for 35.0 s (route mapped)."]
    assert (
        told(event(5.0, "shm", "route"), event(9.0, "closed"), event(9.0, "failed", "communicator", None))
        == []
    )


def test_connections_of_several_ranks_are_told():
    assert told(event(10.0, "connecting", "nccl of all ranks on channel 15", None)) == [
        "Rank 0 has not connected to the others for 30.0 s (nccl of all ranks on channel 15 connecting)."
    ]


def write(folder: Path, **fields) -> None:
    head = dict(kind="communicator", version=1, id="0badcafe", rank=0, size=1, host="h", pid=1, time=40.0)
    line = json.dumps({**head, "threads": {}, "failure": None, **fields})
    (folder / "flight-0badcafe-rank0.jsonl").write_text(line + "\n")


@pytest.mark.parametrize("connections", [5, [5], [event(1.0, "lost") | {"peer": "1"}]], ids=str)
def test_malformed_events_are_not_trusted(connections, tmp_path, capsys):
    write(tmp_path, connections=connections)
    assert flight_report.report(str(tmp_path)) == 2
    assert "flight-0badcafe-rank0.jsonl cannot be read: a co" in capsys.readouterr().err


def test_records_of_earlier_releases_are_read(tmp_path, capsys):
    write(tmp_path)
    assert flight_report.report(str(tmp_path)) == 0
    assert "no rank waits" in capsys.readouterr().out
