"""The clients' versions."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

_REQUIREMENTS = Path(__file__).with_name("requirements.txt").read_text()
VERSIONS = dict(re.findall(r"^([\w-]+)==(\S+)$", _REQUIREMENTS, re.MULTILINE))


def installed(client: str) -> str:
    """The version that is installed, without a local part (+cpu); "" without one."""
    try:
        return importlib.metadata.version(client).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def is_environment_of_clients() -> bool:
    """Whether all of them are here: some are installed for other tests as well."""
    return all(installed(client) == version for client, version in VERSIONS.items())


def needs(client: str) -> None:
    """Skips the test module that calls it outside of the environment of `make clients`."""
    if not is_environment_of_clients():
        reason = f"{client} {VERSIONS[client]} is needed, beside all other clients: `make clients`"
        pytest.skip(reason, allow_module_level=True)
