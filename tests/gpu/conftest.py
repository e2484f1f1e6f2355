"""What the first use of CUDA leaves in a process, descriptors and mappings, is there before the first test looks."""

from __future__ import annotations

import torch

if torch.cuda.is_available():
    torch.cuda.init()
    torch.ones(1 << 20, device="cuda").sum().item()
    event = torch.cuda.Event(interprocess=True)
    event.record()
    event.ipc_handle()
    torch.cuda.synchronize()
