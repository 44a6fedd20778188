"""The backend "pipecomm" of torch.distributed: `torch.distributed.init_process_group("pipecomm")`.

torch (2.14 and later) finds it by the entry point `torch.distributed.backends`; `import pipecomm_ext`
registers it, too.
"""

from .names import MIN_TORCH, NAME
from .registration import register

__all__ = ["MIN_TORCH", "NAME", "register"]
