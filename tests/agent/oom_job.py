"""A job whose member takes memory until something stops it."""

from __future__ import annotations

import resource
import sys

from rlmesh import DLJobBuilder, RoleGroup, rpc


class Eater:
    @rpc
    def eat(self) -> None:
        food = []
        while True:
            food.append(bytearray(b"x") * (8 * 2**20))


class Trainer:
    def run(self) -> None:
        RoleGroup("EATER").call("eat").result()


class Limited(Eater):
    def setup(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
        self.food = bytearray(2**31)


def main(role: type) -> None:
    builder = DLJobBuilder().device_type("CPU").with_restart("never")
    builder.role("EATER").run(role).resource(cpu=0)
    builder.role("TRAINER").run(Trainer).resource(cpu=0)
    builder.build().submit("oom")


if __name__ == "__main__":
    main(Limited if "limit" in sys.argv else Eater)
