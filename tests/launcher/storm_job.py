"""A job of four processes for tests of ports: a group that meets at the port that was reserved for it."""

from __future__ import annotations

import os
import socket

from rlmesh import DLJobBuilder, RoleGroup, current_worker, rpc


class Rank:
    """Rank 0 listens where a process group's store would, the others connect there; nobody tries twice."""

    def setup(self) -> None:
        self.where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

    @rpc
    def listen(self) -> None:
        self.server = socket.create_server(self.where)

    @rpc(concurrent=2)
    def answer(self, count: int) -> None:
        for _ in range(count):
            self.server.settimeout(30.0)
            with self.server.accept()[0] as peer:
                peer.sendall(current_worker().job_info.job_id.encode() + b"\n")
        self.server.close()

    @rpc
    def ask(self) -> bool:
        with socket.create_connection(self.where, 30.0) as peer, peer.makefile("rb") as stream:
            return stream.readline().strip().decode() == current_worker().job_info.job_id


class Trainer:
    def run(self) -> None:
        group = RoleGroup[Rank]("RANK")
        group[0].call(Rank.listen).result()
        served = group[0].call(Rank.answer, 2)
        own = group[1:].call(Rank.ask).result()
        served.result()
        print(f"met own head: {own}", flush=True)


def build() -> DLJobBuilder:
    builder = DLJobBuilder().config({}).device_type("CPU")
    builder.role("RANK").train(Rank).nnodes(1).nproc_per_node(3)
    builder.role("TRAINER").run(Trainer).resource(cpu=0.1)
    return builder


if __name__ == "__main__":
    build().build().submit("storm")
