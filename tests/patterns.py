"""Test data that shows where it came from, and comparison by bytes."""

from __future__ import annotations

import zlib

import numpy as np
import torch

DTYPES = [
    getattr(torch, name)
    for name in """bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64
    complex32 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz""".split()
]
if hasattr(torch, "bcomplex32"):  # from 2.14 on
    DTYPES.append(torch.bcomplex32)


def pattern(shape: int | tuple[int, ...], dtype: torch.dtype, *key: object) -> torch.Tensor:
    """Random bytes (so also NaN payloads, -0.0 and denormals) that depend only on (shape, dtype, key).

    Any rank can compute what another one sends: `key` names sender, receiver, channel, position, ...
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    generator = np.random.default_rng(zlib.crc32(repr((shape, dtype, key)).encode()))
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    data = torch.frombuffer(bytearray(generator.bytes(num_bytes) or b"\0"), dtype=torch.uint8)[:num_bytes]
    if dtype == torch.bool:
        data &= 1
    return data.view(dtype).reshape(shape)


def poison(shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A receive buffer full of bytes that pattern() is unlikely to hold."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    return torch.full((*shape, dtype.itemsize), 0xA5, dtype=torch.uint8).view(dtype).reshape(shape)


def awaited(work) -> None:
    """Waits for a call that may be asynchronous, and have given no handle."""
    if work is not None:
        work.wait()


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements' bytes in row-major order."""
    if tensor.numel() == 0:
        return b""  # torch calls it contiguous with any strides, but can view it only with some
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    """Asserts equal shape, dtype and bytes."""
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    ours, theirs = bytes_of(actual), bytes_of(expected)
    if ours != theirs:
        first = next(idx for idx, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        num_wrong = sum(a != b for a, b in zip(ours, theirs, strict=True))
        raise AssertionError(f"{what}: {num_wrong} of {len(ours)} bytes differ, the first at byte {first}")
