"""The transports that can move the bytes of a communicator: a module for each, and one table."""

from ..core import environment
from .nccl import Nccl
from .routes import MIXED, Routes, draw
from .shm import Shm
from .tcp import Tcp
from .transport import Costs, Transport

# In order of preference. Every question to a transport by name is answered from this table.
TRANSPORTS: dict[str, Transport] = {row.name: row for row in (Shm(), Nccl(), Tcp())}
FORMER_NAMES = {"c10d": "tcp"}  # still accepted

for _row in TRANSPORTS.values():
    environment.declare(*_row.variables)
environment.declare(
    environment.Variable(
        "PIPECOMM_TRANSPORT",
        environment.Choice(("auto", *sorted(TRANSPORTS)), FORMER_NAMES),
        'what `transport="auto"` takes',
        "auto",
        argument="transport",
    )
)

__all__ = ["FORMER_NAMES", "MIXED", "TRANSPORTS", "Costs", "Routes", "Transport", "draw"]
