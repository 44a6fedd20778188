"""The order of the rooms of csrc/ and python/pipecomm_ext/, and a checker of every include and import."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Bottom first. A file may use its own room and those of earlier rows, but not other rooms of its own row.
CSRC = (
    ("plan",),
    ("copy",),
    ("message",),
    ("transport",),
    ("routes",),
    ("engine",),
    ("bindings",),
)
PYTHON = (
    ("errors",),
    ("schedules",),
    ("core",),
    ("transports",),
    ("communicator",),
    ("distributed", "parallel_state", "backend"),
    ("sequence_parallel",),
    ("relay",),
    ("runtime",),
    ("dualpipe", "mindspeed"),
    ("pipeline_parallel",),
    ("diagnostics", "integrations"),
    ("__main__", "__init__"),
)
# Rooms that import nothing else of the package, although the rows below would allow it.
ALONE = frozenset({"errors", "schedules"})
# `schedules` imports the names of the executors on access, where type checkers see them.
HANDED_OUT = frozenset({("schedules", "runtime"), ("schedules", "dualpipe")})
# Transports do not use each other, only the modules that they share: in C++ they are folders of the room, in
# Python modules of it.
SHARED_BY_TRANSPORTS = frozenset({"transports", "transports.routes", "transports.transport"})
# Made by the build and loaded by core/extension.py, from which all others import it.
BUILT = frozenset({"_C"})

PACKAGE = "pipecomm_ext"


@dataclass(frozen=True)
class Finding:
    """A line that breaks a rule; `subject` is the name in it."""

    path: str
    line: int
    subject: str
    rule: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.subject}: {self.rule}"


def findings_in(root: Path) -> list[Finding]:
    """All findings in `root`/csrc and `root`/python/pipecomm_ext."""
    return list(dict.fromkeys([*_csrc_findings(root), *_python_findings(root)]))


def _row_of(rows: tuple[tuple[str, ...], ...]) -> dict[str, int]:
    return {room: idx for idx, row in enumerate(rows) for room in row}


def _circles(graph: Mapping[str, set[str]]) -> dict[str, frozenset[str]]:
    """For each node that reaches itself, the nodes that it is in a circle with."""

    def reached_from(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = list(graph.get(start, ()))
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting += graph.get(node, ())
        return seen

    reach = {node: reached_from(node) for node in graph}
    return {
        node: frozenset(other for other in reached if node in reach.get(other, ()))
        for node, reached in reach.items()
        if node in reached
    }


# ---- csrc -------------------------------------------------------------------------------------------------

_INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]+)"')


def _csrc_findings(root: Path) -> Iterator[Finding]:
    """A folder may include its own files and those of the folders around it: `transport/shm` those of
    `transport`, but neither `transport` nor `transport/tcp` those of `transport/shm`.
    """
    source, row_of = root / "csrc", _row_of(CSRC)
    files = sorted(path for path in source.rglob("*") if path.suffix in (".h", ".cuh", ".cpp", ".cu"))
    includes = []
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if found := _INCLUDE.match(line):
                includes.append((path.relative_to(source), number, Path(found[1])))
    graph: dict[str, set[str]] = {}
    for path, _, target in includes:
        graph.setdefault(str(path), set()).add(str(target))
    circles = _circles(graph)
    for path, number, target in includes:
        where = (f"csrc/{path}", number, str(target))
        room, target_room = path.parts[0], target.parts[0]
        if not (source / target).is_file():
            yield Finding(*where, "is not a path below csrc")
        elif room not in row_of or target_room not in row_of:
            yield Finding(*where, "is in a folder that has no place in the order of layers")
        elif room != target_room and row_of[room] <= row_of[target_room]:
            yield Finding(*where, f"{room} does not know {target_room}")
        elif room == target_room and not path.is_relative_to(target.parent):
            yield Finding(*where, f"{path.parent} does not know {target.parent}")
        elif str(target) in circles.get(str(path), ()):
            yield Finding(*where, "the two include each other, directly or through others")


# ---- python -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Import:
    line: int
    target: str  # module, relative to the package, "" for the package itself
    name: str | None  # taken from it; None: the module


@dataclass
class _Module:
    path: str
    name: str  # relative to the package
    imports: list[_Import]
    tree: ast.Module
    privates: set[str] = field(default_factory=set)  # private names that are defined here, at any depth

    @property
    def room(self) -> str:
        return self.name.split(".")[0] or "__init__"


def _python_findings(root: Path) -> Iterator[Finding]:
    modules = _read_package(root / "python" / PACKAGE)
    row_of = _row_of(PYTHON)
    graph: dict[str, set[str]] = {
        module.name: {
            imported.target for imported in module.imports if not _is_handed_out(module, imported.target)
        }
        for module in modules.values()
    }
    circles = _circles(graph)
    for module in modules.values():
        if module.room not in row_of:
            yield Finding(module.path, 1, module.room, "has no place in the order of layers")
            continue
        for imported in module.imports:
            where = (module.path, imported.line, imported.target or imported.name or PACKAGE)
            room = imported.target.split(".")[0]
            if imported.target in BUILT or (imported.target == "" and imported.name in BUILT):
                if module.name not in ("core.extension", "core.build_check"):
                    yield Finding(*where, "comes from core.extension")
            elif imported.target == "":
                if module.room not in ("__main__", "__init__"):
                    yield Finding(*where, "the package's __init__ is half made when its modules are loaded")
            elif room == module.room:
                pair = {module.name, imported.target}
                if room == "transports" and len(pair) == 2 and not pair & SHARED_BY_TRANSPORTS:
                    yield Finding(*where, "transports do not know each other")
            elif _is_handed_out(module, imported.target):
                continue
            elif module.room in ALONE:
                yield Finding(*where, f"{module.room} imports nothing of the package")
            elif room not in row_of or row_of[module.room] <= row_of[room]:
                yield Finding(*where, f"{module.room} does not know {room}")
            if imported.target in circles.get(module.name, ()) and imported.target in graph[module.name]:
                yield Finding(*where, "the two import each other, directly or through others")
            if imported.name is not None and _is_private(imported.name) and imported.name not in BUILT:
                yield Finding(module.path, imported.line, imported.name, f"is private to {imported.target}")
        yield from _private_uses(module, modules)


def _is_handed_out(module: _Module, target: str) -> bool:
    return (module.name, target.split(".")[0]) in HANDED_OUT


def _read_package(package: Path) -> dict[str, _Module]:
    paths = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name not in BUILT:
            paths[name] = path
    modules = {}
    for name, path in paths.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        around = name.split(".") if path.name == "__init__.py" and name else name.split(".")[:-1]
        imports = list(_imports_in(tree, around, paths.keys()))
        shown = f"python/{PACKAGE}/{path.relative_to(package)}"
        modules[name] = _Module(shown, name, imports, tree, _privates_in(tree))
    return modules


def _imports_in(tree: ast.Module, around: list[str], known) -> Iterator[_Import]:
    """Imports of this package, at any depth; `from .a import b` of a module b is an import of a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first, _, rest = alias.name.partition(".")
                if first == PACKAGE:
                    yield _Import(node.lineno, rest, None)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = around[: len(around) - node.level + 1]
            elif (node.module or "").split(".")[0] == PACKAGE:
                base = []
            else:
                continue
            parts = (node.module or "").split(".")
            target = ".".join([*base, *filter(None, parts if node.level else parts[1:])])
            for alias in node.names:
                submodule = f"{target}.{alias.name}".lstrip(".")
                if submodule in known or submodule in BUILT:
                    yield _Import(node.lineno, submodule, None)
                else:
                    yield _Import(node.lineno, target, alias.name)


