"""Compiles the CUDA copy kernels for every supported architecture and reads what came out; no GPU is needed.

    python tests/cuda_compile_check.py      or      pytest tests/cuda_compile_check.py

For each architecture: no register spills and no local memory, and in the kernel for aligned copies every
load and store of global memory has 16 bytes, four of each. The machine code is read with cuobjdump or
nvdisasm where one is found (CUDA toolkit, CUDA wheels, triton's wheel), the PTX otherwise.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

ARCHS = ("80", "90", "100")
SOURCE = Path(__file__).resolve().parent.parent / "csrc" / "copy" / "copy_cuda.cu"
REGISTER_BUDGET = 96  # two blocks of 256 threads and more on a multiprocessor
NUM_KERNELS = 16
LOADS_IN_FLIGHT = 4
COMPILE_TIMEOUT_S = 300


def find_tool(name: str) -> str | None:
    """A CUDA tool from PATH, from the toolkit or from an installed wheel."""
    if path := shutil.which(name):
        return path
    roots = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"]
    site_packages = Path(sysconfig.get_path("purelib"))
    roots += [site_packages / "triton" / "backends" / "nvidia" / "bin"]
    roots += sorted(site_packages.glob("nvidia/*/bin"))
    for root in roots:
        if os.access(root / name, os.X_OK):
            return str(root / name)
    return None


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command)}\n{output}"
    return output


def compile_kernels(arch: str, form: str, output: Path) -> str:
    """Compiles to "cubin" or "ptx" and returns what ptxas printed."""
    nvcc = find_tool("nvcc")
    assert nvcc is not None
    include = str(SOURCE.parent.parent)
    ptxas = "-Xptxas=-v,--warn-on-spills,--warn-on-local-memory-usage"
    flags = ["-std=c++20", "-O3", f"-arch=sm_{arch}", f"-I{include}", ptxas, f"-{form}"]
    return run(nvcc, *flags, str(SOURCE), "-o", str(output))


def kernels_of(text: str, header: str) -> dict[str, list[str]]:
    """Splits a listing into the lines of each kernel; `header` matches a line with the kernel's name."""
    kernels: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if found := re.search(header, line):
            lines = kernels.setdefault(found.group(1), [])
        else:
            lines.append(line)
    return kernels


def machine_code(cubin: Path) -> dict[str, list[str]] | None:
    """The SASS of each kernel, None if there is no disassembler."""
    if cuobjdump := find_tool("cuobjdump"):
        return kernels_of(run(cuobjdump, "-sass", str(cubin)), r"Function : (\S+)")
    if nvdisasm := find_tool("nvdisasm"):
        return kernels_of(run(nvdisasm, "-c", str(cubin)), r"^\.text\.(\S+):")
    return None


def accesses(lines: list[str], pattern: str) -> list[str]:
    return [found.group(0) for line in lines if (found := re.search(pattern, line))]


def aligned_kernels(kernels: dict[str, list[str]]) -> dict[str, list[str]]:
    found = {
        name: lines for name, lines in kernels.items() if "copy_kernel" in name and "AlignedTile" in name
    }
    assert len(found) == 2, f"expected the aligned kernel in two capacities, found {sorted(found)}"
    return found


def check_machine_code(kernels: dict[str, list[str]]) -> None:
    assert len(kernels) == NUM_KERNELS, sorted(kernels)
    for name, lines in kernels.items():
        assert not accesses(lines, r"\b(LDL|STL)\b\S*"), f"{name} uses local memory"
    for name, lines in aligned_kernels(kernels).items():
        loads = accesses(lines, r"\bLDG?\.E\S*")
        stores = accesses(lines, r"\bSTG?\.E\S*")
        for instructions in (loads, stores):
            assert len(instructions) == LOADS_IN_FLIGHT, f"{name}: {loads} {stores}"
            assert all(".128" in instruction for instruction in instructions), f"{name}: {instructions}"
        # A conditional jump to the exit may be printed as CALL; only a function that is called returns.
        assert not accesses(lines, r"\bRET\b\S*"), f"{name} calls a function"


def check_ptx(kernels: dict[str, list[str]]) -> None:
    for name, lines in aligned_kernels(kernels).items():
        for kind in ("ld", "st"):
            instructions = accesses(lines, rf"\b{kind}\.global\S*")
            assert len(instructions) == LOADS_IN_FLIGHT, f"{name}: {instructions}"
            for instruction in instructions:
                assert re.search(r"\.v4\.[bu]32|\.v2\.[bu]64", instruction), f"{name}: {instructions}"


@pytest.mark.timeout(2 * COMPILE_TIMEOUT_S)
@pytest.mark.skipif(find_tool("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels(arch: str, tmp_path: Path) -> None:
    cubin = tmp_path / "copy.cubin"
    log = compile_kernels(arch, "cubin", cubin)
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill", log)]
    stacks = [int(count) for count in re.findall(r"(\d+) bytes stack frame", log)]
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    assert len(registers) == NUM_KERNELS, log
    assert not any(spills) and not any(stacks) and "warning" not in log, log
    assert max(registers) <= REGISTER_BUDGET, registers
    kernels = machine_code(cubin)
    if kernels is not None:
        check_machine_code(kernels)
    else:
        ptx = tmp_path / "copy.ptx"
        compile_kernels(arch, "ptx", ptx)
        check_ptx(kernels_of(ptx.read_text(), r"\.entry (\w+)"))
    print(f"sm_{arch}: {NUM_KERNELS} kernels, at most {max(registers)} registers, no spills", flush=True)


@pytest.mark.timeout(COMPILE_TIMEOUT_S)
@pytest.mark.skipif(find_tool("nvcc") is None, reason="nvcc is not installed")
def test_ptx(tmp_path: Path) -> None:
    """What is read where no disassembler is installed; all architectures have the same accesses in PTX."""
    ptx = tmp_path / "copy.ptx"
    compile_kernels(ARCHS[0], "ptx", ptx)
    check_ptx(kernels_of(ptx.read_text(), r"\.entry (\w+)"))


def test_checks_can_fail() -> None:
    """A kernel with one narrow load, one missing store or local memory is refused."""
    good = ["LDG.E.EF.128 R4, desc[UR10][R4.64] ;"] * 4 + ["@!P0 STG.E.128 desc[UR10][R20.64], R4 ;"] * 4
    names = [f"copy_kernel_{capacity}_AlignedTile" for capacity in (25, 200)]
    others = {f"other_{i}": [] for i in range(NUM_KERNELS - 2)}
    check_machine_code({**others, **dict.fromkeys(names, good)})
    narrow_load = ["LDG.E.U8 R4, desc[UR10][R4.64] ;", *good[1:]]
    for bad in (good[:-1], narrow_load, [*good, "STL [R1], R2 ;"], [*good, "RET.REL.NODEC R2 0x0 ;"]):
        with pytest.raises(AssertionError):
            check_machine_code({**others, names[0]: good, names[1]: bad})
    with pytest.raises(AssertionError):
        check_ptx({names[0]: ["ld.global.cs.u32 r1"] * 4, names[1]: []})


def main() -> int:
    if find_tool("nvcc") is None:
        print("nvcc is not installed: the CUDA kernels were not compiled")
        return 0
    with tempfile.TemporaryDirectory() as directory:
        for arch in ARCHS:
            test_kernels(arch, Path(directory))
        test_ptx(Path(directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
