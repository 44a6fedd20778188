"""The code of docs/migrating.md, which these tests run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating.md"


def code_under(heading: str) -> dict[str, Any]:
    """The names that the first Python block of this section defines."""
    section = _PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    names: dict[str, Any] = {}
    exec(re.search(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[1], names)
    return names
