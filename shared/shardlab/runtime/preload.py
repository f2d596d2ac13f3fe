"""Imported once by the forkserver, so that a rank starts in milliseconds with everything loaded.

It only imports: an operation run here would start torch's thread pools, which do not survive a fork, and anything that
touched CUDA would make the GPU unusable in the ranks.
"""

import gc

import torch._dynamo  # a dispatch mode imports it on first use, which takes over a second
import torch.distributed
import torch.distributed.distributed_c10d
import torch.nn

from . import worker

__all__ = ["torch", "worker"]

# The ranks share this memory as long as nobody writes to it; a collection would write to every object's header.
gc.collect()
gc.freeze()
