"""An engine of vLLM that takes weights, in a process of its own.

``python -m tests.gpu.vllm_peer KEY_HEX SOCKET_DIR ROLE RANK MODEL_FOLDER VERSION OPTIONS_JSON``: the rest is as in
`weights_peer`. A version of -1: none.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from rlmesh.rl.engines.rollout import SamplingParams
from rlmesh.rl.engines.vllm.sync_engine import VllmEngine
from rlmesh.runtime.connections.address_book import AddressBook, MemberAddress
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from rlmesh.weights.members import ReceivesWeights


class Rollout(ReceivesWeights):
    def __init__(self, engine: VllmEngine, name: str) -> None:
        self.engine = engine
        self.receive_weights(engine.sink, name=name)

    @rpc
    def log_probs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self.engine.log_probs(sequences)

    @rpc(concurrent=2)
    def greedy(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[list[list[int]], list[int | None]]:
        """The likeliest tokens, and the versions that they are of."""
        samples = self.engine.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0.0))
        return [sample.token_ids for sample in samples], [sample.policy_version for sample in samples]

    @rpc
    def sleep_and_wake(self, level: int) -> list[int]:
        """Bytes of the GPU that are free before, during and after."""
        import torch

        free = [torch.cuda.mem_get_info()[0]]
        self.engine.sleep(level)  # type: ignore[arg-type]
        free.append(torch.cuda.mem_get_info()[0])
        self.engine.wake()
        return [*free, torch.cuda.mem_get_info()[0]]


def main() -> None:
    key, sockets, role, rank, folder, version, options = sys.argv[1:]
    name = f"{role}:{rank}"
    engine = VllmEngine(folder, version=int(version) if int(version) >= 0 else None, who=name, **json.loads(options))
    with Runtime.start(name=name, key=bytes.fromhex(key), socket_dir=sockets, job_id="wgpu") as runtime:
        member = Rollout(engine, name)
        runtime.serve(name, member)
        print("endpoint", runtime.endpoint, os.getpid(), flush=True)
        for line in sys.stdin:
            rows = json.loads(line)
            runtime.set_address_book(AddressBook(rows[0], tuple(MemberAddress(*row) for row in rows[1])))
        member.close_weights()
    engine.close()


if __name__ == "__main__":
    main()
