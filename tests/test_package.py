"""The package as it is built and installed: metadata, import check, stub, wheel."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from scripts import locked_build
from tools import needs

import pipecomm_ext
from pipecomm_ext import _C

PACKAGE_DIR = Path(pipecomm_ext.__file__).parent
ROOT = Path(__file__).parents[1]


# ---- metadata -------------------------------------------------------------------------------------


def test_version_is_the_same_everywhere() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", pipecomm_ext.__version__)
    assert _C.build_info["version"] == pipecomm_ext.__version__
    assert importlib.metadata.version("pipecomm_ext") == pipecomm_ext.__version__


def test_metadata_names_torch_python_and_license() -> None:
    metadata = importlib.metadata.metadata("pipecomm_ext")
    assert metadata["Requires-Python"] == ">=3.10"
    assert "torch>=2.11" in metadata.get_all("Requires-Dist")
    assert "Apache License" in (ROOT / "LICENSE").read_text()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the files that metadata are made from, so that nothing is written next to the sources."""
    (tmp_path / "python" / "pipecomm_ext").mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "python/pipecomm_ext/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "path"),
    [
        (["dist_info"], "pipecomm_ext-*.dist-info/METADATA"),
        (["sdist"], "python/pipecomm_ext.egg-info/PKG-INFO"),
    ],
)
def test_metadata_require_torch_at_run_time_and_use_nothing_deprecated(
    sources: Path, command: list[str], path: str
) -> None:
    result = subprocess.run(
        [sys.executable, "setup.py", *command], cwd=sources, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert "Deprecat" not in result.stderr and "****" not in result.stderr, result.stderr
    (written,) = sources.glob(path)
    metadata = written.read_text()
    for line in ("Requires-Dist: torch>=2.11", "License-Expression: Apache-2.0", "License-File: LICENSE"):
        assert f"\n{line}\n" in metadata


def test_a_build_takes_the_tools_that_pip_installed_for_it(sources: Path, tmp_path: Path) -> None:
    """pip puts them in a folder of their own; those beside Python (in /usr/bin) may be older."""
    packages, bin_folder = tmp_path / "overlay" / "lib", tmp_path / "overlay" / "bin"
    bin_folder.mkdir(parents=True)
    for name in ("cmake", "ninja"):
        info = packages / f"{name}-99.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 99\n")
        (info / "RECORD").write_text(f"{name}/completions/{name},,\n../bin/{name},,\n")
        tool = bin_folder / name
        tool.write_text(f'#!/bin/sh\necho "{name} 99: $@"\nexit 3\n')
        tool.chmod(0o755)
    result = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=sources,
        env={**os.environ, "PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode != 0 and "the build failed (status 3, see above)" in result.stderr, result.stderr
    assert "cmake 99: -G Ninja" in result.stdout, result.stdout
    assert f"-DCMAKE_MAKE_PROGRAM={bin_folder / 'ninja'}" in result.stdout, result.stdout


@pytest.mark.parametrize(
    ("cmake_version", "cuda_version", "reason"),
    [
        ("3.25.1", "13.0", "CMake 3.25.1 cannot compile CUDA as C++20, at least 3.25.2 is needed"),
        ("3.25.2", "11.8", "is CUDA 11.8, at least 12.0 is needed"),
    ],
)
def test_why_cuda_cannot_be_compiled(
    tmp_path: Path, cmake_version: str, cuda_version: str, reason: str
) -> None:
    nvcc, script = tmp_path / "nvcc", tmp_path / "script.cmake"
    nvcc.write_text(f"#!/bin/sh\necho release {cuda_version}\n")
    nvcc.chmod(0o755)
    lines = [f"set(CMAKE_VERSION {cmake_version})", "set(PIPECOMM_CUDA ON)"]
    script.write_text("\n".join([*lines, f'include("{ROOT}/cmake/cuda.cmake")']))
    [cmake] = needs("cmake")
    result = subprocess.run(
        [cmake, "-P", script],
        cwd=tmp_path,
        env={**os.environ, "CUDACXX": str(nvcc)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode != 0
    text = " ".join(result.stderr.split())  # CMake wraps lines
    assert f"PIPECOMM_CUDA=ON, but {reason}" in text.replace(f"{nvcc} ", "")


def test_torch_is_no_build_requirement() -> None:
    requires = re.search(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert requires is not None and "torch" not in requires[1]


# ---- import check ---------------------------------------------------------------------------------

TORCH = '__version__ = "{version}"\n'


def import_in_fake_environment(
    folder: Path,
    *,
    torch_version: str = "2.11.1+cu130",
    torch_text: str = TORCH,
    extension: str | None = 'raise SystemExit("_C was touched")\n',
    prelude: str = "",
) -> subprocess.CompletedProcess:
    """Imports a copy of the package with stand-ins of torch and `_C`."""
    package, torch_package = folder / "pipecomm_ext", folder / "torch"
    left_out = shutil.ignore_patterns("_C*", "__pycache__")
    shutil.copytree(PACKAGE_DIR, package, ignore=left_out)
    torch_package.mkdir()
    (torch_package / "__init__.py").write_text(torch_text.format(version=torch_version))
    if extension is not None:
        (package / "_C.py").write_text(extension)
    return subprocess.run(
        [sys.executable, "-c", f"{prelude}\nimport pipecomm_ext"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )


LINES = {  # the last line of an import's output
    **{
        f"torch {version}": ({"torch_version": version}, "^_C was touched$")
        for version in ("2.11.0+cu130", "2.13.0+cpu", "2.110.0", "2.15.0a0+git123", "3.0.0")
    },
    **{
        f"torch {version}, which is too old": (
            {"torch_version": version},
            rf"^ImportError: pipecomm_ext needs torch 2\.11 or later, found {re.escape(version)}\. "
            r"Run: pip install 'torch>=2\.11'$",
        )
        for version in ("2.10.1+cu128", "2.1.1", "1.13.1")
    },
    "no torch": ({"prelude": "import sys; sys.modules['torch'] = None"}, "Run: pip install torch"),
    "a broken torch": (
        {"torch_text": "import a_module_that_torch_needs\n"},
        "^ModuleNotFoundError: No module named 'a_module_that_torch_needs'$",
    ),
    "no extension": (
        {"extension": None},
        "^ImportError: the extension module of pipecomm_ext is not built for .*Run: pip install ",
    ),
    "an extension of another Python": (
        {"extension": None, "prelude": "open('pipecomm_ext/_C.cpython-399-x86_64-linux-gnu.so', 'w')"},
        "_C.cpython-399-x86_64-linux-gnu.so, which is for another Python",
    ),
    "an extension that does not load": (
        {"extension": "raise ImportError('undefined symbol: _ZN3c105ErrorC1Ev')\n"},
        "undefined symbol: _ZN3c105ErrorC1Ev.*Run: pip install --force-reinstall --no-deps",
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_an_import_says_what_is_wrong(tmp_path: Path, name: str) -> None:
    options, told = LINES[name]
    message = last_line(import_in_fake_environment(tmp_path, **options))
    assert re.search(told, message), message


def last_line(result: subprocess.CompletedProcess) -> str:
    assert result.returncode == 1, result.stderr
    return result.stderr.strip().splitlines()[-1]


# ---- binding --------------------------------------------------------------------------------------


def test_connections_serve_one_communicator() -> None:
    def made(size: int, key: bytes = bytes(32)) -> _C.Connections:
        return _C.Connections(0, size, 1, key, lambda rank: None, lambda farewell: None)

    options = {"channels": 2, "timeout": 5.0, "num_threads": 1}
    with pytest.raises(ValueError, match="there is no way to other ranks: call listen"):
        _C.Communicator(made(2), 0, 2, **options)
    with pytest.raises(ValueError, match="key must have 32 bytes, not 15"):
        made(2, bytes(15))
    connections = made(1)
    communicator = _C.Communicator(connections, 0, 1, **options)
    with pytest.raises(ValueError, match="the connections belong to a communicator"):
        _C.Communicator(connections, 0, 1, **options)
    communicator.close()


# ---- stub -----------------------------------------------------------------------------------------


def names_of(statements: list[ast.stmt]) -> set[str]:
    """Names that a stub defines at one level, without imports and names with a leading underscore."""
    names = set()
    for statement in statements:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            names.add(statement.name)
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names.add(statement.target.id)
        elif isinstance(statement, ast.Assign):
            names.update(target.id for target in statement.targets if isinstance(target, ast.Name))
    return {name for name in names if not name.startswith("_")}


def public_names(namespace: object) -> set[str]:
    names = {name for name in vars(namespace) if not name.startswith("_")}
    # pybind11's enumerations carry these besides their members
    return names - {"name", "value"} if hasattr(namespace, "__members__") else names


def test_stub_has_the_names_of_the_module() -> None:
    assert (PACKAGE_DIR / "py.typed").is_file()
    stub = ast.parse((PACKAGE_DIR / "_C.pyi").read_text())
    assert names_of(stub.body) == public_names(_C)


def test_stub_has_the_members_of_the_classes() -> None:
    stub = ast.parse((PACKAGE_DIR / "_C.pyi").read_text())
    classes = {statement.name: statement for statement in stub.body if isinstance(statement, ast.ClassDef)}
    for name, statement in classes.items():
        bases = [base.id for base in statement.bases]  # only the stub has them, for what classes share
        members = names_of(sum((classes[base].body for base in bases), statement.body))
        assert name.startswith("_") or members == public_names(getattr(_C, name)), f"members of {name}"


# ---- wheel ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1000)  # mostly waiting for the lock
def test_wheel_holds_the_package_and_imports(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-q"]
    with locked_build():
        subprocess.run([*command, "-w", tmp_path, ROOT], check=True, timeout=380, stdout=subprocess.DEVNULL)
    (wheel,) = tmp_path.glob("pipecomm_ext-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "unpacked")
    modules = [name for name in names if name.endswith(".so")]
    assert modules == [f"pipecomm_ext/{Path(_C.__file__).name}"]
    sources = {
        str(path.relative_to(PACKAGE_DIR))
        for path in PACKAGE_DIR.rglob("*.py*")
        if path.suffix in (".py", ".pyi")
    }
    packed = {name.removeprefix("pipecomm_ext/") for name in names if name.endswith((".py", ".pyi"))}
    assert packed == sources
    assert "pipecomm_ext/py.typed" in names
    assert any(name.endswith("/LICENSE") for name in names)

    program = "import pipecomm_ext; print(pipecomm_ext.__file__, pipecomm_ext.info()['torch']['version'])"
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "unpacked")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout.split() == [
        str(tmp_path / "unpacked/pipecomm_ext/__init__.py"),
        torch.__version__,
    ], result.stderr


@pytest.mark.slow
def test_it_is_configured_in_a_folder_whose_path_has_a_space(tmp_path: Path) -> None:
    import pybind11

    cmake, ninja = needs("cmake", "ninja")
    packages = tmp_path / "with a space"
    packages.mkdir()
    (packages / "pybind11").symlink_to(Path(pybind11.__file__).parent)
    folders = ["-S", str(ROOT), "-B", str(packages / "build")]
    options = [
        "-DPIPECOMM_CUDA=OFF",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DCMAKE_MAKE_PROGRAM={ninja}",
    ]
    result = subprocess.run(
        [cmake, "-G", "Ninja", *folders, *options],
        env={**os.environ, "PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_communicator_without_its_constructor_is_refused():
    raw = _C.Communicator.__new__(_C.Communicator)
    with pytest.raises(TypeError):
        raw.send(None, 0, 0)
    with pytest.raises(TypeError, match="takes 3 positional arguments, not 1"):
        raw.send(None)
