"""The blocks of code of the documents, for the tests that execute them."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    str(path.relative_to(ROOT))
    for folder in ("*.md", "docs/**/*.md", "examples/*.md")
    for path in sorted(ROOT.glob(folder))
]
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    text: str


def blocks(document: str, language: str | None = None) -> list[str]:
    """The text of all blocks, or of those of a language, in order, without indentation."""
    return [block.text for block in blocks_of(document) if language in (None, block.language)]


def blocks_of(document: str) -> list[Block]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return [Block(language, textwrap.dedent(code)) for _, language, code in _BLOCK.findall(text)]


def begins(text: str, start: str) -> bool:
    """Whether a line of the text begins with `start`."""
    return re.search(rf"^{re.escape(start)}", text, re.MULTILINE) is not None


def block(document: str, start: str) -> str:
    """The block with a line that begins with `start`."""
    [found] = [text for text in blocks(document) if begins(text, start)]
    return found


def execute(document: str, start: str, names: dict[str, Any], **changes: str) -> dict[str, Any]:
    """Executes a block of Python among `names`, with the keys of `changes` replaced by their values."""
    text = block(document, start)
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    exec(compile(text, f"{document}: {start}", "exec"), names)
    return names


def ours(document: str, start: str) -> str:
    """A block without what it shows of another framework: the lines from "# before" to "# after"."""
    text = block(document, start)
    before, marker, after = text.partition("\n# after")
    assert before.startswith("# before\n") and marker
    return after.partition("\n")[2]