# ---- private names ----------------------------------------------------------------------------------------


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name != "_"


def _privates_in(tree: ast.AST) -> set[str]:
    """Private names that a module or class defines: functions, classes, variables, fields, attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                names.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "__setattr__":
            names |= {part.value for part in node.args if isinstance(getattr(part, "value", None), str)}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "update":
            names |= {keyword.arg for keyword in node.keywords if keyword.arg}
    return {name for name in names if _is_private(name)}


def _private_uses(module: _Module, modules: Mapping[str, _Module]) -> Iterator[Finding]:
    """Uses of private attributes that some other module defines and this one does not, and private members of
    classes of other modules that a class here replaces.

    Attributes of objects from outside the package (`torch`, `sys`) are not checked.
    """
    owners: dict[str, list[str]] = {}
    for other in modules.values():
        for name in other.privates:
            owners.setdefault(name, []).append(other.name)
    foreign = _foreign_names(module.tree)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in owners and node.attr not in module.privates:
            if _first_name(node) not in foreign:
                yield Finding(
                    module.path, node.lineno, node.attr, f"is private to {' or '.join(owners[node.attr])}"
                )
        elif isinstance(node, ast.ClassDef):
            own = _privates_in(node)
            for base in node.bases:
                owner = next(
                    (
                        modules[found.target]
                        for found in module.imports
                        if found.name == getattr(base, "id", None) and found.target in modules
                    ),
                    None,
                )
                for base_class in ast.walk(owner.tree) if owner else ():
                    if isinstance(base_class, ast.ClassDef) and base_class.name == base.id:
                        for name in sorted(own & _privates_in(base_class)):
                            yield Finding(module.path, node.lineno, name, f"is private to {owner.name}")


def _foreign_names(tree: ast.Module) -> set[str]:
    """Names that imports from outside the package bind."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level):
            if isinstance(node, ast.Import) or (node.module or "").split(".")[0] != PACKAGE:
                names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return names


def _first_name(node: ast.expr) -> str | None:
    """`a` in `a.b(c)._d`."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        else:
            return None
    return node.id
