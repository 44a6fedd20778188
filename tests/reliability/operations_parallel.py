"""Operations of sequence and pipeline parallelism, with their backward, for the table of operations.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from operations import Call, Draw, check_tensors, operation
from patterns import assert_same, pattern
from sequence_cases import numbers, remainder_first, scaled

import pipecomm_ext
from pipecomm_ext import Communicator
from pipecomm_ext.pipeline_parallel import P2PCommunicator

# ---- sequence parallelism: tensors [length, heads, 2], of which ranks hold parts along one dim -------------


def differentiable(
    call: Callable[[torch.Tensor], torch.Tensor],
    mine: torch.Tensor,
    expected: torch.Tensor,
    grad: torch.Tensor,
    expected_grad: torch.Tensor,
) -> Call:
    """A call of a function of one tensor, and its backward if the dtype has gradients."""
    results: list[torch.Tensor] = []

    def start() -> list[Any]:
        leaf = mine.clone().requires_grad_(mine.is_floating_point())
        results[:] = [call(leaf)]
        if leaf.requires_grad:
            results[0].backward(grad)
            results.append(leaf.grad)
        return []

    def check() -> None:
        assert_same(results[0], expected, "result")
        if len(results) == 2:
            assert_same(results[1], expected_grad, "gradient")

    return Call(start, check)


def whole_tensors(comm: Communicator, draw: Draw, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """The tensor as if there were one rank, and the gradients of all ranks."""
    whole = pattern(shape, draw.dtype, draw.key)
    if not draw.dtype.is_floating_point:
        return whole, [whole] * comm.size
    return whole, [numbers(shape, draw.dtype, draw.key, rank) for rank in range(comm.size)]


@operation("all_to_all", "collective")
def all_to_all(comm: Communicator, draw: Draw) -> Call:
    shape = (draw.length + draw.variant % 5, comm.size + 1, 2)
    sequence, heads = (remainder_first(length, comm.size) for length in shape[:2])
    whole, grads = whole_tensors(comm, draw, shape)
    mine, expected = whole.split(sequence, 0)[comm.rank], whole.split(heads, 1)[comm.rank]
    all_grads = torch.cat([grad.split(heads, 1)[rank] for rank, grad in enumerate(grads)], 1)
    return differentiable(
        lambda tensor: pipecomm_ext.all_to_all(tensor, comm, 1, 0, shape[0]),
        mine,
        expected,
        grads[comm.rank].split(heads, 1)[comm.rank],
        all_grads.split(sequence, 0)[comm.rank],
    )


@operation("all_to_all_many", "collective")
def all_to_all_many(comm: Communicator, draw: Draw) -> Call:
    shapes = [(draw.length, comm.size * (1 + (draw.variant + idx) % 2), 2) for idx in range(3)]
    dtypes = [draw.dtype, draw.dtype, torch.int16]
    wholes = [
        pattern(shape, dtype, draw.key, idx)
        for idx, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    sequence = remainder_first(draw.length, comm.size)
    inputs = [whole.split(sequence, 0)[comm.rank] for whole in wholes]
    expected = [whole.chunk(comm.size, 1)[comm.rank] for whole in wholes]
    results: list[torch.Tensor] = []

    def start() -> list[Any]:
        results[:] = pipecomm_ext.all_to_all_many(inputs, comm, 1, 0, draw.length)
        return []

    return Call(start, lambda: check_tensors(results, expected, "results"))


def attention(
    comm: Communicator, draw: Draw, num_heads: int, held: Callable[[torch.Tensor], torch.Tensor], call
) -> Call:
    """Uses an attention that returns what this rank holds, so that every dtype works."""
    whole, grads = whole_tensors(comm, draw, (draw.length, num_heads, 2))
    mine, grad = held(whole), held(grads[0])
    options = {"gather_size": draw.length, "heads_dim": 1, "seq_dim": 0}
    return differentiable(lambda tensor: call(*[tensor] * 3, **options), mine, mine, grad, grad)


def ulysses(comm: Communicator, draw: Draw, call) -> Call:
    sequence = remainder_first(draw.length, comm.size)
    num_heads = comm.size * (1 + draw.variant % 3)
    call = functools.partial(call, chunks=2)
    return attention(comm, draw, num_heads, lambda tensor: tensor.split(sequence, 0)[comm.rank], call)


@operation("ulysses_attention", "collective")
def ulysses_attention(comm: Communicator, draw: Draw) -> Call:
    return ulysses(
        comm,
        draw,
        functools.partial(
            pipecomm_ext.ulysses_attention, attention=lambda q, k, v: q.clone(), process_group=comm
        ),
    )


@operation("zigzag_attention", "collective")
def zigzag_attention(comm: Communicator, draw: Draw) -> Call:
    """The values of its queries are the last ones."""
    slices = remainder_first(draw.length, 2 * comm.size)

    def held(tensor: torch.Tensor) -> torch.Tensor:
        pieces = tensor.split(slices, 0)
        return torch.cat([pieces[comm.rank], pieces[-1 - comm.rank]], 0)

    call = functools.partial(
        pipecomm_ext.zigzag_attention,
        attention=lambda q, k, v, is_causal: v[v.size(0) - q.size(0) :].clone(),
        process_group=comm,
        is_causal=True,
    )
    return attention(comm, draw, 1 + draw.variant % 3, held, call)


def gathered(
    comm: Communicator,
    draw: Draw,
    shape: tuple[int, ...],
    piece: Callable[[torch.Tensor], torch.Tensor],
    call: Callable[[torch.Tensor], torch.Tensor],
) -> Call:
    """A gather of `piece`s into the whole, whose backward keeps this rank's piece of its gradient times P."""
    whole, grads = whole_tensors(comm, draw, shape)
    expected_grad = scaled(piece(grads[comm.rank]), "up", comm.size)
    return differentiable(call, piece(whole), whole, grads[comm.rank], expected_grad)


