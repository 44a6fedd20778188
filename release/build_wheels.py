"""Builds binary wheels, without CUDA and with it, for each installed Python, and checks them: `make wheels`.

What is committed is built, in a clone, so that neither changes nor build products of this folder get into a
wheel. Each wheel serves every torch that pyproject.toml allows. It differs from what `pip install .` installs
in this:

* Its module is stripped, and holds no path of the machine that built it.
* Its version names CUDA: 0.2.0+cu130, or 0.2.0+cpu.

    python release/build_wheels.py --list
    python release/build_wheels.py --python 3.12 --kind cpu --torch-from .venv/lib/python3.12/site-packages
"""

from __future__ import annotations

import argparse
import importlib.util
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
sys.path += [str(ROOT / "release"), str(ROOT / "tests")]

from check_symbols import problems  # noqa: E402
from tools import find_tool  # noqa: E402

KINDS = ("cpu", "cuda")
DIST_INFO = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
Files = dict[str, bytes]


class WheelError(Exception):
    """A wheel that must not be given to anybody, or cannot be built."""


class Python(NamedTuple):
    version: str  # "3.12"
    path: Path


# ---- what to build for ------------------------------------------------------------------------------------


def supported_versions() -> list[str]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
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


def find_nvcc() -> str | None:
    return os.environ.get("CUDACXX") or find_tool("nvcc")


def label_of(cuda_version: str | None) -> str:
    """What the version of a wheel ends with: "cu130", or "cpu"."""
    return f"cu{cuda_version}".replace(".", "") if cuda_version else "cpu"


def label_of_kind(kind: str) -> str:
    if kind == "cpu":
        return label_of(None)
    if (nvcc := find_nvcc()) is None:
        raise WheelError("there is no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda")
    return label_of(re.search(r"release (\d+\.\d+)", run(nvcc, "--version"))[1])


def folder_of_torch() -> list[Path]:
    """Where the torch of this Python is, if it has one."""
    spec = importlib.util.find_spec("torch")
    return [Path(spec.origin).parents[1]] if spec and spec.origin else []


def is_for(folder: Path, python: Python) -> bool:
    """Whether the torch in these site-packages is for this Python."""
    return any(folder.glob(f"torch/_C.cpython-{python.version.replace('.', '')}-*.so"))


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


def environment(python: Path, home: Path, *packages: str) -> Path:
    """The Python of a new environment with these packages."""
    run(python, "-m", "venv", home)
    executable = home / "bin" / "python"
    if packages:
        run(executable, "-m", "pip", "install", "-q", *packages)
    return executable


def build(source: Path, python: Path, kind: str, folder: Path) -> Path:
    """Builds the wheel of a clone as pip does, with flags that keep paths and symbols out, and the time of
    the commit for all of its files."""
    (source / "setup.cfg").write_text(f"[egg_info]\ntag_build = +{label_of_kind(kind)}\n", encoding="utf-8")
    scratch = folder / "scratch"  # here pip makes the environment of the build, whose headers have paths too
    scratch.mkdir(parents=True)
    maps = [f"-ffile-prefix-map={path}=." for path in (folder, source)]
    added = {
        "CXXFLAGS": " ".join(maps),
        "CUDAFLAGS": " ".join(f"-Xcompiler={flag}" for flag in maps),
        "LDFLAGS": "-s",
    }
    variables = os.environ | {name: f"{os.environ.get(name, '')} {flags}" for name, flags in added.items()}
    variables |= {
        "CMAKE_BUILD_TYPE": "Release",
        "PIPECOMM_CUDA": "ON" if kind == "cuda" else "OFF",
        "PIPECOMM_FAULTS": "OFF",
        "PIPECOMM_LINEINFO": "OFF",
        "SOURCE_DATE_EPOCH": run("git", "-C", source, "log", "-1", "--format=%ct").strip(),
        "TMPDIR": str(scratch),
    }
    if kind == "cuda":
        variables["CUDACXX"] = find_nvcc()
    run(python, "-m", "pip", "wheel", "--no-deps", "-q", "-w", folder, source, env=variables)
    (wheel,) = folder.glob("*.whl")
    return wheel


