"""docs/errors.md against the code: every class and every message that is raised has its row."""

from __future__ import annotations

import ast
import functools
import re

from test_readme import ROOT, code_words, rows, source_text

PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "python" / "pipecomm_ext"
FAMILY = {"PipeCommError", "PipeCommMismatch", "PipeCommTimeout", "PipeCommPeerLost", "PipeCommAborted"}
UNKNOWN = "…"


def section(title: str) -> str:
    return re.search(rf"^## {title}.*?\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]


def text_of(node: ast.expr) -> str:
    """A string expression with UNKNOWN instead of computed parts."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return UNKNOWN


@functools.cache
def raised() -> list[tuple[str, str, str]]:
    """Class, text and place of everything that the package raises by name."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = node.exc.func
                kind = name.id if isinstance(name, ast.Name) else getattr(name, "attr", "")
                text = text_of(node.exc.args[0]) if node.exc.args else UNKNOWN
                found.append((kind, text, f"{path.name}:{node.lineno}"))
    return found


def failure_texts() -> list[str]:
    """The literals of messages of failures in C++, one list entry per message."""
    statements = []
    for folder in ("engine", "message", "transport"):
        for path in sorted((ROOT / "csrc" / folder).rglob("*.cpp")):
            statements += re.findall(r"\bmessage\s*\+?=([^;]*);", path.read_text(encoding="utf-8"))
            statements += re.findall(
                r"\.message\s*=([^;]*?)(?:,\s*\.\w|\})", path.read_text(encoding="utf-8")
            )
    texts = ["".join(re.findall(r'"((?:[^"\\]|\\.)*)"', statement)) for statement in statements]
    return [text for text in texts if len(text.split()) >= 3]


def documented() -> list[str]:
    """The pieces of the messages of all tables except that of classes."""
    pieces = []
    for title in (
        "Wrong arguments",
        "Ranks disagree",
        "A deadline has passed",
        "A rank is gone",
        "Ended on purpose",
        "Other causes",
    ):
        for message, *_ in rows(section(title))[1:]:
            pieces += [part.strip() for word in code_words(message) for part in word.split("...")]
    return [piece for piece in pieces if piece]


def test_every_class_has_a_row() -> None:
    listed = {word for first, *_ in rows(section("Classes"))[1:] for word in code_words(first)}
    kinds = {kind for kind, *_ in raised() if kind.endswith("Error") and not kind.startswith("_")}
    kinds = {kind for kind in kinds if kind[0].isupper()}
    assert kinds | FAMILY <= listed, kinds - listed


def test_every_communication_error_has_a_row() -> None:
    pieces = documented()
    messages = [text for kind, text, _ in raised() if kind in FAMILY] + failure_texts()
    assert len(messages) > 15
    missing = [
        text
        for text in messages
        if text.strip(UNKNOWN + "rank: ") and not any(piece in text for piece in pieces)
    ]
    assert missing == []


def test_every_row_is_in_the_code() -> None:
    source = source_text("python", "csrc")
    assert [piece for piece in documented() if piece not in source] == []
