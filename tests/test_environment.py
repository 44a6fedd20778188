"""PIPECOMM_* variables: strict, in one place, compared between ranks, and documented correctly."""

from __future__ import annotations

import functools
import os
import re
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from ranks import on_ranks

import pipecomm_ext
from pipecomm_ext import _C, PipeCommMismatch, PipeCommPeerLost, Recv, Send
from pipecomm_ext.core import environment
from pipecomm_ext.diagnostics.info import format_info

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "pipecomm_ext"
WIRE_VALUES = {
    "PIPECOMM_SHM_RING_BYTES": ("65536", "131072"),
    "PIPECOMM_NCCL_MIN_CTAS": ("1", "2"),
    "PIPECOMM_NCCL_MAX_CTAS": ("16", "32"),
    "PIPECOMM_NCCL_CHANNELS_PER_NET_PEER": ("1", "2"),
    "PIPECOMM_NCCL_TRAFFIC_CLASS": ("0", "255"),
    "PIPECOMM_NCCL_MAX_OPS_PER_GROUP": ("2", "1024"),
}


def names(variables) -> list[str]:
    return [variable.name for variable in variables]


# ---- grammar ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", environment.VARIABLES, ids=lambda variable: variable.name)
def test_wrong_values_are_refused_with_name_grammar_and_value(variable):
    wrong = [""]
    if isinstance(variable.grammar, environment.Number):
        low, high = variable.grammar.low, variable.grammar.high
        assert environment.read({variable.name: str(low)})[variable.name] == low
        assert environment.read({variable.name: str(high)})[variable.name] == high
        wrong += [str(low - 1), str(high + 1), f"{high}junk", f" {high}", "9" * 400]
        wrong += ["abc", "-1", "1.5", "1e3", "0x10", "\u0663"]
    elif isinstance(variable.grammar, environment.Choice):
        for word in variable.grammar.words:
            assert environment.read({variable.name: word})[variable.name] == word
        wrong += ["AUTO", "auto ", "automatic"]
    for text in wrong:
        expected = re.escape(f"{variable.name} must be {variable.grammar.text}, not {text!r}")
        with pytest.raises(ValueError, match=f"^{expected}$"):
            environment.read({variable.name: text})


def test_what_is_not_set_has_its_default():
    assert environment.read({}) == {variable.name: variable.default for variable in environment.VARIABLES}
    for variable in environment.VARIABLES:
        if variable.default is not None:
            assert variable.grammar.parse(str(variable.default)) == variable.default


def test_unknown_names_come_with_the_nearest_one():
    set_names = ["PIPECOMM_SHM_RING_BYTE", "PIPECOMM_TRANSPROT", "PIPECOMM_COFFEE", "PIPECOMM_CUDA"]
    environ = dict.fromkeys([*set_names, "PIPECOMM_TEST_KILLS", "HOME"], "1")
    assert environment.unknown(environ) == {
        "PIPECOMM_COFFEE": None,
        "PIPECOMM_SHM_RING_BYTE": "PIPECOMM_SHM_RING_BYTES",
        "PIPECOMM_TRANSPROT": "PIPECOMM_TRANSPORT",
    }
    known = [*names(environment.VARIABLES), *environment.BUILD_VARIABLES]
    assert environment.unknown(dict.fromkeys(known, "")) == {}


# ---- between ranks ---------------------------------------------------------------------------------------


def test_every_wire_variable_without_an_argument_is_tried_below():
    assert set(WIRE_VALUES) == set(environment.on_wire(environment.read({})))


environ = functools.partial(mock.patch.dict, os.environ)


@on_ranks(2)
def test_ranks_that_differ_get_one_clear_error_on_all(world):
    for name, (first, second) in (WIRE_VALUES | {"PIPECOMM_CHECK": ("full", "off")}).items():
        told = f"{name}: ({first} on rank 0, {second} on rank 1|{second} on rank 1, {first} on rank 0)"
        if name == "PIPECOMM_CHECK":
            told = "check: '(full|off)' on rank [01], '"
        with environ(**{name: (first, second)[world.rank]}):
            with pytest.raises(PipeCommMismatch, match=f"disagree about {told}"):
                world.fresh_comm().barrier()
    with environ(PIPECOMM_PACK_SMS=str(1 + world.rank)):  # affects no other rank
        world.fresh_comm().barrier()


@on_ranks(2)
def test_the_former_name_of_a_transport(world):
    """As an argument and in the environment, also where the other rank uses today's name."""
    assert world.fresh_comm(transport=("c10d", "tcp")[world.rank]).transport == "tcp"
    with environ(PIPECOMM_TRANSPORT=("tcp", "c10d")[world.rank]):
        assert world.fresh_comm().transport == "tcp"


