"""A real Slurm of several nodes on this machine: every daemon in the foreground, as a child that is reaped."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.own_time import HANG_S

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("slurmctld", "slurmd", "munged", "munge", "unmunge", "srun", "sbatch", "scontrol", "squeue", "scancel")
GPUS = 4
UP_S = 30.0

_CONF = """\
ClusterName=t
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/run/munge.socket,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={root}/state
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdPidFile={root}/run/slurmd.%n.pid
SlurmdLogFile={root}/log/slurmd.%n.log
SlurmdSpoolDir={root}/spool/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=100000
SlurmdParameters=config_overrides
ReturnToService=2
GresTypes=gpu
KillWait=5
MinJobAge=300
SlurmdTimeout=8
SlurmctldTimeout=30
InactiveLimit=0
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PropagateResourceLimits=NONE
NodeName=node[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=2000 \
Gres=gpu:{gpus} State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20 PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL Default=NO MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """What of Slurm is not installed here; empty if all is."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return ", ".join(name for name in PROGRAMS if shutil.which(name, path=path) is None)


class SlurmCluster:
    """Nodes ``node1`` … with four CPUs and four GPUs that are none. Use it in a ``with`` block."""

    def __init__(self, root: Path, nodes: int = 3) -> None:
        self.root, self.nodes = root, nodes
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}",
            "PYTHONUNBUFFERED": "1",
            "SLURM_CONF": str(root / "etc" / "slurm.conf"),
            "RLMESH_MUNGE_SOCKET": str(root / "run" / "munge.socket"),
        }

    def __enter__(self) -> SlurmCluster:
        try:
            self._write_files()
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _write_files(self) -> None:
        root = self.root
        for name in ("munge", "etc", "state", "spool", "log", "run", "dev"):
            (root / name).mkdir(parents=True)
        for number in range(GPUS):
            (root / "dev" / f"nvidia{number}").symlink_to("/dev/null")
        (root / "munge").chmod(0o700)
        key = root / "munge" / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        port = _free_ports(self.nodes + 1)
        host = socket.gethostname().partition(".")[0]
        conf = _CONF.format(
            host=host, port=port, user=getpass.getuser(), root=root, nodes=self.nodes, first=port + 1,
            last=port + self.nodes, gpus=GPUS,
        )  # fmt: skip
        (root / "etc" / "slurm.conf").write_text(conf)
        gres = f"NodeName=node[1-{self.nodes}] Name=gpu File={root}/dev/nvidia[0-{GPUS - 1}]\n"
        (root / "etc" / "gres.conf").write_text(gres)

    def _start(self) -> None:
        root, conf = self.root, self.env["SLURM_CONF"]
        deadline = time.monotonic() + UP_S
        self._spawn(
            "munged", "-F", f"--key-file={root}/munge/munge.key", f"--socket={root}/run/munge.socket",
            f"--pid-file={root}/run/munged.pid", f"--log-file={root}/munge/munged.log",
            f"--seed-file={root}/munge/munged.seed",
        )  # fmt: skip
        self._until(lambda: (root / "run" / "munge.socket").exists(), deadline)
        self._spawn("slurmctld", "-D", "-i", "-f", conf)
        # Earlier registrations of nodes are repeated after a second or two only.
        self._until(lambda: "is UP" in self.run("scontrol", "ping", check=False), deadline)
        for number in range(1, self.nodes + 1):
            self.start_node(number)
        self._until(lambda: self.states() == ["idle"] * self.nodes, deadline)

    def start_node(self, number: int) -> None:
        (self.root / "spool" / f"node{number}").mkdir(exist_ok=True)
        conf = self.env["SLURM_CONF"]
        self._spawn("slurmd", "-D", "-f", conf, "-N", f"node{number}", name=f"slurmd{number}")

    def kill_node(self, number: int) -> None:
        """The node's daemon is gone without a word."""
        daemon = self.daemons.pop(f"slurmd{number}")
        daemon.kill()
        daemon.wait(HANG_S)

    def _spawn(self, program: str, *arguments: str, name: str = "") -> None:
        log = self.root / "log" / f"{name or program}.out"
        with log.open("ab") as output:
            self.daemons[name or program] = subprocess.Popen(
                [program, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self.env,
                start_new_session=True,
            )  # fmt: skip

    def _until(self, condition: object, deadline: float) -> None:
        assert callable(condition)
        while not condition():
            dead = [name for name, daemon in self.daemons.items() if daemon.poll() is not None]
            if dead or time.monotonic() > deadline:
                raise RuntimeError(f"Slurm did not come up ({', '.join(dead) or 'slow'}):\n{self.logs()}")
            time.sleep(0.02)

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in (self.root / "log").iterdir())

    def stop(self) -> None:
        """Cancel what runs, and end every daemon."""
        if "slurmctld" in self.daemons and self.daemons["slurmctld"].poll() is None:
            self.cancel_all()
        for name in sorted(self.daemons, key=lambda name: (name == "munged", name == "slurmctld")):
            daemon = self.daemons[name]
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(HANG_S)
        self.daemons.clear()

    def cancel_all(self) -> None:
        """Until no job is left."""
        deadline = time.monotonic() + 20
        while self.run("squeue", "-h", "-o", "%i", check=False).strip() and time.monotonic() < deadline:
            self.run("scancel", f"--user={getpass.getuser()}", check=False)
            time.sleep(0.1)

    # Commands

    def run(self, *command: str, check: bool = True, cwd: Path | None = None, timeout_s: float = 60.0) -> str:
        """Run a client; both streams."""
        done = subprocess.run(
            command, env=self.env, cwd=cwd, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=timeout_s,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{command} gave {done.returncode}:\n{done.stdout}"
        return done.stdout

    def start(self, command: Sequence[str], cwd: Path, env: Mapping[str, str] = {}) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, env={**self.env, **env}, cwd=cwd, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def states(self) -> list[str]:
        return self.run("sinfo", "-h", "-N", "-p", "debug", "-o", "%t", check=False).split()

    def job_state(self, job: str) -> str:
        """``RUNNING``, ``PENDING``, …; of a job that has ended too, as long as Slurm remembers it."""
        said = self.run("scontrol", "show", "job", job, check=False)
        return said.partition("JobState=")[2].split()[0] if "JobState=" in said else "GONE"

    def wait_job(self, job: str, *wanted: str, timeout_s: float = 60.0) -> str:
        """Until the job is in one of the states."""
        deadline = time.monotonic() + timeout_s
        while (state := self.job_state(job)) not in wanted:
            assert time.monotonic() < deadline, f"job {job} is {state}, not {wanted}\n{self.logs()}"
            time.sleep(0.1)
        return state

    def wait_node(self, name: str, wanted: str, timeout_s: float = 60.0) -> None:
        """Until Slurm itself takes the node for ``wanted``, such as ``down``."""
        deadline = time.monotonic() + timeout_s
        while wanted not in (said := self.run("sinfo", "-h", "-n", name, "-p", "debug", "-o", "%T")):
            assert time.monotonic() < deadline, f"{name} is {said}, not {wanted}\n{self.logs()}"
            time.sleep(0.2)


def _free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens at now. (Slurm's daemons take no port 0.)"""
    for base in range(17000 + os.getpid() % 2000 * 6, 32000, count):
        held = []
        try:
            for port in range(base, base + count):
                held.append(socket.socket())
                held[-1].bind(("127.0.0.1", port))
        except OSError:
            continue
        finally:
            for sock in held:
                sock.close()
        return base
    raise RuntimeError("no free ports")
