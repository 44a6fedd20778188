"""Builds binary wheels for several Pythons and versions of torch, and checks them: `make wheels`.

Each pair has an environment of its own, which is kept for the next run. What is committed is built, in a
clone, so that neither changes nor build products of this folder get into a wheel. A wheel differs from what
`pip install .` installs in this:

* Its module is stripped, and holds no path of the machine that built it.
* Its version names torch and CUDA: 0.1.0+torch2.11.cu130, or 0.1.0+torch2.11.cpu.

    python release/build_wheels.py --list
    python release/build_wheels.py --python 3.12 --torch 2.14.1 --cuda OFF
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from tools import find_tool  # noqa: E402

TORCHES = ("2.11.0", "2.14.1")
BUILD_TOOLS = ("setuptools>=77", "wheel", "cmake>=3.22", "ninja", "twine", "numpy")
DIST_INFO = ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE", "top_level.txt")
Files = dict[str, bytes]


class WheelError(Exception):
    """A wheel that must not be given to anybody, or cannot be built."""


class Python(NamedTuple):
    version: str  # "3.12"
    path: Path


# ---- what to build for ------------------------------------------------------------------------------------


def supported_versions() -> list[str]:
    text = (ROOT / "pyproject.toml").read_text()
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)


def python_at(path: Path) -> Python | None:
    """The Python at a path, if it runs and can make environments (a shim of pyenv may not)."""
    program = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        result = subprocess.run([path, "-c", program], capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    return Python(result.stdout.strip(), path) if result.returncode == 0 else None


def installed_pythons() -> list[Python]:
    """One Python of each supported version, from PATH or from pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = []
    for version in supported_versions():
        on_path = find_tool(f"python{version}")
        paths = [Path(on_path)] if on_path else []
        paths += sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
        found += [python for path in paths if (python := python_at(path)) and python.version == version][:1]
    return found


def chosen_python(text: str) -> Python:
    """A version among the installed ones, or the path of one."""
    for python in installed_pythons():
        if python.version == text:
            return python
    python = python_at(Path(find_tool(text) or text))
    if python is None:
        raise WheelError(f"there is no Python {text} that runs here and has venv")
    return python


# ---- build ------------------------------------------------------------------------------------------------


