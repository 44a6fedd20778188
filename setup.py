"""Builds pipecomm_ext._C with CMake; all metadata stand in pyproject.toml.

Environment: PIPECOMM_CUDA (AUTO, ON, OFF), PIPECOMM_FAULTS (ON, OFF), PIPECOMM_LINEINFO (ON, OFF), MAX_JOBS,
TORCH_CUDA_ARCH_LIST, CMAKE_BUILD_TYPE, CC, CXX, CUDACXX, CUDA_HOME.
"""

import contextlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BYTES_PER_JOB = 1 << 30  # what one translation unit may take


class CMakeExtension(Extension):
    def __init__(self, name: str) -> None:
        super().__init__(name, sources=[])


def find_tool(name: str) -> str:
    """The tool that pip has installed for this build or in this Python's environment (whose bin folder need
    not be on PATH), else the one on PATH or beside Python.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files(name) or ():
            if file.name == name and (tool := shutil.which(str(Path(file.locate()).resolve()))):
                return tool
    folders = [os.environ.get("PATH", ""), str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
    tool = shutil.which(name, path=os.pathsep.join(folders))
    if tool is None:
        raise SystemExit(f"pipecomm_ext: {name} is missing. Run: pip install cmake ninja")
    return tool


def check_compiler() -> None:
    compilers = [os.environ["CXX"].split()[0]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    if not any(shutil.which(compiler) for compiler in compilers):
        raise SystemExit(
            f"pipecomm_ext: no C++ compiler ({', '.join(compilers)}) on PATH. Install one that knows C++20 "
            "(Debian/Ubuntu: apt install g++), or name it in CXX."
        )


def build_dir() -> Path:
    """Kept between builds: what has not changed is not compiled again."""
    is_off = os.environ.get("PIPECOMM_CUDA", "AUTO").upper() in ("OFF", "0")
    return ROOT / "build" / f"{sys.implementation.cache_tag}-{'cpu' if is_off else 'cuda'}"


def num_jobs() -> int:
    if "MAX_JOBS" in os.environ:
        return max(1, int(os.environ["MAX_JOBS"]))
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    available_bytes = int(meminfo["MemAvailable"].split()[0]) * 1024
    return max(1, min(len(os.sched_getaffinity(0)), available_bytes // BYTES_PER_JOB))


class FreshBuild(build):
    """Starts from an empty build_lib: what an earlier build left there would be packed into the wheel."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    def run(self) -> None:
        folder = build_dir()
        check_compiler()
        cmake, ninja = find_tool("cmake"), find_tool("ninja")
        base = ROOT / "python" if self.inplace else Path(self.build_lib).resolve()
        configure = [cmake, "-G", "Ninja", "-S", str(ROOT), "-B", str(folder)]
        options = {
            "CMAKE_MAKE_PROGRAM": ninja,
            "CMAKE_BUILD_TYPE": os.environ.get("CMAKE_BUILD_TYPE", "Release"),
            "Python_EXECUTABLE": sys.executable,
            "PIPECOMM_CUDA": os.environ.get("PIPECOMM_CUDA", "AUTO"),
            "PIPECOMM_FAULTS": os.environ.get("PIPECOMM_FAULTS", "OFF"),
            "PIPECOMM_LINEINFO": os.environ.get("PIPECOMM_LINEINFO", "ON"),
        }
        steps = [
            configure + [f"-D{name}={value}" for name, value in options.items()],
            [cmake, "--build", str(folder), "--parallel", str(num_jobs())],
            [cmake, "--install", str(folder), "--prefix", str(base / "pipecomm_ext")],
        ]
        for step in steps:
            status = subprocess.run(step).returncode
            if status != 0:
                raise SystemExit(
                    f"pipecomm_ext: the build failed (status {status}, see above): {' '.join(step)}"
                )


setup(
    ext_modules=[CMakeExtension("pipecomm_ext._C")],
    cmdclass={"build": FreshBuild, "build_ext": CMakeBuild},
)
