"""release/build_wheels.py on wheels that are made up: what it changes, and what it refuses."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from tools import needs

from pipecomm_ext import _C

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("build_wheels", ROOT / "release" / "build_wheels.py")
wheels = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(wheels)

NAME = "pipecomm_ext-0.1.0-cp312-cp312-linux_x86_64.whl"
METADATA = "Metadata-Version: 2.4\nName: pipecomm_ext\nVersion: 0.1.0\nRequires-Dist: torch==2.11.*\n"
METADATA += 'Provides-Extra: draw\nRequires-Dist: matplotlib; extra == "draw"\n\nVersion: 7 of the text\n'


def files_of(build_info: str) -> dict[str, bytes]:
    texts = {
        "pipecomm_ext/_build_info.py": build_info,
        "pipecomm_ext-0.1.0.dist-info/METADATA": METADATA,
        "pipecomm_ext-0.1.0.dist-info/RECORD": "",
    }
    return {name: text.encode() for name, text in texts.items()}


@pytest.mark.parametrize(
    ("build_info", "local"),
    [
        (
            'torch_version = "2.11.0+cu130"\nwith_cuda = True\ncuda_version = "13.0"\n',
            "torch2.11.cu130",
        ),
        ('torch_version = "2.11.1+cu130"\nwith_cuda = False\ncuda_version = None\n', "torch2.11.cpu"),
    ],
)
def test_a_wheel_says_what_it_is_for(tmp_path: Path, build_info: str, local: str) -> None:
    files, name = wheels.pinned(files_of(build_info), NAME)
    assert name == f"pipecomm_ext-0.1.0+{local}-cp312-cp312-linux_x86_64.whl"
    wheel = wheels.write(files, tmp_path, name)
    read = wheels.read(wheel)
    dist_info = f"pipecomm_ext-0.1.0+{local}.dist-info"
    changed = METADATA.replace("Version: 0.1.0", f"Version: 0.1.0+{local}", 1)
    assert read[f"{dist_info}/METADATA"].decode() == changed
    rows = list(csv.reader(read[f"{dist_info}/RECORD"].decode().splitlines()))
    assert {row[0] for row in rows} == set(read) and rows[-1] == [f"{dist_info}/RECORD", "", ""]
    for path, digest, size in rows[:-1]:
        expected = base64.urlsafe_b64encode(hashlib.sha256(read[path]).digest()).decode().rstrip("=")
        assert (digest, int(size)) == (f"sha256={expected}", len(read[path]))


@pytest.mark.parametrize("requirement", ["torch>=2.11", "torch==2.13.*", "torchvision==2.11.*"])
def test_a_wheel_without_the_requirement_is_refused(requirement: str) -> None:
    files = files_of('torch_version = "2.11.0"\nwith_cuda = False\n')
    metadata = METADATA.replace("torch==2.11.*", requirement)
    files["pipecomm_ext-0.1.0.dist-info/METADATA"] = metadata.encode()
    with pytest.raises(wheels.WheelError, match=r"do not require torch==2.11.\*"):
        wheels.pinned(files, NAME)


def test_missing_and_unwanted_files_are_named() -> None:
    with pytest.raises(wheels.WheelError, match=r"lacks \['b'\] and should not have \['c'\]"):
        wheels.check_files({"a": b"", "c": b""}, {"a", "b"})


@pytest.mark.parametrize("text", ["/home/somebody/torch", "built in /opt/place/csrc", "/root/x"])
def test_paths_of_the_machine_are_found(text: str) -> None:
    wheels.check_paths({"a.py": b"/usr/local/cuda, /proc/self, ./torch/include"}, [Path("/opt/place")])
    with pytest.raises(wheels.WheelError, match="b.so holds a path of this machine"):
        wheels.check_paths({"b.so": b"\0" + text.encode()}, [Path("/opt/place")])


def test_a_module_with_symbols_is_refused(tmp_path: Path) -> None:
    _, strip = needs("readelf", "strip")
    module, stripped = Path(_C.__file__), tmp_path / "stripped.so"
    with pytest.raises(wheels.WheelError, match="not stripped"):
        wheels.check_stripped(module.read_bytes(), tmp_path)
    subprocess.run([strip, "-o", stripped, module], check=True, timeout=60)
    wheels.check_stripped(stripped.read_bytes(), tmp_path)
    assert wheels.needed_glibc({"_C.so": module.read_bytes()}).startswith("2.")


def test_the_list_of_what_would_be_built() -> None:
    command = [
        sys.executable,
        str(ROOT / "release" / "build_wheels.py"),
        "--list",
        "--python",
        sys.executable,
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    lines = result.stdout.splitlines()
    assert result.returncode == 0 and len(lines) == len(wheels.TORCHES), result.stderr
    assert f"Python 3.{sys.version_info[1]} ({sys.executable})" in lines[0]