def split(
    comm: Communicator,
    draw: Draw,
    shape: tuple[int, ...],
    piece_of: Callable[[torch.Tensor, int], torch.Tensor],
    join: Callable[[list[torch.Tensor]], torch.Tensor],
    call: Callable[[torch.Tensor], torch.Tensor],
) -> Call:
    """A split into pieces, whose backward gathers the pieces' gradients over P; only that communicates."""
    whole, _ = whole_tensors(comm, draw, shape)
    grads = [
        numbers(piece_of(whole, rank).shape, draw.dtype, draw.key, "grad", rank)
        if draw.dtype.is_floating_point
        else piece_of(whole, rank)
        for rank in range(comm.size)
    ]
    expected_grad = scaled(join(grads), "down", comm.size)
    return differentiable(call, whole, piece_of(whole, comm.rank), grads[comm.rank], expected_grad)


@operation("gather_forward_split_backward", "collective", "shape dtype")
def gather_forward_split_backward(comm: Communicator, draw: Draw) -> Call:
    sizes = [(draw.length + rank * draw.variant) % 7 + draw.length // 2 for rank in range(comm.size)]
    return gathered(
        comm,
        draw,
        (2, sum(sizes), 2),
        lambda whole: whole.split(sizes, 1)[comm.rank],
        lambda tensor: pipecomm_ext.gather_forward_split_backward(tensor, comm, 1, sizes),
    )


@operation("split_forward_gather_backward", "collective", "shape")
def split_forward_gather_backward(comm: Communicator, draw: Draw) -> Call:
    sizes = remainder_first(draw.length + draw.variant, comm.size)
    return split(
        comm,
        draw,
        (2, sum(sizes), 2),
        lambda whole, rank: whole.split(sizes, 1)[rank],
        lambda grads: torch.cat(grads, 1),
        lambda tensor: pipecomm_ext.split_forward_gather_backward(tensor, comm, 1),
    )


def zigzag_piece(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    chunks = whole.chunk(2 * size, 0)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def zigzag_whole(pieces: list[torch.Tensor]) -> torch.Tensor:
    halves = [piece.chunk(2, 0) for piece in pieces]
    return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)])


@operation("load_balanced_gather_forward_split_backward", "collective", "shape dtype")
def zigzag_gather(comm: Communicator, draw: Draw) -> Call:
    return gathered(
        comm,
        draw,
        (2 * comm.size * draw.length, 3),
        lambda whole: zigzag_piece(whole, comm.rank, comm.size),
        lambda tensor: pipecomm_ext.load_balanced_gather_forward_split_backward(tensor, comm),
    )


