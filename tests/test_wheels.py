"""The scripts of release/ on artificial projects, wheels and modules."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tools import needs

from pipecomm_ext import _C

ROOT = Path(__file__).resolve().parents[1]


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "release" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


wheels, symbols = script("build_wheels"), script("check_symbols")

# Without build isolation, so that nothing is fetched.
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "setuptools.build_meta"\n'
PROJECT += '[project]\nname = "toy"\nversion = "0.1.0"\n[tool.setuptools]\npackages = ["toy"]\n'


def git(folder: Path, *arguments: str) -> None:
    names = {
        f"GIT_{who}_{what}": "toy@example.com"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    [program] = needs("git")
    subprocess.run([program, *arguments], cwd=folder, env=os.environ | names, check=True, capture_output=True)


def toy(folder: Path) -> Path:
    (folder / "toy").mkdir(parents=True)
    (folder / "toy" / "__init__.py").touch()
    (folder / "pyproject.toml").write_text(PROJECT)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "toy")
    return folder


def test_a_wheel_says_its_kind_and_has_the_time_of_the_commit(tmp_path: Path, monkeypatch) -> None:
    needs("git")
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # pip's value for: no isolation
    source = toy(tmp_path / "source")
    built = []
    for name in ("one", "two"):
        os.utime(source / "toy" / "__init__.py", (1e9 + len(built) * 1e6,) * 2)
        built.append(wheels.build(source, Path(sys.executable), "cpu", tmp_path / name))
    assert built[0].name == "toy-0.1.0+cpu-py3-none-any.whl"
    assert b"\nVersion: 0.1.0+cpu\n" in wheels.read(built[0])["toy-0.1.0+cpu.dist-info/METADATA"]
    assert built[0].read_bytes() == built[1].read_bytes()
    with zipfile.ZipFile(built[0]) as archive:
        assert len({entry.date_time for entry in archive.infolist()}) == 1


def test_the_label_of_a_kind(tmp_path: Path, monkeypatch) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.41'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(nvcc))
    assert [wheels.label_of_kind(kind) for kind in wheels.KINDS] == ["cpu", "cu129"]


def test_missing_and_unwanted_files_are_named() -> None:
    with pytest.raises(wheels.WheelError, match=r"lacks \['b'\] and should not have \['c'\]"):
        wheels.check_files({"a": b"", "c": b""}, {"a", "b"})


@pytest.mark.parametrize(
    "text", ["/home/somebody/torch", "built in /opt/place/csrc", "/root/x", "./pip-build-env-x"]
)
def test_paths_of_the_machine_are_found(text: str) -> None:
    wheels.check_paths({"a.py": b"/usr/local/cuda, /proc/self, ./torch/include"}, [Path("/opt/place")])
    with pytest.raises(wheels.WheelError, match="b.so holds a path of this machine"):
        wheels.check_paths({"b.so": b"\0" + text.encode()}, [Path("/opt/place")])


def test_a_module_with_symbols_is_refused(tmp_path: Path) -> None:
    _, _, strip = needs("nm", "readelf", "strip")
    module, stripped = Path(_C.__file__), tmp_path / "stripped.so"
    with pytest.raises(wheels.WheelError, match="not stripped"):
        wheels.check_module(module)
    subprocess.run([strip, "-o", stripped, module], check=True, timeout=60)
    wheels.check_module(stripped)
    assert wheels.needed_glibc({"_C.so": module.read_bytes()}).startswith("2.")


# ---- independence of torch --------------------------------------------------------------------------------

# Mangled symbols, and how they are reported.
FOREIGN = {
    "_ZN2at5emptyEv": "at::empty()",
    "_ZN3c105ErrorD1Ev": "c10::Error::~Error()",
    "_Z3useRKN5torch2nn6ModuleE": "use(torch::nn::Module const&)",  # in the type of an argument
    "_ZTIN4c10d5StoreE": "typeinfo for c10d::Store",
    "aoti_torch_create_cuda_stream_guard": "aoti_torch_create_cuda_stream_guard",
    "THPVariableClass": "THPVariableClass",
    "cudaMalloc": "cudaMalloc",
    "cuInit": "cuInit",
    "ncclSend": "ncclSend",
}
# The last two are of C++: std::vector<int>::at(unsigned long), format::at().
OURS = ["PyErr_Clear", "malloc", "dlsym", "_ZNSt6vectorIiSaIiEE2atEm", "_ZN6format2atEv"]


def module_with(folder: Path, names: list[str], *options: str | Path) -> Path:
    """A module that refers to these undefined symbols."""
    (compiler,) = needs("c++")
    source, module = folder / "module.c", folder / "module.so"
    declarations = "".join(f"extern char {name}[];\n" for name in names)
    source.write_text(f"{declarations}char* used[] = {{{', '.join(names)}}};\n")
    command = [compiler, "-x", "c", "-shared", "-fPIC", source, "-x", "none", "-o", module, *options]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return module


def test_the_module_refers_to_nothing_of_torch() -> None:
    needs("nm", "readelf")
    assert symbols.problems(Path(_C.__file__)) == []


def test_symbols_of_torch_are_found(tmp_path: Path) -> None:
    needs("nm", "readelf")
    assert symbols.problems(module_with(tmp_path, OURS)) == []
    found = symbols.problems(module_with(tmp_path, [*OURS, *FOREIGN]))
    assert sorted(found) == sorted(f"it refers to the symbol {name}" for name in FOREIGN.values())


@pytest.mark.parametrize("library", ["libtorch_python.so", "libc10.so", "libcudart.so.13", "libnccl.so.2"])
def test_libraries_of_torch_cuda_and_nccl_are_found(tmp_path: Path, library: str) -> None:
    needs("nm", "readelf")
    (tmp_path / "library").mkdir()
    given = module_with(tmp_path / "library", OURS, f"-Wl,-soname,{library}")
    module = module_with(tmp_path, OURS, "-Wl,--no-as-needed", given)
    assert symbols.problems(module) == [f"it needs the library {library}"]


def test_the_command_reads_modules_and_wheels(tmp_path: Path) -> None:
    needs("nm", "readelf")
    module, wheel = module_with(tmp_path, [*OURS, "ncclSend"]), tmp_path / "toy.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(module, "toy/_C.so")
    command = [sys.executable, str(ROOT / "release" / "check_symbols.py"), _C.__file__]
    assert subprocess.run(command, timeout=60).returncode == 0
    result = subprocess.run([*command, str(module), str(wheel)], capture_output=True, text=True, timeout=60)
    told = [f"{path}: it refers to the symbol ncclSend" for path in (module, wheel)]
    assert (result.returncode, result.stdout.splitlines()) == (1, told), result.stderr


# ---- the command ------------------------------------------------------------------------------------------


def test_the_list_of_what_would_be_built(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "release" / "build_wheels.py"), "--list", "--kind", "cpu"]
    command += ["--python", sys.executable]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    told = [f"Python 3.{sys.version_info[1]} ({sys.executable}), +cpu"]
    assert (result.returncode, result.stdout.splitlines()) == (0, told), result.stderr
    result = subprocess.run([*command, "--torch-from", tmp_path], capture_output=True, text=True, timeout=100)
    assert result.returncode == 2 and f"{tmp_path} has no torch" in result.stderr


def test_a_wheel_has_entry_points_if_the_project_has() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert ("entry_points.txt" in wheels.DIST_INFO) == ("[project.entry-points" in project)
