"""The sequence-parallel operations of the benchmark, one file each."""

from __future__ import annotations

import all_to_all
import gather
import pack
from ops import MIB, Op

SEQUENCE_OPS = {
    "all_to_all": Op(all_to_all.build, (4 * MIB, 25 * MIB)),
    "gather": Op(gather.build, (4 * MIB, 25 * MIB)),
    "pack": Op(pack.build, (4 * MIB, 25 * MIB)),
}
