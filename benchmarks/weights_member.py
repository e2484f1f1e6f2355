"""The processes of `benchmarks/weights.py`: sources and sinks, each with a runtime of its own."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from rlmesh import ModuleSink, ModuleSource, ReceivesWeights, Runtime, SendsWeights
from rlmesh.runtime.connections.address_book import member_name
from rlmesh.weights.planning.plan import Mode

KEY = b"benchmarks/weights.py is a test!"


@dataclass(frozen=True)
class MemberSpec:
    """One process. ``shapes`` are those of the whole tensors; ``ranks`` > 1 shards the source by FSDP2."""

    role: str
    rank: int
    socket_dir: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    device: str
    mode: Mode = "double_buffer"
    keep_shared: bool = True
    ranks: int = 1


class Tensors(nn.Module):
    """Parameters of some shapes, and nothing else."""

    def __init__(self, spec: MemberSpec, *, filled: bool) -> None:
        super().__init__()
        self.tensors = nn.ParameterList()
        for shape in spec.shapes:
            data = torch.empty(shape, dtype=getattr(torch, spec.dtype), device=spec.device)
            self.tensors.append(nn.Parameter(data.normal_() if filled else data.zero_(), requires_grad=False))


class Source(SendsWeights):
    """Holds the weights that are pushed."""


class Sink(ReceivesWeights):
    """Takes them."""


def main(spec: MemberSpec, pipe: Connection) -> None:
    """Serve until the parent closes its end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no shared memory is left
    torch.set_num_threads(1)
    if spec.device != "cpu":
        torch.cuda.set_device(torch.device(spec.device))
    name = member_name(spec.role, spec.rank)
    with Runtime.start(name=name, key=KEY, socket_dir=spec.socket_dir) as runtime:
        member = _source(spec, name, runtime) if spec.role == "SOURCE" else _sink(spec, name)
        runtime.serve(name, member)
        pipe.send((runtime.endpoint, os.getpid()))
        try:
            while (message := pipe.recv()) is not None:
                pipe.send(_obey(message, runtime, member, spec))
        except EOFError:
            pass
        finally:
            if isinstance(member, Sink):
                member.close_weights()
            else:
                member.close_weights_source()
    if spec.ranks > 1:
        torch.distributed.destroy_process_group()


def _source(spec: MemberSpec, name: str, runtime: Runtime) -> Source:
    module: nn.Module = Tensors(spec, filled=True)
    if spec.ranks > 1:
        from torch.distributed.fsdp import fully_shard

        backend = "nccl" if spec.device != "cpu" else "gloo"
        file = f"file://{spec.socket_dir}/group"
        torch.distributed.init_process_group(
            backend, file, rank=spec.rank, world_size=spec.ranks,
            device_id=torch.device(spec.device) if spec.device != "cpu" else None,
        )  # fmt: skip
        fully_shard(module)
    source = Source()
    source.send_weights(ModuleSource(module), name=name, runtime=runtime)
    return source


def _sink(spec: MemberSpec, name: str) -> Sink:
    sink = Sink()
    module = Tensors(spec, filled=False)
    sink.receive_weights(ModuleSink(module, spec.mode, keep_shared=spec.keep_shared), name=name)
    return sink


def _obey(message: Any, runtime: Runtime, member: Source | Sink, spec: MemberSpec) -> Any:
    """Commands of the parent besides those of the weight sync."""
    if message[0] == "book":
        runtime.set_address_book(message[1])
        return None
    if message[0] == "memory":
        return _memory_in_use(spec)
    if message[0] == "all_gather":
        return _time_all_gather(spec, message[1], message[2])
    if message[0] == "gather":
        return _time_gather(member, message[1])
    raise ValueError(f"unknown command {message!r}")


def _memory_in_use(spec: MemberSpec) -> int:
    """The most that torch had at any time since the last question, in bytes."""
    if spec.device == "cpu":
        return 0
    most = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return most


def _time_all_gather(spec: MemberSpec, bucket_bytes: int, times: int) -> float:
    """Seconds until NCCL has all bytes of the model on all ranks, in flat buckets, and nothing else: the median."""
    import math
    import time

    elements = sum(math.prod(shape) for shape in spec.shapes)
    step = bucket_bytes // 2
    sizes = [min(step, elements - at) // spec.ranks * spec.ranks for at in range(0, elements, step)]
    shard = torch.zeros(max(sizes) // spec.ranks, dtype=torch.bfloat16, device=spec.device)
    whole = [torch.zeros(max(sizes), dtype=torch.bfloat16, device=spec.device) for _ in range(2)]
    taken = []
    for _ in range(times + 2):
        torch.distributed.barrier()
        _wait_for_gpu()
        began = time.perf_counter()
        for i, size in enumerate(sizes):
            torch.distributed.all_gather_into_tensor(whole[i % 2][:size], shard[: size // spec.ranks])
        _wait_for_gpu()
        taken.append(time.perf_counter() - began)
    del shard, whole
    torch.cuda.empty_cache()
    return sorted(taken[2:])[times // 2]


def _time_gather(member: Source | Sink, times: int) -> float:
    """Seconds to gather all tensors once on all ranks, tensor by tensor, and nothing else: the median."""
    import time

    assert isinstance(member, Source)
    source = member.weights_source.source
    names = [spec.name for spec in source.manifest()]
    taken = []
    for _ in range(times):
        torch.distributed.barrier()
        _wait_for_gpu()
        began = time.perf_counter()
        for name in names:
            with source.gather([name]):
                pass
        _wait_for_gpu()
        taken.append(time.perf_counter() - began)
    return sorted(taken)[len(taken) // 2]


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