def run(*command: str | Path, **options) -> str:
    """What the command prints. Raises WheelError with all of it if the command fails."""
    program, *arguments = map(str, command)
    result = subprocess.run(
        [find_tool(program) or program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )
    if result.returncode != 0:
        raise WheelError(f"{' '.join(map(str, command))}: status {result.returncode}\n{result.stdout}")
    return result.stdout


def environment(python: Python, torch: str, folder: Path) -> Path:
    """The Python of an environment with this torch and the build tools, made if it is not there yet."""
    home = folder / f"python{python.version}-torch{torch}"
    ready, executable = home / ".ready", home / "bin" / "python"
    if not ready.exists():
        print(f"   an environment for it: {home}", flush=True)
        run(python.path, "-m", "venv", home)
        run(executable, "-m", "pip", "install", "-q", f"torch=={torch}", *BUILD_TOOLS)
        ready.touch()
    return executable


def site_packages(python: Path) -> Path:
    """Where the torch of an environment is."""
    program = "import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])"
    return Path(run(python, "-c", program).strip())


def build(source: Path, python: Path, cuda: str, folder: Path) -> Path:
    """Builds the wheel of a clone as pip does, with flags that keep paths and symbols out of it."""
    maps = [f"-ffile-prefix-map={path}=." for path in (site_packages(python), source)]
    added = {
        "CXXFLAGS": " ".join(maps),
        "CUDAFLAGS": " ".join(f"-Xcompiler={flag}" for flag in maps),
        "LDFLAGS": "-s",
    }
    variables = os.environ | {name: f"{os.environ.get(name, '')} {flags}" for name, flags in added.items()}
    variables |= {
        "CMAKE_BUILD_TYPE": "Release",
        "PIPECOMM_CUDA": cuda,
        "PIPECOMM_FAULTS": "OFF",
        "PIPECOMM_LINEINFO": "OFF",
    }
    options = ("--no-build-isolation", "--no-deps", "-q", "-w", folder)
    run(python, "-m", "pip", "wheel", *options, source, env=variables)
    (wheel,) = folder.glob("*.whl")
    return wheel


# ---- metadata ---------------------------------------------------------------------------------------------


def read(wheel: Path) -> Files:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def write(files: Files, folder: Path, name: str) -> Path:
    """A wheel of these files, with a new RECORD."""
    (record,) = (path for path in files if path.endswith(".dist-info/RECORD"))
    rows = io.StringIO()
    table = csv.writer(rows, lineterminator="\n")
    for path, content in files.items():
        if path != record:
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            table.writerow((path, f"sha256={digest}", len(content)))
    table.writerow((record, "", ""))
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / name
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in (files | {record: rows.getvalue().encode()}).items():
            entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
            mode = 0o755 if path.endswith(".so") else 0o644
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, (0o100000 | mode) << 16
            archive.writestr(entry, content)
    return wheel


def build_facts(files: Files) -> dict[str, object]:
    facts: dict[str, object] = {}
    exec(files["pipecomm_ext/_build_info.py"], facts)
    return facts


def local_version(facts: dict[str, object]) -> tuple[str, str]:
    """The minor version of torch that a wheel is for ("2.11"), and its local version ("torch2.11.cu130")."""
    minor = ".".join(str(facts["torch_version"]).split("+")[0].split(".")[:2])
    cuda = f"cu{facts['cuda_version']}".replace(".", "") if facts["with_cuda"] else "cpu"
    return minor, f"torch{minor}.{cuda}"


def pinned(files: Files, name: str) -> tuple[Files, str]:
    """The files and the name of a wheel whose version says for which torch and CUDA it is."""
    minor, local = local_version(build_facts(files))
    (metadata,) = (path for path in files if path.endswith(".dist-info/METADATA"))
    text, blank_line, description = files[metadata].decode().partition("\n\n")
    (version,) = re.findall(r"^Version: (\S+)$", text, re.MULTILINE)
    text, num_versions = re.subn(r"(?m)^Version: .*$", f"Version: {version}+{local}", text)
    if num_versions != 1 or f"\nRequires-Dist: torch=={minor}.*\n" not in f"{text}\n":
        raise WheelError(f"{name}: its metadata have no version or do not require torch=={minor}.*")
    old, new = metadata.split("/")[0], f"pipecomm_ext-{version}+{local}.dist-info"
    changed = files | {metadata: f"{text}{blank_line}{description}".encode()}
    renamed = {path.replace(f"{old}/", f"{new}/", 1): content for path, content in changed.items()}
    return renamed, name.replace(f"-{version}-", f"-{version}+{local}-", 1)


# ---- checks -----------------------------------------------------------------------------------------------


def wanted_files(source: Path, dist_info: str, module: str) -> set[str]:
    """What is committed of the package, what the build adds, and the metadata."""
    package = source / "python" / "pipecomm_ext"
    sources = {f"pipecomm_ext/{name}" for name in run("git", "-C", package, "ls-files").splitlines()}
    return sources | {"pipecomm_ext/_build_info.py", module} | {f"{dist_info}/{name}" for name in DIST_INFO}


def check_files(files: Files, wanted: set[str]) -> None:
    if files.keys() != wanted:
        missing, unwanted = sorted(wanted - files.keys()), sorted(files.keys() - wanted)
        raise WheelError(f"the wheel lacks {missing} and should not have {unwanted}")


def check_paths(files: Files, of_this_machine: list[Path]) -> None:
    """No file holds a path of a home or of the folders that the build used."""
    places = {bytes(path) for path in of_this_machine}
    pattern = re.compile(b"|".join([*map(re.escape, sorted(places)), rb"/home/\w", rb"/root/\w"]))
    for name, content in files.items():
        if match := pattern.search(content):
            around = content[max(0, match.start() - 40) : match.end() + 60]
            raise WheelError(f"{name} holds a path of this machine: {around!r}")


def check_stripped(module: bytes, folder: Path) -> None:
    path = folder / "module.so"
    path.write_bytes(module)
    if re.search(r" \.(?:symtab|debug_\w+) ", run("readelf", "--wide", "--section-headers", path)):
        raise WheelError("the module is not stripped")


def check_installed(wheel: Path, python: Path, folder: Path) -> None:
    """Installs the wheel into an environment that has nothing but torch, imports it, compares metadata."""
    home = folder / "installed"
    run(python, "-m", "venv", home)
    installed = home / "bin" / "python"
    purelib = run(installed, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(purelib, "torch_of_the_build.pth").write_text(f"{site_packages(python)}\n", encoding="utf-8")
    run(installed, "-m", "pip", "install", "-q", "--no-index", wheel)  # refused if torch does not fit
    run(installed, "-m", "pip", "check")
    program = (
        "import pipecomm_ext, importlib.metadata as m; "
        "print(pipecomm_ext.__file__, m.version('pipecomm_ext'))"
    )
    place, version = run(installed, "-c", program, cwd=folder).split()
    if not place.startswith(purelib) or version != wheel.name.split("-")[1]:
        raise WheelError(f"{place}, version {version}, was imported instead of {wheel.name}")
    run(installed, "-m", "pipecomm_ext", "info", cwd=folder)


def checked(wheel: Path, source: Path, python: Path, folder: Path) -> Path:
    files = read(wheel)
    (module,) = (name for name in files if name.endswith(".so"))
    (metadata,) = (name for name in files if name.endswith(".dist-info/METADATA"))
    check_files(files, wanted_files(source, metadata.split("/")[0], module))
    check_paths(files, [source, site_packages(python), python.parents[1], ROOT])
    check_stripped(files[module], folder)
    run(python, "-m", "twine", "check", "--strict", wheel)
    check_installed(wheel, python, folder)
    return wheel


def needed_glibc(files: Files) -> str:
    (module,) = (content for name, content in files.items() if name.endswith(".so"))
    versions = {tuple(map(int, text.split(b"."))) for text in re.findall(rb"GLIBC_(\d+\.\d+)", module)}
    return ".".join(map(str, max(versions)))


# ---- all of it --------------------------------------------------------------------------------------------


def one_wheel(source: Path, python: Python, torch: str, arguments: argparse.Namespace) -> Path:
    executable = environment(python, torch, arguments.environments)
    with tempfile.TemporaryDirectory(prefix="pipecomm_wheel_") as name:
        folder = Path(name)
        plain = build(source, executable, arguments.cuda, folder / "plain")
        files, wheel_name = pinned(read(plain), plain.name)
        wheel = write(files, folder / "pinned", wheel_name)
        checked(wheel, source, executable, folder)
        arguments.out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, arguments.out))


