"""Pipeline and sequence-parallel communication for PyTorch."""

from ._build_check import load_extension as _load_extension

__version__ = "0.1.0"

_C = _load_extension()

from .info import info  # noqa: E402

__all__ = ["__version__", "info"]
