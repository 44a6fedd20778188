"""Compiles the CUDA kernels for every supported architecture and inspects the result; builds the program that
runs them (cpp/kernels); compares our declarations of NCCL with its header. No GPU is needed.

    python tests/cuda_compile_check.py      or      pytest tests/cuda_compile_check.py

For each architecture and kernel: no spills, no local memory, no strong stores, and not more registers and
instructions than its budget, so that as many blocks as computed lie on a multiprocessor. In the kernel for
aligned copies every load and store of global memory has 16 bytes, and four loads come before four stores.
The machine code is read with cuobjdump or nvdisasm where one is found (CUDA toolkit, CUDA wheels, triton's
wheel), the PTX otherwise.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from tools import find_tool, missing

ARCHS = ("80", "90", "100")
CSRC = Path(__file__).resolve().parent.parent / "csrc"
LOADS_IN_FLIGHT = 4
COMPILE_TIMEOUT_S = 900


class Budget(NamedTuple):
    """The limits of a kernel, and how many of its blocks of 256 threads a multiprocessor then holds."""

    registers: int
    instructions: int
    blocks: int


# By a part of the kernel's name that identifies it, and how many kernels match.
BUDGETS = {
    "copy": {
        "AlignedTile": (3, Budget(40, 250, 6)),
        "AnyTile": (3, Budget(64, 1100, 4)),
        "7Float16": (3, Budget(64, 2400, 4)),
        "8BFloat16": (3, Budget(64, 2400, 4)),
        "7Float32": (3, Budget(48, 1800, 5)),
        "7Float64": (3, Budget(64, 1800, 4)),
    },
    "mean": {
        "7Float16": (1, Budget(40, 1100, 6)),
        "8BFloat16": (1, Budget(40, 1100, 6)),
        "7Float32": (1, Budget(40, 900, 6)),
        "7Float64": (1, Budget(40, 900, 6)),
    },
    "count": {"count_kernel": (1, Budget(16, 50, 8))},
}


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command)}\n{output}"
    return output


def compile_kernels(source: str, arch: str, form: str, output: Path) -> str:
    """Compiles to "cubin" or "ptx" and returns what ptxas printed."""
    nvcc = find_tool("nvcc")
    assert nvcc is not None
    ptxas = "-Xptxas=-v,--warn-on-spills,--warn-on-local-memory-usage"
    flags = ["-std=c++20", "-O3", f"-arch=sm_{arch}", f"-I{CSRC}", ptxas, f"-{form}"]
    return run(nvcc, *flags, str(CSRC / "copy" / f"{source}_cuda.cu"), "-o", str(output))


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


def instructions_of(lines: list[str]) -> list[str]:
    """The instructions, without labels, encodings and padding."""
    found = [re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line) for line in lines]
    return [match.group(1) for match in found if match and not match.group(1).startswith("NOP")]


def blocks_per_multiprocessor(registers: int) -> int:
    """For 256 threads: warps get registers in units of 256; a multiprocessor has 65536, and 64 warps."""
    per_warp = -(-registers * 32 // 256) * 256
    return min(64, 65536 // per_warp) // 8


def check_registers(source: str, log: str) -> dict[str, int]:
    """Checks registers, spills and stacks in the output of ptxas; returns the registers per kernel."""
    assert "warning" not in log, log
    for number in re.findall(r"(\d+) bytes (?:spill|stack frame)", log):
        assert number == "0", log
    entries = re.split(r"Compiling entry function '", log)[1:]
    registers = {
        entry.split("'")[0]: int(re.search(r"Used (\d+) registers", entry).group(1)) for entry in entries
    }
    for part, (count, budget) in BUDGETS[source].items():
        used = [number for name, number in registers.items() if part in name]
        assert len(used) == count, f"{part}: {sorted(registers)}"
        assert max(used) <= budget.registers, f"{source}, {part}: {used} registers of {budget.registers}"
        assert blocks_per_multiprocessor(max(used)) >= budget.blocks, (source, part, used)
    assert len(registers) == sum(count for count, _ in BUDGETS[source].values()), sorted(registers)
    return registers


def check_machine_code(source: str, arch: str, kernels: dict[str, list[str]]) -> dict[str, int]:
    """Checks the number and kinds of instructions; returns the instructions per kernel."""
    sizes = {}
    leeway = 1.0 if arch == "90" else 1.05  # the same code takes some instructions more elsewhere
    for name, lines in kernels.items():
        assert not accesses(lines, r"\b(LDL|STL)\b\S*"), f"{name} uses local memory"
        assert not accesses(lines, r"\bST\S*STRONG\S*"), f"{name} has strong stores"
        sizes[name] = len(instructions_of(lines))
    for part, (count, budget) in BUDGETS[source].items():
        used = [size for name, size in sizes.items() if part in name]
        assert len(used) == count, f"{part}: {sorted(sizes)}"
        limit = budget.instructions * leeway
        assert max(used) <= limit, f"{source}, {part}: {used} instructions of {limit}"
    for name, lines in aligned_kernels(kernels).items():
        memory = accesses(lines, r"\b(LDG?|STG?)\.E\S*")
        kinds = [instruction[:2] for instruction in memory]
        assert kinds == ["LD"] * LOADS_IN_FLIGHT + ["ST"] * LOADS_IN_FLIGHT, f"{name}: {memory}"
        assert all(".128" in instruction for instruction in memory), f"{name}: {memory}"
        # A conditional jump to the exit may be printed as CALL; only a function that is called returns.
        assert not accesses(lines, r"\bRET\b\S*"), f"{name} calls a function"
    return sizes


def aligned_kernels(kernels: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: lines for name, lines in kernels.items() if "AlignedTile" in name}


def check_ptx(kernels: dict[str, list[str]]) -> None:
    for name, lines in aligned_kernels(kernels).items():
        for kind in ("ld", "st"):
            instructions = accesses(lines, rf"\b{kind}\.global\S*")
            assert len(instructions) == LOADS_IN_FLIGHT, f"{name}: {instructions}"
            for instruction in instructions:
                assert re.search(r"\.v4\.[bu]32|\.v2\.[bu]64", instruction), f"{name}: {instructions}"


@pytest.mark.timeout(2 * COMPILE_TIMEOUT_S)
@pytest.mark.skipif(bool(missing("nvcc")), reason=str(missing("nvcc")))
@pytest.mark.parametrize("source", BUDGETS)
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels(arch: str, source: str, tmp_path: Path) -> None:
    cubin = tmp_path / f"{source}.cubin"
    registers = check_registers(source, compile_kernels(source, arch, "cubin", cubin))
    kernels = machine_code(cubin)
    sizes = {} if kernels is None else check_machine_code(source, arch, kernels)
    if kernels is None:
        ptx = tmp_path / f"{source}.ptx"
        compile_kernels(source, arch, "ptx", ptx)
        check_ptx(kernels_of(ptx.read_text(), r"\.entry (\w+)"))
    for part in BUDGETS[source]:
        used = max(number for name, number in registers.items() if part in name)
        size = max((size for name, size in sizes.items() if part in name), default="unknown")
        blocks = blocks_per_multiprocessor(used)
        line = f"{used} registers, {blocks} blocks of 256, {size} instructions"
        print(f"sm_{arch} {source} {part.lstrip('0123456789')}: {line}", flush=True)


@pytest.mark.timeout(COMPILE_TIMEOUT_S)
@pytest.mark.skipif(bool(missing("nvcc")), reason=str(missing("nvcc")))
def test_ptx(tmp_path: Path) -> None:
    """The check without a disassembler; all architectures have the same accesses in PTX."""
    ptx = tmp_path / "copy.ptx"
    compile_kernels("copy", ARCHS[0], "ptx", ptx)
    check_ptx(kernels_of(ptx.read_text(), r"\.entry (\w+)"))


@pytest.mark.timeout(COMPILE_TIMEOUT_S)
@pytest.mark.skipif(bool(missing("nvcc", "cmake")), reason=str(missing("nvcc", "cmake")))
def test_program(tmp_path: Path) -> None:
    """The program is built, and fails where it has no GPU."""
    source, cmake = CSRC.parent / "tests" / "cpp" / "kernels", find_tool("cmake")
    run(cmake, "-S", str(source), "-B", str(tmp_path), f"-DCMAKE_CUDA_ARCHITECTURES={ARCHS[1]}")
    run(cmake, "--build", str(tmp_path), "--parallel", str(len(os.sched_getaffinity(0))))
    nowhere = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [str(tmp_path / "copy_kernels"), "many"]
    done = subprocess.run(command, env=nowhere, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "passed" in done.stdout) == (1, False), done.stdout


def nccl_headers() -> list[Path]:
    """The folders of nccl.h in the wheels installed with this Python's torch."""
    return sorted(path.parent for path in Path(sysconfig.get_path("purelib")).glob("nvidia/*/include/nccl.h"))


