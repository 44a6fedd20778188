"""The documentation site against the code: its reference has every public name.

`make docs` builds it, and checks its navigation, links and anchors; this needs only the files.
"""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest

import pipecomm_ext

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
REFERENCE = [
    name
    for page in sorted((DOCS / "api").glob("*.md"))
    for name in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
]
MODULES = [
    "distributed",
    "integrations.transformers",
    "parallel_state",
    "pipeline_parallel",
    "pipeline_parallel.schedules",
    "pipeline_parallel.utils",
    "schedules",
]


def resolved(path: str) -> object:
    """The object that a dotted path names; its modules are imported."""
    found, name = pipecomm_ext, "pipecomm_ext"
    for part in path.split(".")[1:]:
        name = f"{name}.{part}"
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(name)
    return found


def test_the_list_of_the_reference_has_every_page() -> None:
    linked = re.findall(r"\]\((\w+\.md)\)", (DOCS / "api" / "index.md").read_text(encoding="utf-8"))
    assert sorted([*linked, "index.md"]) == sorted(path.name for path in (DOCS / "api").glob("*.md"))


def test_every_public_name_is_in_the_reference() -> None:
    names = {f"pipecomm_ext.{name}" for name in pipecomm_ext.__all__}
    names -= {f"pipecomm_ext.{name}" for name in ("__version__", "parallel_state")}
    listed = {id(resolved(name)) for name in REFERENCE}
    for module in MODULES:
        if module == "integrations.transformers":
            pytest.importorskip("transformers")
        names |= {f"pipecomm_ext.{module}.{name}" for name in resolved(f"pipecomm_ext.{module}").__all__}
    assert len(names) > 130 and len(REFERENCE) == len(set(REFERENCE))
    missing = {name for name in names - set(REFERENCE) if id(resolved(name)) not in listed}
    assert missing == set()


def test_links_have_titles_as_texts(monkeypatch) -> None:
    """On pages where the repository has file names."""
    for name in ("mkdocs", "mkdocs.exceptions", "mkdocs.structure", "mkdocs.structure.files"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["mkdocs.exceptions"].PluginError = RuntimeError
    sys.modules["mkdocs.structure.files"].File = object
    hooks = runpy.run_path(str(DOCS / "site" / "hooks.py"))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    files = types.SimpleNamespace(get_file_from_path=lambda path: path if path in pages else None)
    config = types.SimpleNamespace(repo_url=None)

    def shown(uri: str, text: str) -> str:
        page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri=uri), parent=1, meta={})
        return hooks["on_page_markdown"](text, page, config, files)

    title = "Pipelines whose stages differ in size"
    assert shown("tutorial.md", "see [relay.md](relay.md#a)") == f"see [{title}](relay.md#a)"
    assert shown("api/errors.md", "[errors.md](../errors.md)") == "[Errors](../errors.md)"
    assert shown("relay.md", "[CONTRIBUTING.md](../CONTRIBUTING.md)") == "Contributing"
    assert shown("relay.md", "[the tests](../tests)") == "the tests"
    assert shown("relay.md", "[words](tutorial.md)") == "[words](tutorial.md)"


def test_the_pictures_of_the_architecture_are_of_this_code(tmp_path: Path) -> None:
    subprocess.run([sys.executable, DOCS / "draw_architecture.py", tmp_path], check=True)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert len(drawn) == 3
    for name, text in drawn.items():
        assert (DOCS / "img" / name).read_text(encoding="utf-8") == text, "run docs/draw_architecture.py"


def undocumented_members(class_: type) -> list[str]:
    """Public methods and properties that a class of this package defines without a docstring."""
    found = []
    for owner in class_.__mro__:
        if owner.__module__.startswith("pipecomm_ext") and "_C" not in owner.__module__:
            for name, member in vars(owner).items():
                function = getattr(member, "__func__", getattr(member, "fget", member))
                if not name.startswith("_") and inspect.isfunction(function) and not function.__doc__:
                    found.append(f"{owner.__name__}.{name}")
    return found


def test_all_that_the_reference_shows_has_a_docstring() -> None:
    missing = []
    for name in REFERENCE:
        if "transformers" in name:
            continue
        found = resolved(name)
        if inspect.isclass(found):
            missing += undocumented_members(found)
        if not isinstance(found, (str, dict)) and not (found.__doc__ or "").strip():
            missing.append(name)
    assert missing == []
