"""A process that is started without standard streams gets /dev/null for them, and jobs run all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import json, os, sys
from rlmesh.driver.standard_streams import fill_standard_streams
fill_standard_streams()
file = open(sys.argv[1], "w")
print("to nobody"); print("to nobody", file=sys.stderr)
json.dump([file.fileno(), *(os.readlink(f"/proc/self/fd/{fd}") for fd in range(3))], file)
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_other_file_gets_the_number_of_a_stream(tmp_path: Path, closed: str) -> None:
    found = tmp_path / "found.json"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    script = f'exec "$0" -c "$1" "$2" {closed}'
    with open(os.devnull, "r+b") as null:
        subprocess.run(
            ["bash", "-c", script, sys.executable, CODE, str(found)], env=env, check=True, timeout=60,
            stdin=null, stdout=null, stderr=null,
        )  # fmt: skip
    number, *streams = json.loads(found.read_text())
    assert number > 2
    assert streams == [os.devnull] * 3


def test_a_job_runs_without_standard_output(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "from rlmesh import DLJobBuilder\n"
        "class Trainer:\n"
        "    def run(self): print('done')\n"
        "if __name__ == '__main__':\n"
        "    DLJobBuilder().role('TRAINER').run(Trainer).build().submit('quiet', run_dir='run')\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    script = 'exec "$0" -m rlmesh.cli.main launch job.py <&- >&- 2>&-'
    ended = subprocess.run(["bash", "-c", script, sys.executable], cwd=tmp_path, env=env, timeout=90)
    assert ended.returncode == 0
    assert "done" in (tmp_path / "run" / "logs" / "TRAINER-0.log").read_text()
