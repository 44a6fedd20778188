"""The schedules. Each file of this folder is imported here, so its generators are found without a list."""

import importlib
import pkgutil

from .registry import GENERATORS, get_plan

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
globals().update(GENERATORS)

__all__ = ["GENERATORS", "get_plan", *GENERATORS]  # pyright: ignore[reportUnsupportedDunderAll]