def main() -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--python", nargs="+", help="versions or paths; default: all that are installed")
    parser.add_argument("--torch", nargs="+", default=TORCHES, help=f"default: {' '.join(TORCHES)}")
    parser.add_argument("--cuda", default=os.environ.get("PIPECOMM_CUDA") or "AUTO", help="AUTO, ON or OFF")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the wheels go")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-wheels", help="are kept there")
    parser.add_argument("--list", action="store_true", help="only say what would be built")
    arguments = parser.parse_args()
    try:
        pythons = list(map(chosen_python, arguments.python)) if arguments.python else installed_pythons()
    except WheelError as error:
        parser.error(str(error))
    pairs = [(python, torch) for torch in arguments.torch for python in pythons]
    if arguments.list:
        for python, torch in pairs:
            print(f"Python {python.version} ({python.path}), torch {torch}, CUDA {arguments.cuda}")
        return 0
    if run("git", "-C", ROOT, "status", "--porcelain"):
        print("What is not committed is not in the wheels.")
    arguments.out, arguments.environments = arguments.out.resolve(), arguments.environments.resolve()
    failed = []
    with tempfile.TemporaryDirectory(prefix="pipecomm_source_") as name:
        source = Path(name) / "pipecomm_ext"
        run("git", "clone", "-q", ROOT, source)
        for python, torch in pairs:
            print(f"== Python {python.version}, torch {torch}", flush=True)
            started_at = time.monotonic()
            try:
                wheel = one_wheel(source, python, torch, arguments)
            except WheelError as error:
                failed.append(f"Python {python.version}, torch {torch}")
                print(error, flush=True)
                continue
            facts = [
                f"{wheel.stat().st_size / 2**20:.1f} MiB",
                f"needs glibc {needed_glibc(read(wheel))}",
                f"{time.monotonic() - started_at:.0f} s",
            ]
            print(f"   {wheel.name}: {', '.join(facts)}", flush=True)
    num_built = len(pairs) - len(failed)
    print(f"{num_built} of {len(pairs)} wheels are in {arguments.out}", *failed, sep="\nfailed: ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
