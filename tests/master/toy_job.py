"""A job of two role classes for tests. Its options make it fail in a certain place."""

import argparse
import os
import sys
import time
from typing import Any

from rlmesh import DLJob, DLJobBuilder, RoleGroup, current_worker, rpc


def config() -> dict[str, Any]:
    values: dict[str, Any] = current_worker().job_info.user_config
    return values


def fail_here(place: str) -> None:
    worker = current_worker()
    if config()["fail"] == place and worker.rank == worker.world_size - 1:
        print(f"{worker.name} is about to fail", flush=True)
        raise ValueError(f"no luck in {place}")


class Adder:
    def __init__(self) -> None:
        fail_here("init")

    def setup(self) -> None:
        print(f"pid of ADDER:{current_worker().rank} is {os.getpid()}", flush=True)
        fail_here("setup")
        self.offset = config()["offset"]

    @rpc
    def add(self, numbers: list[int]) -> list[int]:
        fail_here("method")
        if config()["fail"] == "exit":
            sys.exit(3)
        return [number + self.offset for number in numbers]

    @rpc
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @rpc
    def rank(self) -> str:
        return os.environ.get("RANK", "none")

    def teardown(self) -> None:
        print(f"teardown of ADDER:{current_worker().rank}", flush=True)
        fail_here("teardown")


class Trainer:
    def run(self) -> None:
        print(f"pid of TRAINER is {os.getpid()}", flush=True)
        adders = RoleGroup[Adder]("ADDER")
        if config()["fail"] == "run":
            raise ValueError("no luck in run")
        for step in range(config()["steps"]):
            total = sum(adders.call_batch(Adder.add, 10, list(range(10))))
            current_worker().report(step, total=total)
            print(f"step {step}: total {total}, ranks {adders.call(Adder.rank).result()}", flush=True)
            time.sleep(config()["pace"])
        adders.call(Adder.sleep, config()["sleep"]).result()


def build(*, restart: Any = None, **options: object) -> DLJob:
    values = {"fail": "", "offset": 1, "steps": 2, "sleep": 0.0, "pace": 0.0, **options}
    builder = DLJobBuilder().config(values).device_type("CPU")
    builder.role("ADDER").train(Adder).nnodes(1).nproc_per_node(2)
    builder.role("TRAINER").run(Trainer).resource(cpu=4)
    if restart:
        builder.with_restart(restart)
    return builder.build()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail", default="")
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--restart")
    job = build(**vars(parser.parse_args()))
    result = job.submit("toy")
    print("all serving after", result.status.all_serving_s, "s")
