"""Cases of sequence-parallel operations, drawn in the test process, and the checks that ranks run."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import patterns
import torch
import torch.distributed as dist
from ranks import once_a_test

from pipecomm_ext.errors import PipeCommError
from pipecomm_ext.parallel_state import ParallelState

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


def remainder_first(length: int, size: int) -> list[int]:
    """The split rule by counting: elements go to the ranks in turn, one at a time."""
    pieces = [0] * size
    for element in range(length):
        pieces[element % size] += 1
    return pieces


def offsets(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)][:-1]


def cut(tensor: torch.Tensor, dim: int, lengths: list[int], rank: int) -> torch.Tensor:
    """Piece `rank` of a dim that is cut in `lengths`."""
    return tensor.narrow(dim, offsets(lengths)[rank], lengths[rank])


def random_lengths(rng: random.Random, size: int, longest: int) -> list[int]:
    """Any lengths, with zeros."""
    return [rng.choice([0, rng.randint(0, longest)]) for _ in range(size)]


def numbers(shape, dtype, *key):
    """Ordinary random numbers that depend only on shape, dtype and key."""
    generator = torch.Generator().manual_seed(random.Random(repr((shape, key))).getrandbits(60))
    if dtype.is_complex:
        return torch.randn((*shape, 2), generator=generator).to(dtype.to_real()).view(dtype).squeeze(-1)
    return torch.randn(shape, generator=generator).to(dtype)


def scaled(tensor, grad_scale, size):
    if tensor.is_complex():  # torch divides no bcomplex32
        result = tensor.clone(memory_format=torch.contiguous_format)
        result.view(tensor.dtype.to_real()).copy_(
            scaled(result.view(tensor.dtype.to_real()), grad_scale, size)
        )
        return result
    return tensor * size if grad_scale == "up" else tensor / size if grad_scale == "down" else tensor


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in fresh memory."""
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    if layout == "reversed":  # dims in opposite order in memory
        order = list(range(tensor.dim()))[::-1]
        return tensor.permute(order).contiguous().permute(order)
    if layout == "sliced":  # a part of a larger tensor in every dim
        larger = tensor.new_zeros([2 * length + 1 for length in tensor.shape])
        part = larger[tuple(slice(1, None, 2) for _ in tensor.shape)]
        return part.copy_(tensor)
    assert layout == "contiguous"
    return tensor


LAYOUTS = ["contiguous", "reversed", "sliced"]


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    """Asserts equal dtype, shape and bytes, for any strides (those of a single element are arbitrary)."""
    fresh = torch.contiguous_format
    patterns.assert_same(
        actual.detach().clone(memory_format=fresh), expected.detach().clone(memory_format=fresh), what
    )


def check_split(split, piece, whole, grad, size, scale="down", layout="contiguous") -> None:
    """`piece(tensor)` is what this rank holds of a whole one; the gradient is that of all ranks' pieces."""
    is_differentiable = whole.is_floating_point() or whole.is_complex()
    full = laid_out(whole, layout).requires_grad_(is_differentiable)
    part = split(full)
    assert_same(part, piece(whole), "piece")
    assert part.is_contiguous() and part.untyped_storage().nbytes() == part.numel() * part.itemsize
    assert not part.numel() or part.data_ptr() != full.data_ptr()
    if is_differentiable:
        part.backward(laid_out(piece(grad), layout))
        assert_same(full.grad, scaled(grad, scale, size), "gradient")


def check_gather(gather, piece, whole, own_grad, size, scale="up", layout="contiguous") -> None:
    """The gradient is this rank's piece of a gradient of its own."""
    is_differentiable = whole.is_floating_point() or whole.is_complex()
    mine = laid_out(piece(whole), layout).requires_grad_(is_differentiable)
    gathered = gather(mine)
    assert_same(gathered, whole, "gathered")
    assert gathered.is_contiguous()
    if is_differentiable:
        gathered.backward(laid_out(own_grad, layout))
        assert_same(mine.grad, scaled(piece(own_grad), scale, size), "gradient")


@dataclass(frozen=True)
class AllToAllCase:
    """Global lengths are the sums; `arguments` are those other than input, group and dims."""

    shape: tuple[int, ...]  # of this rank's input, except the two dims
    dtype: torch.dtype
    scatter_dim: int
    gather_dim: int
    scatter_sizes: list[int]
    gather_sizes: list[int]
    arguments: dict = field(default_factory=dict)
    layout: str = "contiguous"

    @property
    def whole_shape(self) -> list[int]:
        shape = list(self.shape)
        shape[self.scatter_dim] = sum(self.scatter_sizes)
        shape[self.gather_dim] = sum(self.gather_sizes)
        return shape


