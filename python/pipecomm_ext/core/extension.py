"""The extension module, checked and loaded once, and what it was built from and for.

Every other module takes them from here: `from ..core.extension import _C`.
"""

from typing import TYPE_CHECKING, Any

from .build_check import load_extension

if TYPE_CHECKING:  # the stub, which a module in a variable would hide from type checkers
    import pipecomm_ext._C as _C

    build_info: Any
else:
    _C, build_info = load_extension()
