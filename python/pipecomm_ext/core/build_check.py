"""Loads the extension module after checking that it was built for the torch found here.

A module built for another torch fails to load with `undefined symbol: _ZN3c10...`, which tells the user
nothing. torch keeps its C++ ABI only within a minor version, so the two versions are compared before the
module is touched.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType

_PACKAGE_DIR = Path(__file__).resolve().parents[1]
_REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps"


def _source_dir() -> str:
    """The folder to build from, as messages name it: this checkout, or a placeholder if this is none."""
    root = _PACKAGE_DIR.parents[1]
    return f"-e {root}" if (root / "setup.py").is_file() else "<pipecomm_ext source folder>"


def import_torch() -> ModuleType:
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"pipecomm_ext needs torch, which {sys.executable} does not have. Run: pip install torch, "
            f"then build pipecomm_ext for it: {_REBUILD} {_source_dir()}"
        ) from None


def check_versions(built: ModuleType, torch: ModuleType) -> None:
    """Raises ImportError if the extension that `built` (_build_info) describes cannot load into `torch`."""

    def minor(version: str) -> str:
        return ".".join(version.split("+")[0].split(".")[:2])

    wanted, found = minor(built.torch_version), minor(torch.__version__)
    if wanted != found:
        raise ImportError(
            f"pipecomm_ext was built for torch {wanted}, found {found} (exactly: {built.torch_version} and "
            f"{torch.__version__}); rebuild with: {_REBUILD} {_source_dir()}"
        )
    if built.with_cuda:
        found = torch.version.cuda or "none (a CPU build)"
        if built.cuda_version.split(".")[0] != found.split(".")[0]:
            raise ImportError(
                f"pipecomm_ext was built for torch with CUDA {built.cuda_version}, found CUDA {found}; "
                f"rebuild with: {_REBUILD} {_source_dir()}"
            )


def load_extension() -> tuple[ModuleType, ModuleType]:
    """Returns the modules `_C` and `_build_info`.

    Raises an ImportError that says what to run if torch is missing, or if the extension is not built, was
    built for another torch or another Python, or does not load.
    """
    torch = import_torch()
    try:
        built = importlib.import_module("pipecomm_ext._build_info")
    except ModuleNotFoundError:
        raise ImportError(_not_built()) from None
    check_versions(built, torch)
    try:
        return importlib.import_module("pipecomm_ext._C"), built
    except ModuleNotFoundError as error:
        if error.name != "pipecomm_ext._C":
            raise
        raise ImportError(_not_built()) from None
    except ImportError as error:
        raise ImportError(
            f"pipecomm_ext._C does not load: {error}. Rebuild with: {_REBUILD} {_source_dir()}"
        ) from error


def _not_built() -> str:
    others = ", ".join(sorted(path.name for path in _PACKAGE_DIR.glob("_C.*.so")))
    found = f" (found only {others}, which is for another Python)" if others else ""
    return (
        f"the extension module of pipecomm_ext is not built for {sys.executable}{found}. "
        f"Run: pip install --no-build-isolation {_source_dir()}"
    )