@operation("load_balanced_split_forward_gather_backward", "collective", "shape")
def zigzag_split(comm: Communicator, draw: Draw) -> Call:
    return split(
        comm,
        draw,
        (2 * comm.size * draw.length, 3),
        lambda whole, rank: zigzag_piece(whole, rank, comm.size),
        zigzag_whole,
        lambda tensor: pipecomm_ext.load_balanced_split_forward_gather_backward(tensor, comm),
    )


class Packed:
    """Sequences one after the other, each cut remainder-first."""

    def __init__(self, comm: Communicator, draw: Draw):
        self.lengths = [draw.length, 1 + draw.variant, 2]
        self.rows = [remainder_first(length, comm.size) for length in self.lengths]
        self.size = comm.size

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.lengths), 3

    def piece(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        sequences = whole.split(self.lengths, 0)
        pairs = zip(sequences, self.rows, strict=True)
        return torch.cat([sequence.split(row, 0)[rank] for sequence, row in pairs])

    def whole(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        cut = [piece.split([row[rank] for row in self.rows], 0) for rank, piece in enumerate(pieces)]
        return torch.cat([piece[idx] for idx in range(len(self.lengths)) for piece in cut])


@operation("packed_data_gather_forward_split_backward", "collective", "shape dtype")
def packed_gather(comm: Communicator, draw: Draw) -> Call:
    packed = Packed(comm, draw)
    sizes = pipecomm_ext.cal_split_sizes_multi(packed.lengths, comm.size)
    return gathered(
        comm,
        draw,
        packed.shape,
        lambda whole: packed.piece(whole, comm.rank),
        lambda tensor: pipecomm_ext.packed_data_gather_forward_split_backward(tensor, sizes, comm),
    )


@operation("packed_data_split_forward_gather_backward", "collective", "shape")
def packed_split(comm: Communicator, draw: Draw) -> Call:
    packed = Packed(comm, draw)
    return split(
        comm,
        draw,
        packed.shape,
        packed.piece,
        packed.whole,
        lambda tensor: pipecomm_ext.packed_data_split_forward_gather_backward(tensor, comm, packed.lengths),
    )


@operation("gather_forward_split_backward_with_cp", "collective", "shape dtype")
def ring_gather(comm: Communicator, draw: Draw) -> Call:
    """Over a ring of all ranks, no Ulysses group."""
    state = pipecomm_ext.parallel_state.ParallelState(ring_group=comm)
    length = 2 * comm.size * draw.length
    return gathered(
        comm,
        draw,
        (length, 3),
        lambda whole: zigzag_piece(whole, comm.rank, comm.size),
        lambda tensor: pipecomm_ext.gather_forward_split_backward_with_cp(
            tensor, 0, length, parallel_state=state
        ),
    )


@operation("attention_with_cp", "collective")
def ulysses_of_all_ranks(comm: Communicator, draw: Draw) -> Call:
    """Over a Ulysses group of all ranks, no ring."""
    return ulysses(
        comm,
        draw,
        functools.partial(
            pipecomm_ext.attention_with_cp,
            attention=lambda q, k, v, is_causal: q.clone(),
            is_causal=False,
            parallel_state=pipecomm_ext.parallel_state.ParallelState(ulysses_group=comm),
        ),
    )


@operation("packed_data_gather_forward_split_backward_with_cp", "collective", "shape dtype")
def ulysses_packed_gather(comm: Communicator, draw: Draw) -> Call:
    """Over a Ulysses group of all ranks, no ring: the packed whole is cut as one."""
    state = pipecomm_ext.parallel_state.ParallelState(ulysses_group=comm)
    lengths = Packed(comm, draw).lengths
    sizes = remainder_first(sum(lengths), comm.size)
    return gathered(
        comm,
        draw,
        (sum(lengths), 3),
        lambda whole: whole.split(sizes, 0)[comm.rank],
        lambda tensor: pipecomm_ext.packed_data_gather_forward_split_backward_with_cp(
            tensor, 0, lengths, parallel_state=state
        ),
    )


# ---- pipeline: P2PCommunicator, each rank a stage ----------------------------------------------------------


class Stage:
    """One stage with what its neighbours send: activations down, gradients up the pipeline."""

    def __init__(self, comm: Communicator, draw: Draw):
        config = SimpleNamespace(
            pipeline_dtype=draw.dtype,
            variable_seq_lengths=draw.variant % 4 >= 2,
            batch_p2p_comm=draw.variant % 2 == 0,
        )
        self.p2p = P2PCommunicator(comm, config)
        self.rank, self.size, self.draw = comm.rank, comm.size, draw
        self.shape = (draw.length, 2)
        self.is_first, self.is_last = comm.rank == 0, comm.rank == comm.size - 1

    def tensor(self, kind: str, rank: int | None = None) -> torch.Tensor:
        rank = self.rank if rank is None else rank % self.size
        return pattern(self.shape, self.draw.dtype, self.draw.key, kind, rank)

    def output(self, rank: int | None = None) -> torch.Tensor:
        return self.tensor("activation", rank)

    def grad(self, rank: int | None = None) -> torch.Tensor:
        return self.tensor("gradient", rank)

    @property
    def from_before(self) -> torch.Tensor | None:
        return None if self.is_first else self.output(self.rank - 1)

    @property
    def from_after(self) -> torch.Tensor | None:
        return None if self.is_last else self.grad(self.rank + 1)


def of_stages(name: str, form: str):
    """Adds a function that makes a stage's calls and returns what arrived and what was expected."""

    def register(play: Callable[[Stage], list[tuple[Any, torch.Tensor | None]]]) -> None:
        @operation(f"P2PCommunicator.{name}", form, "shape")
        def prepare(comm: Communicator, draw: Draw) -> Call:
            stage, results = Stage(comm, draw), []

            def start() -> list[Any]:
                results[:] = play(stage)
                return []

            def check() -> None:
                for got, wanted in results:
                    if wanted is None:
                        assert got is None
                    else:
                        assert_same(got.detach(), wanted, "received")

            return Call(start, check)

    return register


@of_stages("recv_forward, send_forward", "chain")
def forward(stage: Stage):
    received = stage.p2p.recv_forward(stage.shape, stage.is_first)
    stage.p2p.send_forward(stage.output(), stage.is_last)
    return [(received, stage.from_before)]


@of_stages("recv_backward, send_backward", "chain")
def backward(stage: Stage):
    received = stage.p2p.recv_backward(stage.shape, stage.is_last)
    stage.p2p.send_backward(stage.grad(), stage.is_first)
    return [(received, stage.from_after)]


@of_stages("send_forward_recv_backward, send_backward_recv_forward", "chain")
def steady_state(stage: Stage):
    """Sends a micro-batch down and its gradient up while the next one arrives, as in 1F1B."""
    first = stage.p2p.recv_forward(stage.shape, stage.is_first)
    grad = stage.p2p.send_forward_recv_backward(stage.output(), stage.shape, stage.is_last)
    second = stage.p2p.send_backward_recv_forward(stage.grad(), stage.shape, stage.is_first)
    stage.p2p.send_forward(stage.output(), stage.is_last)
    return [(first, stage.from_before), (grad, stage.from_after), (second, stage.from_before)]


@of_stages("send_forward_recv_forward", "ring")
def forward_ring(stage: Stage):
    received = stage.p2p.send_forward_recv_forward(stage.output(), True, stage.shape)
    return [(received, stage.output(stage.rank - 1))]


@of_stages("send_backward_recv_backward", "ring")
def backward_ring(stage: Stage):
    received = stage.p2p.send_backward_recv_backward(stage.grad(), True, stage.shape)
    return [(received, stage.grad(stage.rank + 1))]


@of_stages("send_forward_backward_recv_forward_backward", "ring")
def both_ways(stage: Stage):
    activation, grad = stage.p2p.send_forward_backward_recv_forward_backward(
        stage.output(), stage.grad(), True, True, stage.shape
    )
    return [(activation, stage.output(stage.rank - 1)), (grad, stage.grad(stage.rank + 1))]
