"""The extension module, checked and loaded once, and what it was built from and for.

Every other module takes them from here: `from ..core.extension import _C`.
"""

from .build_check import load_extension

_C, build_info = load_extension()