# ---- checks -----------------------------------------------------------------------------------------------


def read(wheel: Path) -> Files:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def wanted_files(source: Path, dist_info: str, module: str) -> set[str]:
    """What is committed of the package, what the build adds, and the metadata."""
    package = source / "python" / "pipecomm_ext"
    sources = {f"pipecomm_ext/{name}" for name in run("git", "-C", package, "ls-files").splitlines()}
    return sources | {module} | {f"{dist_info}/{name}" for name in DIST_INFO}


def check_files(files: Files, wanted: set[str]) -> None:
    if files.keys() != wanted:
        missing, unwanted = sorted(wanted - files.keys()), sorted(files.keys() - wanted)
        raise WheelError(f"the wheel lacks {missing} and should not have {unwanted}")


def check_paths(files: Files, of_this_machine: list[Path]) -> None:
    """No file holds a path of a home or of the folders that the build used."""
    places = [*sorted({bytes(path) for path in of_this_machine}), b"pip-build-env"]
    pattern = re.compile(b"|".join([*map(re.escape, places), rb"/home/\w", rb"/root/\w"]))
    for name, content in files.items():
        if match := pattern.search(content):
            around = content[max(0, match.start() - 40) : match.end() + 60]
            raise WheelError(f"{name} holds a path of this machine: {around!r}")


def check_module(path: Path) -> None:
    if re.search(r" \.(?:symtab|debug_\w+) ", run("readelf", "--wide", "--section-headers", path)):
        raise WheelError("the module is not stripped")
    if found := problems(path):
        raise WheelError(f"the module does not serve every torch: {'; '.join(found)}")


def check_installed(wheel: Path, python: Path, torches: list[Path], folder: Path) -> list[str]:
    """Installs the wheel into an environment that has nothing else, and imports it with each torch. Returns
    their versions."""
    _, version, *_ = wheel.name.split("-")
    run(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel)
    purelib = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    program = (
        "import importlib.metadata, torch, pipecomm_ext; "
        "from pipecomm_ext.core.extension import build_info as built; "
        "print(pipecomm_ext.__file__, importlib.metadata.version('pipecomm_ext'), "
        "torch.__version__, built.cuda_version if built.with_cuda else '')"
    )
    versions = []
    for place in torches:
        Path(purelib, "torch_of_the_check.pth").write_text(f"{place}\n", encoding="utf-8")
        printed = run(python, "-I", "-c", program, cwd=folder).splitlines()[-1]
        file, told, torch, *cuda = printed.split()
        if not file.startswith(purelib) or told != version or not version.endswith(label_of("".join(cuda))):
            raise WheelError(f"instead of {wheel.name}, this was imported: {printed}")
        run(python, "-I", "-m", "pipecomm_ext", "info", cwd=folder)
        versions.append(torch)
    return versions


def needed_glibc(files: Files) -> str:
    (module,) = (content for name, content in files.items() if name.endswith(".so"))
    versions = {tuple(map(int, text.split(b"."))) for text in re.findall(rb"GLIBC_(\d+\.\d+)", module)}
    return ".".join(map(str, max(versions)))


# ---- all of it --------------------------------------------------------------------------------------------


