"""Three greeters and a trainer that calls them, each in its own process: python examples/hello.py"""

from rlmesh import DLJobBuilder, RoleGroup, current_worker, rpc


class Greeter:
    @rpc
    def greet(self, names: list[str]) -> list[str]:
        return [f"hello {name}, from greeter {current_worker().rank}" for name in names]


class Trainer:
    def run(self) -> None:
        for greeting in RoleGroup("GREETER").call_batch(Greeter.greet, ["Ada", "Alan", "Emmy"]):
            print(greeting)


if __name__ == "__main__":
    job = DLJobBuilder().role("GREETER").run(Greeter).total(3).role("TRAINER").run(Trainer).build()
    job.submit("hello")
