"""A sink, or a rank of a sharded source, in a process of its own.

``python -m tests.gpu.weights_peer KEY_HEX SOCKET_DIR ROLE RANK RANKS DEVICE MODE``: prints its endpoint, takes address
books as lines of JSON, serves until its input ends. RANKS: of a sharded source; 0: none is, -1: nor is any size odd.
MODE: of a source, what its ranks are connected by.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from typing import Any

import torch
from torch import nn

from rlmesh.runtime.connections.address_book import AddressBook, MemberAddress
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from rlmesh.weights.members import ReceivesWeights, SendsWeights
from rlmesh.weights.module_sink import ModuleSink
from rlmesh.weights.module_source import ModuleSource

SHAPES = [(1000, 513), (7,), (), (64, 64), (3, 5, 7), (4096, 4096), (1 << 20,), (0, 4)]


class Model(nn.Module):
    """Parameters of odd and even sizes, a tie, a buffer, and strides."""

    def __init__(self, seed: int, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(seed)
        rows = (nn.Parameter(torch.randn(shape, dtype=dtype), requires_grad=False) for shape in SHAPES)
        self.rows = nn.ParameterList(rows)
        self.tied = nn.Parameter(torch.randn(33, 9, dtype=dtype), requires_grad=False)
        self.again = self.tied
        self.across = nn.Parameter(torch.randn(64, 48, dtype=dtype).t(), requires_grad=False)
        self.register_buffer("mean", torch.randn(17, dtype=torch.float32))
        self.to(device)


def plain(seed: int, device: str, odd: int = 7) -> nn.Module:
    """A model that FSDP2 can shard: no strides, no ties; with ``odd=8`` all of its tensors are whole 64-bit words."""
    torch.manual_seed(seed)
    sizes = ((1000, 513), (odd, 3), (64, 64), (4097, 1024))
    model = nn.ParameterList(nn.Parameter(torch.randn(shape, dtype=torch.bfloat16)) for shape in sizes)
    return model.to(device)


def values(module: nn.Module) -> dict[str, list[float]]:
    """Enough of every tensor to tell it from another one's."""
    found = {}
    for name, tensor in module.state_dict().items():
        flat = whole(tensor).double().reshape(-1)
        found[name] = [float(flat.sum()), float((flat * torch.arange(flat.numel(), device=flat.device)).sum())]
    return found


@cache
def hosts() -> Any:
    """The ranks, connected without their GPUs."""
    return torch.distributed.new_group(backend="gloo")


def whole(tensor: Any) -> Any:
    """Of rows that the ranks share, all; by way of their hosts."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, tensor.to_local().float().cpu(), hosts())
    return torch.cat(parts)


class Sink(ReceivesWeights):
    def __init__(self, module: nn.Module, mode: Any, name: str) -> None:
        self.module = module
        self.receive_weights(ModuleSink(module, mode), name=name)

    @rpc
    def state(self) -> tuple[int | None, dict[str, list[float]]]:
        return self.weights.version, values(self.module)

    @rpc
    def allocated(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()


class Source(SendsWeights):
    def __init__(self, module: nn.Module, name: str, runtime: Runtime) -> None:
        self.module = module
        self.send_weights(ModuleSource(module), name=name, runtime=runtime)

    @rpc
    def change(self, seed: int) -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.module.parameters():
                local = getattr(parameter, "_local_tensor", parameter)
                local.copy_(torch.randn(local.shape, device=local.device))

    @rpc
    def hold_up(self, seconds: int) -> None:
        """Whatever is launched next begins about so much later."""
        for _ in range(seconds):
            torch.cuda._sleep(1_700_000_000)  # cycles

    @rpc
    def state(self) -> dict[str, list[float]]:
        return values(self.module)


def main() -> None:
    key, sockets, role, rank, ranks, device, mode = sys.argv[1:]
    name = f"{role}:{rank}"
    torch.cuda.set_device(torch.device(device))
    with Runtime.start(name=name, key=bytes.fromhex(key), socket_dir=sockets, job_id="wgpu") as runtime:
        if role == "SINK":
            seed = int(rank) + 50
            module = plain(seed, device, 8 if int(ranks) < 0 else 7) if int(ranks) else Model(seed, device)
            member: Sink | Source = Sink(module, mode, name)
        else:
            from torch.distributed.fsdp import fully_shard

            if int(ranks) > 0:
                torch.distributed.init_process_group(
                    mode, f"file://{sockets}/group", rank=int(rank), world_size=int(ranks),
                    device_id=torch.device(device) if mode == "nccl" else None,
                )  # fmt: skip
                hosts()
            module = plain(7, device, 7 if int(ranks) > 0 else 8)
            if int(ranks) > 0:
                fully_shard(module)
            member = Source(module, name, runtime)
        runtime.serve(name, member)
        print(runtime.endpoint, os.getpid(), flush=True)
        for line in sys.stdin:
            rows = json.loads(line)
            runtime.set_address_book(AddressBook(rows[0], tuple(MemberAddress(*row) for row in rows[1])))
        if isinstance(member, Sink):
            member.close_weights()
        else:
            member.close_weights_source()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
