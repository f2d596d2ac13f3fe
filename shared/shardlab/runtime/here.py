"""What a rank may ask about itself."""

from __future__ import annotations

import torch
import torch.distributed as dist


def device() -> torch.device:
    """This rank's device: its GPU under NCCL, else the CPU. The same under `launch` and under torchrun."""
    if dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
