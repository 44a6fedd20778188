"""Loads the extension module, with errors that say what to run if that fails.

The module holds no C++ type of torch, so one build serves every torch from `OLDEST_TORCH` on. It is built for
one Python.
"""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

OLDEST_TORCH = "2.11"
NEWEST_TESTED_TORCH = "2.15"

_PACKAGE_DIR = Path(__file__).resolve().parents[1]


def _source_dir() -> str:
    """The source folder as messages name it: this checkout, or a placeholder outside a checkout."""
    root = _PACKAGE_DIR.parents[1]
    return f"-e {root}" if (root / "setup.py").is_file() else "<pipecomm_ext source folder>"


def minor_version(version: str) -> tuple[int, int]:
    """(2, 14) of "2.14.1+cu130"."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def import_torch() -> ModuleType:
    """Raises ImportError if torch is missing or too old."""
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"pipecomm_ext needs torch, which {sys.executable} does not have. Run: pip install torch"
        ) from None
    check_torch(torch.__version__)
    return torch


def check_torch(version: str) -> None:
    if minor_version(version) < minor_version(OLDEST_TORCH):
        raise ImportError(
            f"pipecomm_ext needs torch {OLDEST_TORCH} or later, found {version}. "
            f"Run: pip install 'torch>={OLDEST_TORCH}'"
        )


def load_extension() -> ModuleType:
    """Returns the module `_C`.

    Raises an ImportError that says what to run if torch is missing or too old, or if the extension is not
    built, was built for another Python, or does not load.
    """
    import_torch()
    try:
        return importlib.import_module("pipecomm_ext._C")
    except ModuleNotFoundError as error:
        if error.name != "pipecomm_ext._C":
            raise
        raise ImportError(_not_built()) from None
    except ImportError as error:
        raise ImportError(
            f"pipecomm_ext._C does not load: {error}. "
            f"Run: pip install --force-reinstall --no-deps {_source_dir()}"
        ) from error


def _not_built() -> str:
    others = ", ".join(sorted(path.name for path in _PACKAGE_DIR.glob("_C.*.so")))
    found = f" (found only {others}, which is for another Python)" if others else ""
    return (
        f"the extension module of pipecomm_ext is not built for {sys.executable}{found}. "
        f"Run: pip install {_source_dir()}"
    )
