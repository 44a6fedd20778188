"""The code of docs/migrating.md, which these tests run as it is printed."""

from __future__ import annotations

from typing import Any

from documents import execute


def code_of(start: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """The names among which the block was executed that has a line that begins with `start`."""
    return execute("docs/migrating.md", start, {} if names is None else names)
