"""Builds pipecomm_ext._C with CMake; all metadata but the required torch stands in pyproject.toml.

Environment: PIPECOMM_CUDA (AUTO, ON, OFF), PIPECOMM_FAULTS (ON, OFF), PIPECOMM_LINEINFO (ON, OFF),
PIPECOMM_NCCL_INCLUDE, MAX_JOBS, TORCH_CUDA_ARCH_LIST, CMAKE_BUILD_TYPE, CC, CXX, CUDACXX, CUDA_HOME.
"""

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
OLDEST_TORCH = "2.11"
BYTES_PER_JOB = 2 << 30  # what one translation unit with torch's headers may take


class CMakeExtension(Extension):
    def __init__(self, name: str) -> None:
        super().__init__(name, sources=[])


def torch_requirement() -> str:
    """Of a wheel that which it is built for, as torch's C++ ABI changes with each minor version; else all."""
    try:
        installed = None if "sdist" in sys.argv else importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # then nothing but metadata can be made
        installed = None
    if installed is None:
        return f"torch>={OLDEST_TORCH}"
    return f"torch=={'.'.join(installed.split('.')[:2])}.*"


def find_tool(name: str) -> str:
    """The tool of this Python's environment, whose bin folder need not be on PATH, else the one on PATH."""
    folders = [str(Path(sys.executable).parent), sysconfig.get_path("scripts"), os.environ.get("PATH", "")]
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
    """One folder per Python, torch and CUDA, kept between builds: a rebuild compiles only what changed."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise SystemExit(
            f"pipecomm_ext is built against torch, which is not installed for {sys.executable}.\n"
            "Run: pip install torch setuptools wheel cmake ninja\n"
            "then: pip install --no-build-isolation .\n"
            "(with build isolation pip hides the installed torch)"
        ) from None
    version = torch.__version__.split("+")[0]
    off = os.environ.get("PIPECOMM_CUDA", "AUTO").upper() in ("OFF", "0")
    cuda = "cpu" if off or torch.version.cuda is None else "cu" + torch.version.cuda.replace(".", "")
    return ROOT / "build" / f"{sys.implementation.cache_tag}-torch{version}-{cuda}"


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
            "PIPECOMM_NCCL_INCLUDE": os.environ.get("PIPECOMM_NCCL_INCLUDE", ""),
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
    install_requires=[torch_requirement()],
    ext_modules=[CMakeExtension("pipecomm_ext._C")],
    cmdclass={"build": FreshBuild, "build_ext": CMakeBuild},
)
