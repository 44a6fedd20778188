"""Finds the programs that tests, benchmarks and scripts start, wherever this machine has them, and compiles.

[nm] = needs("nm")        # in a test: its path, or the test is skipped with the reason
find_tool("nvcc")         # anywhere: its path, or None
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
# Debian keeps `ip` and `tc` outside the PATH of an ordinary user.
SYSTEM_FOLDERS = ["/usr/local/sbin", "/usr/sbin", "/sbin"]
PACKAGES = {
    **dict.fromkeys(["ip", "tc"], "iproute2"),
    **dict.fromkeys(["nsenter", "unshare"], "util-linux"),
    **dict.fromkeys(["nm", "readelf", "strip"], "binutils"),
    **dict.fromkeys(["pkill"], "procps"),
    **dict.fromkeys(["c++"], "g++"),
}


def folders() -> list[str]:
    """The folders to search for tools: this Python's environment comes first, as in setup.py."""
    site_packages = Path(sysconfig.get_path("purelib"))
    return [
        str(Path(sys.executable).parent),
        *os.environ.get("PATH", os.defpath).split(os.pathsep),
        *SYSTEM_FOLDERS,
        os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"),
        str(site_packages / "triton" / "backends" / "nvidia" / "bin"),
        *map(str, sorted(site_packages.glob("nvidia/*/bin"))),
    ]


def find_tool(name: str) -> str | None:
    """The path of a program."""
    return shutil.which(name, path=os.pathsep.join(folders()))


def missing(*names: str) -> str | None:
    """Which of these programs is not installed, and the package that has it; None if all are."""
    for name in names:
        if find_tool(name) is None:
            package = f" (package {PACKAGES[name]})" if name in PACKAGES else ""
            return f"{name} is not installed{package}"
    return None


def needs(*names: str) -> list[str]:
    """The paths of programs; the calling test is skipped if one is missing."""
    import pytest  # scripts that only look for a tool need no pytest

    if reason := missing(*names):
        pytest.skip(reason)
    return [find_tool(name) for name in names]


def compile_library(source: Path) -> Path:
    """A shared library of one C++ file, which is compiled once, and again when it or a header has changed."""
    compiler = os.environ.get("CXX") or find_tool("c++") or "g++"
    command = [compiler, *"-std=c++20 -O1 -Wall -Wextra -Werror -shared -fPIC".split(), str(source)]
    read = hashlib.sha256(repr(command).encode())
    for path in (source, *sorted(source.parent.glob("*.h"))):
        read.update(path.read_bytes())
    library = REPOSITORY / "build" / f"lib{source.stem}-{read.hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:  # of this worker
            subprocess.run([*command, "-o", f"{folder}/{library.name}"], check=True)
            os.replace(f"{folder}/{library.name}", library)
    return library
