"""The clients' versions."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

_REQUIREMENTS = Path(__file__).with_name("requirements.txt").read_text()
VERSIONS = dict(re.findall(r"^([\w-]+)==(\S+)$", _REQUIREMENTS, re.MULTILINE))


def installed(client: str) -> str:
    """The version that is installed; "" without one."""
    try:
        return importlib.metadata.version(client)
    except importlib.metadata.PackageNotFoundError:
        return ""


def needs(client: str) -> None:
    """Skips the test module that calls it unless this version of the client is installed."""
    wanted, found = VERSIONS[client], installed(client) or "not installed"
    if found != wanted:
        pytest.skip(f"{client} {wanted} is needed (it is {found}): `make clients`", allow_module_level=True)