def one_wheel(source: Path, python: Python, kind: str, torches: list[Path], tools: Path, out: Path) -> str:
    """Puts the wheel into `out` if it passes all checks. Returns what is told about it."""
    with tempfile.TemporaryDirectory(dir=source.parent) as name:
        folder = Path(name)
        executable = environment(python.path, folder / "environment")
        wheel = build(source, executable, kind, folder)
        files = read(wheel)
        (module,) = (name for name in files if name.endswith(".so"))
        (metadata,) = (name for name in files if name.endswith(".dist-info/METADATA"))
        check_files(files, wanted_files(source, metadata.split("/")[0], module))
        check_paths(files, [source.parent, ROOT])
        (folder / "module.so").write_bytes(files[module])
        check_module(folder / "module.so")
        run(tools, "-m", "twine", "check", "--strict", wheel)
        versions = check_installed(wheel, executable, [p for p in torches if is_for(p, python)], folder)
        out.mkdir(parents=True, exist_ok=True)
        copy = Path(shutil.copy(wheel, out))
    facts = [
        f"{copy.stat().st_size / 2**20:.1f} MiB",
        f"needs glibc {needed_glibc(files)}",
        f"imported with torch {', '.join(versions)}" if versions else "not imported: no torch here is for it",
    ]
    return f"{copy.name}: {', '.join(facts)}"


def one_sdist(source: Path, tools: Path, out: Path) -> str:
    """Puts the source distribution into `out` if `twine` finds nothing wrong. Returns its name and size."""
    with tempfile.TemporaryDirectory(dir=source.parent) as name:
        run(tools, "-m", "build", "--sdist", "--outdir", name, source)
        (archive,) = Path(name).glob("*.tar.gz")
        run(tools, "-m", "twine", "check", "--strict", archive)
        out.mkdir(parents=True, exist_ok=True)
        copy = Path(shutil.copy(archive, out))
    return f"{copy.name}: {copy.stat().st_size / 2**20:.1f} MiB"


def main() -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--python", nargs="+", help="versions or paths; default: all that are installed")
    parser.add_argument("--kind", nargs="+", choices=KINDS, help="default: cpu, and cuda if there is an nvcc")
    parser.add_argument(
        "--torch-from",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="site-packages whose torch imports the wheels; default: those of this Python",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the wheels go")
    parser.add_argument("--list", action="store_true", help="only say what would be built")
    arguments = parser.parse_args()
    torches = [path.resolve() for path in arguments.torch_from or folder_of_torch()]
    for path in torches:
        if not (path / "torch").is_dir():
            parser.error(f"{path} has no torch")
    try:
        pythons = list(map(chosen_python, arguments.python)) if arguments.python else installed_pythons()
        kinds = arguments.kind or (KINDS if find_nvcc() else ("cpu",))
        labels = {kind: label_of_kind(kind) for kind in kinds}
    except WheelError as error:
        parser.error(str(error))
    wanted = [(python, kind) for kind in kinds for python in pythons]
    if arguments.list:
        for python, kind in wanted:
            print(f"Python {python.version} ({python.path}), +{labels[kind]}")
        return 0
    if run("git", "-C", ROOT, "status", "--porcelain"):
        print("What is not committed is not in the wheels.")
    failed = []
    os.umask(0o022)  # the modes of the files in a wheel are those of the clone
    with tempfile.TemporaryDirectory(prefix="pipecomm_wheels_") as name:
        source = Path(name).resolve() / "pipecomm_ext"
        run("git", "clone", "-q", ROOT, source)
        tools = environment(pythons[0].path, source.parent / "tools", "twine", "build")
        print("== source", flush=True)
        try:  # before a wheel, whose version has a label
            told = one_sdist(source, tools, arguments.out.resolve())
        except WheelError as error:
            failed.append("source")
            told = str(error)
        print(f"   {told}", flush=True)
        for python, kind in wanted:
            print(f"== Python {python.version}, +{labels[kind]}", flush=True)
            started_at = time.monotonic()
            try:
                told = one_wheel(source, python, kind, torches, tools, arguments.out.resolve())
            except WheelError as error:
                failed.append(f"Python {python.version}, +{labels[kind]}")
                told = str(error)
            print(f"   {told} ({time.monotonic() - started_at:.0f} s)", flush=True)
    num_built = len(wanted) - len(failed) + ("source" in failed)
    print(f"{num_built} of {len(wanted)} wheels are in {arguments.out}", *failed, sep="\nfailed: ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