def compile_nccl_check(folder: Path, output: Path, *defines: str) -> None:
    nvcc, source = find_tool("nvcc"), Path(__file__).with_name("nccl_header_check.cpp")
    assert nvcc is not None
    includes = [f"-I{path}" for path in (folder, CSRC)]
    run(nvcc, "-std=c++20", "-x", "c++", "-c", *defines, *includes, str(source), "-o", str(output))


no_nccl_header = pytest.mark.skipif(
    not nccl_headers() or find_tool("nvcc") is None, reason="there is no nvcc, or no wheel with nccl.h"
)


@no_nccl_header
def test_nccl_declarations(tmp_path: Path) -> None:
    for folder in nccl_headers():
        compile_nccl_check(folder, tmp_path / "check.o")
        print(f"NCCL is declared as in {folder}/nccl.h", flush=True)


@no_nccl_header
@pytest.mark.parametrize(
    "define",
    [
        "ncclUint8=ncclInt32",
        "ncclBroadcast=ncclReduce",
        "ncclAllReduce=ncclReduce",
        "ncclMin=ncclMax",
        "ncclBfloat16=ncclFloat16",
        "maxCTAs=minCTAs",
    ],
)
def test_another_declaration_of_nccl_is_found(define: str, tmp_path: Path) -> None:
    """The define simulates a header with another declaration."""
    with pytest.raises(AssertionError, match="error"):
        compile_nccl_check(nccl_headers()[0], tmp_path / "check.o", f"-D{define}")