@on_ranks(2)
def test_ranks_with_different_secrets_name_the_variable(world):
    with environ(PIPECOMM_SECRET="ours"):
        world.fresh_comm(transport="tcp").barrier()
    with environ(PIPECOMM_SECRET=f"of rank {world.rank}"):
        comm = world.fresh_comm(transport="tcp")
        with world.breaking(), pytest.raises(PipeCommPeerLost, match="PIPECOMM_SECRET equal on all ranks"):
            comm.barrier()


def listening_at(port: int) -> set[str]:
    """The addresses of this network, as the kernel writes them, on which a process listens on the port."""
    found = set()
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{family}").read_text(encoding="utf-8").splitlines()[1:]:
            address, digits = line.split()[1].split(":")
            if int(digits, 16) == port and line.split()[3] == "0A":
                found.add(address)
    return found


@pytest.mark.parametrize(("interfaces", "is_everywhere"), [("lo", False), ("", True)])
def test_ranks_listen_where_they_are_told(interfaces, is_everywhere):
    connections = _C.Connections(0, 2, 1, bytes(32), lambda rank: None, lambda farewell: None)
    connections.listen(interfaces)
    at = listening_at(connections.port)
    assert bool(at & {"0" * 8, "0" * 32}) == is_everywhere
    assert is_everywhere or "0100007F" in at


@on_ranks(2)
def test_a_wrong_value_on_one_rank_is_refused_on_all(world):
    told = "PIPECOMM_NCCL_MIN_CTAS must be a number from 1 to 64, not '0'"
    with environ(**({"PIPECOMM_NCCL_MIN_CTAS": "0"} if world.rank == 0 else {})):
        if world.rank == 0:
            with pytest.raises(ValueError, match=told):
                world.fresh_comm()
        else:
            with pytest.raises(PipeCommMismatch, match=f"refused by rank 0: ValueError: {told}"):
                world.fresh_comm().barrier()
    world.fresh_comm().barrier()


@on_ranks(2)
def test_the_first_communicator_warns_of_unknown_names_once(world):
    told = "PIPECOMM_SHM_RINGBYTES means nothing.*PIPECOMM_SHM_RING_BYTES"
    with environ(PIPECOMM_SHM_RINGBYTES="1"):
        with pytest.warns(RuntimeWarning, match=told) as caught:
            world.fresh_comm()
        assert [Path(warning.filename).name for warning in caught] == ["ranks.py"]  # the caller's file
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            world.fresh_comm()
    environment._warned_of.clear()


@on_ranks(2)
def test_the_check_can_be_switched_off_from_outside(world):
    """int32 into float32 of equal size: an error, unless only sizes are compared."""
    peer = 1 - world.rank
    sent, received = torch.arange(4, dtype=torch.int32), torch.empty(4, dtype=torch.float32)

    def exchange(**options):
        world.fresh_comm(**options).batch_p2p([Send(sent, peer), Recv(received, peer)])

    with pytest.raises(PipeCommMismatch):
        exchange()
    with environ(PIPECOMM_CHECK="off"):
        exchange()
        assert torch.equal(received.view(torch.int32), sent)
        with pytest.raises(PipeCommMismatch):  # the argument takes precedence
            exchange(check="full")


# ---- one place -------------------------------------------------------------------------------------------


def test_nothing_else_reads_our_variables():
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "csrc").rglob("*.[ch]*")]:
        if path.name == "environment.py":
            continue
        reads = re.findall(
            r"(?:environ|getenv)[\[.(a-z]*[\[(]\s*f?[\"']PIPECOMM_", path.read_text(encoding="utf-8")
        )
        assert not reads, f"{path.name}: {reads}"


def test_info_shows_the_values_in_effect_and_what_is_wrong(monkeypatch):
    monkeypatch.setenv("PIPECOMM_SHM_RING_BYTES", "65536")
    monkeypatch.setenv("PIPECOMM_PACK_SMS", "many")
    monkeypatch.setenv("PIPECOMM_TRANSPRT", "shm")
    facts = pipecomm_ext.info()
    assert set(facts["settings"]) == set(names(environment.VARIABLES))
    assert facts["settings"]["PIPECOMM_SHM_RING_BYTES"] == 65536
    assert facts["settings"]["PIPECOMM_TRANSPORT"] == "auto"
    text = format_info(facts)
    assert "set         PIPECOMM_SHM_RING_BYTES=65536" in text
    assert "default     PIPECOMM_NCCL_MAX_OPS_PER_GROUP=64" in text
    assert "warning: PIPECOMM_PACK_SMS must be a number from 1 to 1024, not 'many'" in text
    assert "warning: PIPECOMM_TRANSPRT means nothing; did you mean PIPECOMM_TRANSPORT?" in text


def test_the_documented_table_is_the_modules():
    page = ROOT / "docs" / "environment.md"
    assert environment.table() in page.read_text(encoding="utf-8"), f"paste environment.table() into {page}"
