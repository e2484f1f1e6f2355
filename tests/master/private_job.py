"""A job whose configuration and variables have secrets, which its roles check and which one of them fails with."""

import os
import sys
import time
from typing import Any

from rlmesh import DLJobBuilder, RoleGroup, current_worker, rpc

SECRETS = {
    "HF_TOKEN": "hf-real-value-1",
    "DB_URL": "postgres://me:url-real-value-2@db:5432/x",
    "MY_PASSWORD": "pw-real-value-3",
}
CONFIG = {"api_key": "cfg-real-value-4", "nested": [{"client_secret": "cfg-real-value-5"}], "max_tokens": 512}


class Store:
    @rpc
    def secret(self) -> str:
        return os.environ["MY_PASSWORD"] + os.environ["HF_TOKEN"]


class Trainer:
    def run(self) -> None:
        config: Any = current_worker().job_info.user_config
        assert config == CONFIG, config
        assert os.environ["DB_URL"] == SECRETS["DB_URL"]
        assert RoleGroup("STORE").call("secret").result() == ["pw-real-value-3hf-real-value-1"]
        current_worker().report(step=1, loss=0.5)
        print("secrets arrived", flush=True)
        if "--wait" in sys.argv or os.environ.get("WAIT"):
            time.sleep(float(os.environ["WAIT"]))
        if os.environ.get("FAIL"):
            raise ConnectionError(f"cannot connect to {SECRETS['DB_URL']}")


if __name__ == "__main__":
    job = (
        DLJobBuilder()
        .config(CONFIG)
        .global_env({"HF_TOKEN": SECRETS["HF_TOKEN"], "DB_URL": SECRETS["DB_URL"]})
        .role("TRAINER").run(Trainer)
        .role("STORE").run(Store).env({"MY_PASSWORD": SECRETS["MY_PASSWORD"]})
        .build()
    )  # fmt: skip
    job.submit("private")
