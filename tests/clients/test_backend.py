"""Frameworks compute the same bits with the backend "pipecomm" as with gloo, with nothing else changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from backend_client import CLIENTS
from pinned import needs
from side_by_side import assert_same_bits

needs("torch")


@pytest.mark.parametrize("client", CLIENTS)
def test_same_bits_as_with_gloo(tmp_path, client):
    script = Path(__file__).with_name("backend_client.py")
    for backend in ("gloo", "pipecomm"):
        (tmp_path / backend).mkdir()
        command = [sys.executable, "-W", "ignore", str(script), client, backend, str(tmp_path / backend)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{backend}: {done.stderr[-3000:]}"
    for rank in range(CLIENTS[client][0]):
        expected, got = (torch.load(tmp_path / backend / f"{rank}.pt") for backend in ("gloo", "pipecomm"))
        assert any(result.abs().sum() > 0 for result in expected)
        assert_same_bits(got, expected, f"results of rank {rank}")
