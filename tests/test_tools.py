"""tools.py finds the programs that other files start, and no file looks for a program itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import tools
from scripts import REPOSITORY

FOLDERS = ("bench", "examples", "python", "release", "tests")


def make_program(folder: Path, name: str) -> str:
    folder.mkdir()
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)
    return str(folder / name)


def test_the_environment_comes_first_and_the_system_folders_need_no_path(tmp_path, monkeypatch):
    environment, system = (make_program(tmp_path / name, "made_up_tool") for name in ("bin", "sbin"))
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(tools, "SYSTEM_FOLDERS", [str(tmp_path / "sbin")])
    assert tools.find_tool("made_up_tool") == system
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin" / "python"))
    assert tools.find_tool("made_up_tool") == environment


def test_a_tool_that_is_missing_is_named(monkeypatch):
    assert (
        tools.missing("sh") is None and tools.missing("sh", "no_such_tool") == "no_such_tool is not installed"
    )
    monkeypatch.setattr(tools, "folders", lambda: ["/nonexistent"])
    with pytest.raises(pytest.skip.Exception, match=r"^tc is not installed \(package iproute2\)$"):
        tools.needs("tc")


def bare_names(source: str) -> list[str]:
    """Calls that let PATH decide which program is started; all machines have `sh`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if ast.unparse(node.func) in ("shutil.which", "os.system", "os.popen"):
            found.append(ast.unparse(node))
        if ast.unparse(node.func).startswith("subprocess.") and node.args:
            command = node.args[0].elts if isinstance(node.args[0], ast.List) else [node.args[0]]
            if isinstance(command[0], ast.Constant) and command[0].value != "sh":
                found.append(ast.unparse(node))
    return found


def test_programs_are_found_by_tools_alone():
    files = [path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.py")]
    assert len(files) > 200
    found = {
        str(path.relative_to(REPOSITORY)): bare_names(path.read_text(encoding="utf-8")) for path in files
    }
    assert {name: calls for name, calls in found.items() if calls} == {
        "tests/tools.py": ["shutil.which(name, path=os.pathsep.join(folders()))"]
    }


@pytest.mark.parametrize("call", ["subprocess.run(['tc', 'x'])", "subprocess.Popen('ip')", "shutil.which(n)"])
def test_a_bare_name_is_seen(call):
    assert len(bare_names(call)) == 1 and bare_names("subprocess.run([find_tool('tc')])") == []
