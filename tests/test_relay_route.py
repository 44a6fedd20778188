"""Routes of the stage relay as data, without processes: hops, which rank sends what, how often."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from pipecomm_ext.relay.route import Holding, Relayed, route_of

SIZES = [(1, 2), (2, 1), (2, 3), (3, 2), (4, 3), (1, 1)]
SHAPE = (7, 5, 2)
NUM_BYTES = 4 * math.prod(SHAPE)


def relayed_of(sizes, source_dim, destination_dim, algorithm, num_chunks=1, by_leader=False) -> Relayed:
    num_senders, num_receivers = sizes
    is_flat = source_dim is None and destination_dim is None
    return Relayed(
        whole=((math.prod(SHAPE),) if is_flat else SHAPE, torch.float32),
        source=Holding(tuple(range(num_senders)), source_dim, by_leader),
        destination=Holding(tuple(range(num_senders, num_senders + num_receivers)), destination_dim),
        algorithm=algorithm,
        num_chunks=num_chunks,
        is_flat=is_flat,
        shown=(SHAPE, torch.float32),
        tag="",
    )


def sent_bytes(hops, receivers) -> int:
    """The bytes sent to these ranks, in all hops."""
    return sum(
        4 * math.prod(extent)
        for hop in hops
        for peer, boxes in hop.plan.sends
        for _, _, extent in boxes
        if peer in receivers
    )


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("algorithm", ["sharded", "direct"])
def test_bytes_and_hops(sizes, algorithm):
    size, num_receivers = sum(sizes), sizes[1]
    for source_dim, destination_dim in itertools.product((None, 0, 1), repeat=2):
        num_chunks = 3 if algorithm == "sharded" else 1
        relayed = relayed_of(sizes, source_dim, destination_dim, algorithm, num_chunks)
        routes = [route_of(rank, size, relayed) for rank in range(size)]
        senders, receivers = routes[: sizes[0]], routes[sizes[0] :]
        ranks = set(relayed.destination.ranks)
        crossing = sum(sent_bytes(route, ranks) for route in senders)
        within = sum(sent_bytes(route, ranks) for route in receivers)
        if destination_dim is not None or num_receivers == 1:
            hops, expected = (1, 1), (NUM_BYTES, 0)
        elif algorithm == "direct":
            hops, expected = (1, 1), (num_receivers * NUM_BYTES, 0)
        else:
            hops = (num_chunks, 2 * num_chunks)
            expected = (NUM_BYTES, (num_receivers - 1) * NUM_BYTES)
        assert (crossing, within) == expected, (source_dim, destination_dim)
        assert {len(route) for route in senders} == {hops[0]}
        assert {len(route) for route in receivers} == {hops[1]}
        for route in routes:
            assert route[0].members == tuple(range(size)) and route[0].after is None
            assert all(hop.after is not None for hop in route[1:])
        for position in range(hops[1]):  # all ranks of a hop describe the same one
            signatures = {
                (hop.plan.signature, hop.members)
                for route in receivers
                for hop in route[position : position + 1]
            }
            assert len(signatures) == 1


def test_who_speaks():
    """All ranks of a replicated source send a part, unless only the first one counts."""

    def speakers(**changes):
        relayed = relayed_of((3, 2), None, None, **changes)
        return [rank for rank in range(3) if route_of(rank, 5, relayed)[0].plan.sends]

    assert speakers(algorithm="sharded") == speakers(algorithm="direct") == [0, 1, 2]
    assert speakers(algorithm="sharded", by_leader=True) == [0]


def test_chunks_overlap():
    """All chunks are in flight before the first one is gathered in the stage."""
    relayed = relayed_of((1, 3), None, None, "sharded", num_chunks=3)
    receiver = route_of(1, 4, relayed)
    assert [(hop.members, hop.after) for hop in receiver] == [
        ((0, 1, 2, 3), None),
        ((0, 1, 2, 3), 0),
        ((0, 1, 2, 3), 0),
        ((1, 2, 3), 0),
        ((1, 2, 3), 1),
        ((1, 2, 3), 2),
    ]


def test_sharded_example_of_the_documentation():
    """[5, 7] from 2 ranks to 3, flat; and by rows."""

    def sends(rank):
        relayed = relayed_of((2, 3), None, None, "sharded")
        relayed = dataclasses.replace(relayed, whole=((5 * 7,), torch.bfloat16))
        plan = route_of(rank, 5, relayed)[0].plan
        return {peer: (start[0], start[0] + extent[0]) for peer, [(_, start, extent)] in plan.sends}

    assert sends(0) == {2: (0, 16), 3: (16, 24)}
    assert sends(1) == {3: (24, 32), 4: (32, 35)}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64, torch.complex128], ids=str)
def test_flat_pieces_begin_at_multiples_of_16_bytes(dtype):
    """NCCL moves other messages byte by byte."""
    for sizes, num_chunks, num_elements in itertools.product([(1, 3), (3, 2)], (1, 5), (0, 3, 100, 1001)):
        relayed = relayed_of(sizes, None, None, "sharded", num_chunks)
        relayed = dataclasses.replace(relayed, whole=((num_elements,), dtype), is_flat=True)
        for rank in range(sum(sizes)):
            for hop in route_of(rank, sum(sizes), relayed):
                assert all(
                    view.start * dtype.itemsize % 16 == 0
                    for view in (*hop.inputs, *hop.outputs)
                    if view.length
                )
                for _, boxes in (*hop.plan.sends, *hop.plan.recvs):
                    assert all(start[0] * dtype.itemsize % 16 == 0 for _, start, _ in boxes)