def test_checks_can_fail() -> None:
    """Narrow, missing, late and strong accesses, local memory, calls, code and registers beyond a budget."""
    loads = ["/*0010*/ LDG.E.EF.128 R4, desc[UR10][R4.64] ;"] * 4
    good = loads + ["/*0020*/ @!P0 STG.E.128 desc[UR10][R20.64], R4 ;"] * 4
    kernels = {
        f"{part}_{idx}": (good if part == "AlignedTile" else [])
        for part, (count, _) in BUDGETS["copy"].items()
        for idx in range(count)
    }
    check_machine_code("copy", "90", kernels)
    for bad in (
        good[:-1],
        ["/*0010*/ LDG.E.U8 R4, desc[UR10][R4.64] ;", *good[1:]],
        [*good[4:], *good[:4]],
        [*good[:-1], "/*0020*/ STG.E.128.STRONG.SM desc[UR10][R20.64], R4 ;"],
        [*good, "/*0030*/ STL [R1], R2 ;"],
        [*good, "/*0030*/ RET.REL.NODEC R2 0x0 ;"],
        good + ["/*0030*/ IADD R1, R1, R2 ;"] * 250,
    ):
        with pytest.raises(AssertionError):
            check_machine_code("copy", "90", {**kernels, "AlignedTile_1": bad})
    entry = "Compiling entry function '{}' for 'sm_90'\n0 bytes stack frame\nUsed {} registers\n"
    names = [f"{part}_{idx}" for part, (count, _) in BUDGETS["copy"].items() for idx in range(count)]
    check_registers("copy", "".join(entry.format(name, 36) for name in names))
    for log in (
        "".join(entry.format(name, 64) for name in names),
        "".join(entry.format(name, 36) for name in names[:-1]),
        "".join(entry.format(name, 36) for name in names) + "8 bytes spill stores",
    ):
        with pytest.raises(AssertionError):
            check_registers("copy", log)
    with pytest.raises(AssertionError):
        check_ptx({"AlignedTile_0": ["ld.global.cs.u32 r1"] * 4})


def main() -> int:
    if find_tool("nvcc") is None:
        print("nvcc is not installed: the CUDA kernels were not compiled")
        return 0
    with tempfile.TemporaryDirectory() as directory:
        for arch in ARCHS:
            for source in BUDGETS:
                test_kernels(arch, source, Path(directory))
        test_ptx(Path(directory))
        if nccl_headers():
            test_nccl_declarations(Path(directory))
        test_program(Path(directory) / "program")
    return 0


if __name__ == "__main__":
    sys.exit(main())
