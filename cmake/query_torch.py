"""Prints, as JSON, what the build must know about the torch of the interpreter that runs this file."""

import json
from pathlib import Path

import torch
from torch.utils import cpp_extension


def wheel_include_dirs() -> dict[str, list[str]]:
    """Header folders of the NVIDIA wheels beside torch; they complete a partial toolkit and bring nccl.h."""
    roots = [Path(torch.__file__).parents[1] / "nvidia"]
    includes = sorted(path for root in roots for path in root.glob("*/include"))
    return {
        "nccl": [str(path) for path in includes if (path / "nccl.h").is_file()],
        "cuda": [str(path) for path in includes if not (path / "nccl.h").is_file()],
    }


def main() -> None:
    wheels = wheel_include_dirs()
    facts = {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "",
        "cxx11_abi": int(torch.compiled_with_cxx11_abi()),
        "include_dirs": ";".join(cpp_extension.include_paths()),
        "library_dirs": ";".join(cpp_extension.library_paths()),
        "wheel_cuda_include_dirs": ";".join(wheels["cuda"]),
        "wheel_nccl_include_dirs": ";".join(wheels["nccl"]),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