KINDS = ["aligned", "scatter uneven", "gather uneven", "both uneven", "explicit", "zeros"]


def all_to_all_cases(size: int, kinds: list[str], dtypes: list[torch.dtype], seed: int) -> list[AllToAllCase]:
    """Every ordered pair of dims of 2- to 6-d tensors, once per kind."""
    rng = random.Random(f"{seed} {size}")
    cases = []
    for num_dims in range(2, 7):
        for scatter_dim, gather_dim in itertools.permutations(range(num_dims), 2):
            for kind in kinds:
                cases.append(_case(rng, size, num_dims, scatter_dim, gather_dim, kind, rng.choice(dtypes)))
    return cases


def _case(
    rng: random.Random,
    size: int,
    num_dims: int,
    scatter_dim: int,
    gather_dim: int,
    kind: str,
    dtype: torch.dtype,
) -> AllToAllCase:
    def even() -> int:
        return size * rng.randint(1, 2)

    def uneven() -> int:
        return even() + (rng.randint(1, size - 1) if size > 1 else 0)

    arguments: dict = {}
    if kind in ("explicit", "zeros"):
        scatter_sizes, gather_sizes = random_lengths(rng, size, 3), random_lengths(rng, size, 3)
        if kind == "zeros":
            scatter_sizes[rng.randrange(size)] = 0
            gather_sizes[rng.randrange(size)] = 0
        arguments = {"scatter_sizes": scatter_sizes, "gather_sizes": tuple(gather_sizes)}
    else:
        scatter = uneven() if kind in ("scatter uneven", "both uneven") else even()
        gather = uneven() if kind in ("gather uneven", "both uneven") else even()
        scatter_sizes, gather_sizes = remainder_first(scatter, size), remainder_first(gather, size)
        if gather % size or rng.random() < 0.5:
            arguments["gather_size"] = gather
    return AllToAllCase(
        tuple(rng.randint(1, 3) for _ in range(num_dims)),
        dtype,
        scatter_dim,
        gather_dim,
        scatter_sizes,
        gather_sizes,
        arguments,
        rng.choice(LAYOUTS),
    )


@once_a_test
def grid(ring_size: int, neighbours: str = "ulysses") -> tuple[ParallelState, int, int]:
    """(state, ring rank, Ulysses rank); `neighbours`: the group whose ranks are consecutive."""
    ulysses_size = dist.get_world_size() // ring_size
    places = [divmod(rank, ulysses_size) for rank in range(dist.get_world_size())]
    if neighbours == "ring":
        places = [divmod(rank, ring_size)[::-1] for rank in range(dist.get_world_size())]
    ring, ulysses = places[dist.get_rank()]
    rings, ulysses_groups = (
        [
            dist.new_group([rank for rank, place in enumerate(places) if place[end] == idx])
            for idx in range(num_groups)
        ]
        for end, num_groups in ((1, ulysses_size), (0, ring_size))
    )
    return ParallelState(ulysses_groups[ring], rings[ulysses]), ring, ulysses


def error_of(call, *args, **kwargs) -> tuple[str, str]:
    """Type and text of the error of a call that must fail."""
    try:
        call(*args, **kwargs)
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        kind = type(error).__name__
        assert not isinstance(error, RuntimeError) or isinstance(error, PipeCommError), f"{kind}: {error}"
        return kind, str(error)
    raise AssertionError(f"{call} took {kwargs} without complaint")


def check_refused(world, wrong, right, kind: type, text: str) -> None:
    """Calls `wrong` on all ranks, then only on rank 1, so that all raise; `right` works after both."""
    for bad_ranks in (range(world.size), [1]):
        is_bad = world.rank in bad_ranks
        name, message = error_of(wrong if is_bad else right)
        assert name == (kind.__name__ if is_bad else "PipeCommMismatch"), (name, message)
        assert text in message and (is_bad or "refused by rank 1" in message), message
        right()


class Seen(torch.autograd.Function):
    """The same tensor; calls `note` with "forward" and "backward" when it is computed."""

    @staticmethod
    def forward(ctx, note, tensor):
        ctx.note = note
        note("forward")
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.note("backward")
        return None, grad


def num_posted(comm) -> int:
    """The number of operations that this rank has posted so far, at least one."""
    return 1 + max(flight["number"] for flight in comm.flight_record())
