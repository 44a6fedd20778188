"""Checks that an extension module, or that of a wheel, refers to nothing of torch, CUDA or NCCL.

One build serves every torch only because of this: its undefined symbols are those of Python and of the
libraries of C and C++, and it needs no other library.

    python release/check_symbols.py python/pipecomm_ext/_C*.so
    python release/check_symbols.py dist/*.whl
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LIBRARIES = re.compile(r"(lib(stdc\+\+|c\+\+|c\+\+abi|gcc_s|atomic|c|m|pthread|dl|rt)|ld-linux.*)\.so\.\d+")
FOREIGN = re.compile(
    r"\b(at|c10|c10d|caffe2|gloo|torch)::"  # also in the type of an argument
    r"|^(aoti_torch_|torch_|THP|nccl|cu[a-z]*[A-Z])"
)


def problems(module: Path) -> list[str]:
    """What the module refers to and must not, one line each."""
    symbols = _output("nm", "-D", "--undefined-only", "--demangle", module)
    names = re.findall(r"^ *[Uvw] (.*?)(?:@.*)?$", symbols, re.MULTILINE)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", _output("readelf", "--wide", "--dynamic", module))
    found = [f"it refers to the symbol {name}" for name in names if FOREIGN.search(name)]
    found += [f"it needs the library {name}" for name in needed if not LIBRARIES.fullmatch(name)]
    if not names or not needed:
        found.append("it refers to nothing, so it is no extension module")
    return found


def _output(program: str, *arguments: str | Path) -> str:
    command = [program, *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def problems_of_file(path: Path) -> list[str]:
    if path.suffix != ".whl":
        return problems(path)
    with zipfile.ZipFile(path) as wheel, tempfile.TemporaryDirectory() as folder:
        modules = [name for name in wheel.namelist() if name.endswith(".so")]
        return [line for name in modules for line in problems(Path(wheel.extract(name, folder)))]


def main() -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a module, or a wheel")
    found = [(path, line) for path in parser.parse_args().files for line in problems_of_file(path)]
    for path, line in found:
        print(f"{path}: {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
