"""The extension module, checked and loaded once, and how it was built.

Every other module takes them from here: `from ..core.extension import _C`.
"""

from types import SimpleNamespace
from typing import TYPE_CHECKING

from .build_check import load_extension

if TYPE_CHECKING:  # the stub, which a module in a variable would hide from type checkers
    import pipecomm_ext._C as _C
else:
    _C = load_extension()

build_info = SimpleNamespace(**_C.build_info)
