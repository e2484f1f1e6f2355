"""A job whose texts cannot be encoded, or that prints more than there is room for."""

import os
import sys
import time
from typing import Any

from rlmesh import DLJobBuilder, RoleGroup, current_worker, rpc
from rlmesh.errors import CallError

ODD = "half of an emoji: \ud83d"


class Worker:
    @rpc
    def work(self, count: int) -> int:
        for _ in range(count):
            print("x" * 3000)
            sys.stdout.buffer.write(b"bytes, too\n")
        return count

    @rpc
    def odd(self) -> None:
        raise ValueError(ODD)


class Trainer:
    def run(self) -> None:
        workers: Any = RoleGroup("W")
        what = os.environ["WHAT"]
        if what == "text":
            print(ODD)
            current_worker().alarm(ODD)
            try:
                workers[0].call("odd").result()
            except CallError as error:
                assert ODD in str(error), ascii(str(error))
            for step in range(60):
                current_worker().report(step=step, **{"odd/\ud83d": 1.0 * step})
                time.sleep(0.02)
            if current_worker().incarnation == 0:
                raise ValueError(ODD)
        else:
            for step in range(60):
                assert workers.call("work", 2).result() == [2, 2]
                print("y" * 2000)
                current_worker().report(step=step, done=step)
        print("all done", flush=True)


if __name__ == "__main__":
    builder = DLJobBuilder().role("TRAINER").run(Trainer).restart("member", on_error=True, delay_s=0.1)
    result = builder.role("W").run(Worker).total(2).build().submit("odd")
    print(f"stage {result.status.stage}, alarms {[ascii(alarm.text) for alarm in result.status.alarms]}")
