"""Builds binary wheels for several Pythons and versions of torch, and checks them: `make wheels`.

Each pair has an environment of its own, which is kept for the next run. What is committed is built, in a
clone, so that neither changes nor build products of this folder get into a wheel. A wheel differs from what
`pip install .` installs in this:

* Its module is stripped, and holds no path of the machine that built it.
* It requires the minor version of torch that it was built for (`torch==2.11.*`), since torch's C++ ABI
  changes with each.
* Its version names torch and CUDA: 0.1.0+torch2.11.cu130, or 0.1.0+torch2.11.cpu.

    python release/build_wheels.py --list
    python release/build_wheels.py --python 3.12 --torch 2.14.1 --cuda OFF
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from tools import find_tool  # noqa: E402

TORCHES = ("2.11.0", "2.14.1")
