"""No include or import goes up or forms a cycle, and no file uses the private names of another one."""

from __future__ import annotations

from pathlib import Path

import pytest
from layers import Finding, findings_in

ROOT = Path(__file__).resolve().parents[1]


def test_the_order_of_layers_holds():
    findings = findings_in(ROOT)
    assert not findings, "\n".join(["", *map(str, findings)])


# ---- the checker finds what it is made for ----------------------------------------------------------------

GOOD = {
    "csrc/plan/dtype.h": "",
    "csrc/copy/copy_cpu.h": '#include <vector>\n#include "plan/dtype.h"\n',
    "csrc/transport/transport.h": "",
    "csrc/transport/shm/ring.h": '#include "transport/transport.h"\n',
    "csrc/transport/tcp/wire.h": "",
    "python/pipecomm_ext/__init__.py": "from . import distributed\nfrom .errors import MadeError\n",
    "python/pipecomm_ext/errors.py": "class MadeError(Exception):\n    pass\n",
    "python/pipecomm_ext/core/__init__.py": "",
    "python/pipecomm_ext/core/extension.py": "from .. import _C\n",
    "python/pipecomm_ext/transports/__init__.py": "from . import tcp, shm\n",
    "python/pipecomm_ext/transports/tcp.py": "from ..core.extension import _C\n",
    "python/pipecomm_ext/transports/shm.py": "from ..core.extension import _C\n",
    "python/pipecomm_ext/communicator/__init__.py": "from .communicator import Communicator\n",
    "python/pipecomm_ext/communicator/communicator.py": (
        "import torch\n"
        "class Communicator:\n"
        "    def __init__(self, group):\n"
        "        self._c = group._device_types, torch._C._group, group._c\n"
        "    def _finish(self, other):\n"
        "        return other._c\n"
    ),
    "python/pipecomm_ext/distributed.py": "from .communicator import Communicator\n_group = None\n",
    "python/pipecomm_ext/runtime/__init__.py": "from .executor import Executor\n",
    "python/pipecomm_ext/runtime/executor.py": "from ..schedules.plan import Plan\nclass Executor: ...\n",
    "python/pipecomm_ext/schedules/__init__.py": (
        "from typing import TYPE_CHECKING\n"
        "from .plan import Plan\n"
        "if TYPE_CHECKING:\n"
        "    from ..runtime import Executor\n"
    ),
    "python/pipecomm_ext/schedules/plan.py": "class Plan:\n    pass\n",
}


def made_findings(folder: Path, files: dict[str, str]) -> list[Finding]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return findings_in(folder)


def test_a_tree_in_order_has_no_findings(tmp_path):
    assert made_findings(tmp_path, GOOD) == []


SUBCLASS = """from .communicator.communicator import Communicator
class Mine(Communicator):
    def _finish(self, other):
        pass
"""
TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..distributed import send\n"
UNKNOWN = "no place in the order of layers"
OUT_OF_ORDER = [  # file, its text, line, rule
    ("csrc/plan/dtype.h", '\n#include "copy/copy_cpu.h"', 2, "plan does not know copy"),
    ("csrc/plan/dtype.h", '#include "plan/dtype.h"', 1, "include each other"),
    ("csrc/plan/dtype.h", '#include "dtype.h"', 1, "not a path below csrc"),
    ("csrc/new/x.h", '#include "plan/dtype.h"', 1, UNKNOWN),
    ("csrc/transport/transport.h", '#include "transport/tcp/wire.h"', 1, "does not know transport/tcp"),
    ("csrc/transport/shm/ring.h", '  #  include "transport/tcp/wire.h"', 1, "does not know transport/tcp"),
    ("core/low.py", "from ..communicator import Communicator", 1, "core does not know communicator"),
    (
        "core/low.py",
        "def late():\n    import pipecomm_ext.communicator",
        2,
        "core does not know communicator",
    ),
    ("core/low.py", TYPES, 3, "core does not know distributed"),
    ("parallel_state.py", "from . import distributed", 1, "parallel_state does not know distributed"),
    ("core/low.py", "from .. import MadeError", 1, "half made"),
    ("core/low.py", "import pipecomm_ext", 1, "half made"),
    ("core/low.py", "from .._C import Plan", 1, "comes from core.extension"),
    ("core/low.py", "from pipecomm_ext import _C", 1, "comes from core.extension"),
    ("core/low.py", "from . import low", 1, "import each other"),
    ("transports/shm.py", "from .tcp import make", 1, "transports do not know each other"),
    ("transports/shm.py", "from . import tcp", 1, "transports do not know each other"),
    ("schedules/plan.py", "from ..errors import MadeError", 1, "schedules imports nothing"),
    ("schedules/plan.py", "from ..runtime import Executor", 1, "schedules imports nothing"),
    ("schedules/plan.py", "from . import Plan", 1, "schedules: the two import each other"),
    ("new_room.py", "", 1, UNKNOWN),
    ("distributed.py", "from .communicator.communicator import _finish", 1, "private to"),
    ("distributed.py", "def f(comm):\n    comm.group()._c.refuse()", 2, "private to"),
    ("distributed.py", SUBCLASS, 2, "private to"),
]


@pytest.mark.parametrize(("name", "text", "line", "rule"), OUT_OF_ORDER)
def test_a_line_out_of_order_is_found(tmp_path, name, text, line, rule):
    path = name if name.startswith("csrc/") else f"python/pipecomm_ext/{name}"
    findings = made_findings(tmp_path, GOOD | {path: f"{text}\n" if text else ""})
    assert [(found.path, found.line) for found in findings if rule in str(found)] == [(path, line)], findings


def test_a_circle_through_other_modules_is_found_on_each_of_its_lines(tmp_path):
    folder = "python/pipecomm_ext/core"
    made = {f"{folder}/{a}.py": f"\nfrom .{b} import x\n" for a, b in ("ab", "bc", "ca")}
    findings = made_findings(tmp_path, GOOD | made)
    assert [(found.path, found.line, found.subject) for found in findings] == [
        (f"{folder}/a.py", 2, "core.b"),
        (f"{folder}/b.py", 2, "core.c"),
        (f"{folder}/c.py", 2, "core.a"),
    ]
