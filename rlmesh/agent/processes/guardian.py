"""The guardian: the agent's parent, which leaves nothing behind whichever process is killed.

The driver or launcher runs one per node as a script, ``python -I -S guardian.py``. The guardian imports only the
standard library (25 ms from exec to watching), knows of the job only which processes belong to it, and outlives every
other process of its node.

Protocol:

* standard input: one line of JSON, the ``AgentConfig``; then the driver keeps the pipe open for as long as it
  lives. End of file means that the driver is gone. (The guardian also watches the driver's process descriptor,
  as forked children of the driver may hold the pipe. The parent-death signal only wakes the guardian up to check, since
  it is also sent when the *thread* that started the guardian ends.)
* standard output: one line of JSON at the end, the exit report (see :meth:`Guardian.report`). The same
  line is written to ``<run_dir>/exit-node<rank>.json``.
* exit code: the agent's; 128 + signal if a signal killed it.
* SIGTERM: end the job here, giving the agent ``grace_s``. Where signals are shared
  (``ownership.SHARED_SIGNALS``) SIGTERM is left to the driver, as SIGINT, SIGUSR1 and SIGUSR2 always are.

The agent gets the same line on its own standard input, which also stays open. Before the guardian closes it, it may
write a second line: the seconds that the agent has to end its members. The agent writes its log to
``<run_dir>/logs/agent-<rank>.log`` and a last line of JSON to its standard output. Lines before it,
``{"lease_until": 512.5, "members": [17, 19], "frozen": false}``, give the CLOCK_BOOTTIME until which its members may
run without another such line, and their process numbers: an agent that was stopped, and so cannot end them itself,
is killed soon after that. ``null`` as the time means that no member runs. A guardian that stood still itself first
stops the members and gives the agent time to write another line, since the agent and the master may have stood still as
well. An agent that reports ``frozen`` has stopped the members itself.

Arguments, if any, are the command that is started instead of ``python -m rlmesh.agent``.

When the agent has ended, or did not end within its time, the guardian kills all descendants of the agent,
including orphans and double-forked daemons: the guardian is a subreaper, so they become its children. Only descendants
of the guardian are ever signalled; a process that only has the job's mark in its
environment is reported as unproven.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING or __name__ != "__main__":
    from rlmesh import private_files
    from rlmesh.agent.processes import control_groups, ownership, stopped
else:  # run by python -I -S: the package cannot be imported, so its files are loaded from their folders
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import control_groups
    import ownership
    import stopped

    sys.path.append(os.path.dirname(os.path.dirname(sys.path[0])))
    import private_files

CONFIG_LIMIT_BYTES = 1 << 20
CONFIG_WAIT_S = 30.0
DRIVER_GONE_GRACE_S = 2.5
"""Grace of the agent once the driver is gone; everything must have ended within 5 s."""
KILL_WAIT_S = 5.0
LEASE_MARGIN_S = 1.5
"""Seconds beyond its lease that an agent gets to end its members in good order."""
STILL_S = 1.5
"""A guardian that checks the lease this many seconds late stood still."""
WAKING_S = 4.0
"""Seconds after a standstill in which an agent must report its lease."""
REPORTED_LEFTOVERS = 200
"""Further leftovers are only counted: the report must fit into a pipe that nobody reads."""


class Guardian:
    """One run of the guardian: :meth:`main` returns the exit code."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self.config: dict[str, object] = {}
        self.line = b""
        self.agent = 0
        self.statuses: dict[int, int] = {}
        self.why = "the agent ended"
        self._agent_input = -1
        self._agent_output = -1
        self._agent_output_rest = b""
        self._lease_ends: float | None = None
        self._members: set[int] = set()
        self._stops, self._stops_at = stopped.StoppedLooks(), -math.inf
        self._frozen: list[ownership.Process] = []
        self._looked_at, self._woke_at = suspend_aware_clock(), -math.inf
        self._folder: int | None = None
        self._began = time.monotonic()
        self._signals, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Slurm signals every process of a task. What that means is the launcher's decision; programs that are started
        # from here ignore these signals too, until they handle them themselves.
        for number in (signal.SIGUSR1, signal.SIGUSR2, *((signal.SIGTERM,) if ownership.signals_are_shared() else ())):
            signal.signal(number, signal.SIG_IGN)
        try:
            os.setsid()
        except PermissionError:
            pass  # the driver made us a session leader already
        ownership.prctl(ownership.PR_SET_CHILD_SUBREAPER, 1)
        ownership.prctl(ownership.PR_SET_NAME, b"rlmesh-guardian")
        self._driver = os.getppid()
        ownership.prctl(ownership.PR_SET_PDEATHSIG, signal.SIGHUP)
        try:
            self._driver_fd = os.pidfd_open(self._driver)
        except OSError:
            self._driver_fd = -1

    def main(self) -> int:
        """Start the agent, watch it, end everything, and write the report."""
        if not self._read_config():
            self._write_report([])
            return 1
        self._folder = ownership.hold_folder(str(self.config.get("socket_dir", "")))
        # Held until this process has ended, so that no other job starts in the run directory.
        ownership.hold_folder(os.path.realpath(str(self.config.get("run_dir", ""))))
        try:
            self._start_agent()
            self._watch()
        except (OSError, KeyError) as error:
            self.why = f"the agent could not be started: {type(error).__name__}: {error}"
        finally:
            code = self._finish()
        return code

    def _read_config(self) -> bool:
        os.set_blocking(0, False)
        poller = self._poller(0, self._driver_fd)
        deadline = time.monotonic() + CONFIG_WAIT_S
        while not self.line.endswith(b"\n"):
            left = deadline - time.monotonic()
            driver_gone = os.getppid() != self._driver
            if left <= 0 or len(self.line) > CONFIG_LIMIT_BYTES:
                self.why = f"no configuration came on standard input within {CONFIG_WAIT_S:.0f} s"
                return False
            if not any(fd == 0 for fd, _ in poller.poll(0 if driver_gone else int(left * 1000) + 1)):
                # What the driver wrote before it died has been read: a configuration names the folders to remove.
                if driver_gone:
                    self.why = "the driver is gone before its configuration came"
                    return False
                continue
            chunk = os.read(0, CONFIG_LIMIT_BYTES)
            if not chunk:
                self.why = "standard input ended before the configuration was complete"
                return False
            self.line += chunk
        try:
            self.config = json.loads(self.line)
        except ValueError:
            self.why = "the configuration is not one line of JSON"
            return False
        return True

    def _poller(self, *fds: int) -> select.poll:
        poller = select.poll()
        for fd in (self._signals, *fds):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        return poller

    def _start_agent(self) -> None:
        """Fork and exec; single-threaded, so a plain fork is safe here."""
        run_dir = str(self.config["run_dir"])
        log_path = os.path.join(run_dir, "logs", f"agent-{self.config['node_rank']}.log")
        log = private_files.log_to(log_path)
        config_out, self._agent_input = os.pipe2(os.O_CLOEXEC)
        self._agent_output, report_in = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._agent_output, False)  # also for the report that the agent could not be started
        try:
            fcntl.fcntl(self._agent_input, fcntl.F_SETPIPE_SZ, max(len(self.line) + 4096, 65536))
        except PermissionError:
            pass  # this user has many pipes (pipe-user-pages-soft): new ones are small, which is usually enough
        os.set_blocking(self._agent_input, False)
        if os.write(self._agent_input, self.line) < len(self.line):
            raise OSError(errno.ENOSPC, "its configuration does not fit into a pipe: this user has too many of them")
        os.set_blocking(self._agent_input, True)
        env = agent_environment(f"{self.config['job_id']}/{self.config['node_rank']}")
        # The agent has the node's mark from its exec on, and this copy of the output until then: if this process is
        # killed in between, the driver finds the agent once the output has ended.
        until_exec = os.dup(1)
        self.agent = os.fork()
        if self.agent == 0:
            try:
                for fd, standard in ((config_out, 0), (report_in, 1), (log, 2)):
                    os.dup2(fd, standard)
                for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
                    signal.signal(number, signal.SIG_DFL)
                os.setsid()
                os.execvpe(self.command[0], self.command, env)
            except OSError as error:
                os.write(2, f"the agent could not be started: {self.command}: {error}\n".encode())
            finally:
                os._exit(127)
        for fd in (config_out, report_in, log, until_exec):
            os.close(fd)

    def _watch(self) -> None:
        """Wait until the agent has ended, or its time is up after the driver's end or SIGTERM."""
        grace_s = float(str(self.config.get("grace_s", 5.0)))
        poller = self._poller(0, self._driver_fd, self._agent_output)
        deadline: float | None = None
        driver_gone = False
        while True:
            left = 60.0 if deadline is None else deadline - time.monotonic()
            if left <= 0 or self._is_lease_over() or self._is_agent_stopped():
                return
            # Wake up regularly, to look for stopped processes, and because without a descriptor of the driver only the
            # changed parent's number shows that the driver is gone.
            left = min(left, stopped.LOOK_S)
            if self._lease_ends is not None:
                left = min(left, 0.5)  # the poll's clock stands still while the machine is suspended
            ready = {fd for fd, _ in poller.poll(int(left * 1000) + 1)}
            now = suspend_aware_clock()
            if now - self._looked_at > left + STILL_S:
                self._woke_at = now
            self._looked_at = now
            numbers = self._take_signals()
            self.statuses.update(ownership.reap())
            if self.agent in self.statuses:
                return
            if self._agent_output in ready and not self._listen():
                poller.unregister(self._agent_output)
            if not driver_gone and self._is_driver_gone(ready):
                driver_gone, self.why = True, "the driver is gone"
                poller = self._poller()
                deadline = min(deadline or math.inf, time.monotonic() + min(grace_s, DRIVER_GONE_GRACE_S))
            elif deadline is None and signal.SIGTERM in numbers:
                self.why = "SIGTERM"
                deadline = time.monotonic() + grace_s + 1.0
            if deadline is not None and self._agent_input >= 0:
                self._tell_agent_to_end(deadline - time.monotonic())

    def _listen(self) -> bool:
        """Process the agent's lines; False at end of file."""
        try:
            data = os.read(self._agent_output, 65536)
        except BlockingIOError:
            return True
        *lines, self._agent_output_rest = (self._agent_output_rest + data).split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if "lease_until" not in message:
                self._agent_output_rest = line  # the agent's report
                continue
            until, self._members = message["lease_until"], set(message["members"])
            self._lease_ends = None if until is None else until + LEASE_MARGIN_S
            if not message["frozen"] and not self._is_over():
                frozen, self._frozen = self._frozen, []
                for process in frozen:  # maybe the agent resumed them already
                    ownership.send_signal(process, signal.SIGCONT)
        return bool(data)

    def _is_over(self) -> bool:
        return self._lease_ends is not None and suspend_aware_clock() >= self._lease_ends

    def _is_lease_over(self) -> bool:
        if not self._is_over():
            return False
        if suspend_aware_clock() - self._woke_at < WAKING_S:
            self._frozen = list({*self._frozen, *ownership.stop_all(self._members)})
            return False
        self.why = "its lease ended and the agent did not end its members: it was stopped, or hangs"
        return True

    def _is_agent_stopped(self) -> bool:
        now = time.monotonic()
        if now - self._stops_at < stopped.LOOK_S:
            return False
        self._stops_at = now
        if not self._stops.look([self.agent, *stopped.half_started(self.agent)]):
            return False
        self.why = f"it was stopped for {stopped.LOOKS * stopped.LOOK_S:g} s"
        return True

    def _tell_agent_to_end(self, within_s: float) -> None:
        try:
            os.write(self._agent_input, b"%.3f\n" % within_s)
        except OSError:
            pass  # the agent has ended, which the next round notices
        os.close(self._agent_input)
        self._agent_input = -1

    def _is_driver_gone(self, ready: set[int]) -> bool:
        if os.getppid() != self._driver or self._driver_fd in ready:
            return True
        if 0 not in ready:
            return False
        try:
            return not os.read(0, 65536)
        except BlockingIOError:
            return False

    def _take_signals(self) -> bytes:
        try:
            return os.read(self._signals, 4096)
        except BlockingIOError:
            return b""

    def _finish(self) -> int:
        """End all processes, then remove their files, and report."""
        if self._agent_input >= 0:
            os.close(self._agent_input)
        job_id, node_rank = str(self.config["job_id"]), int(str(self.config["node_rank"]))
        own, _ = control_groups.own_group()
        groups = control_groups.node_group(own, job_id, node_rank) if own else ""
        # Before the descendants: processes that fork faster than /proc can be read are ended by the group alone.
        grouped = [process for pid in control_groups.members_of(groups) if (process := ownership.read_process(pid))]
        groups_gone = not groups or control_groups.end(groups)
        ended, running = ownership.kill_descendants(KILL_WAIT_S, self.statuses)
        ended += [process for process in grouped if process.running and process not in (*ended, *running)]
        left = [{"kind": "process", "what": repr(process), "removed": True} for process in ended]
        left += [{"kind": "process", "what": repr(process), "removed": False} for process in running]
        left += [
            {"kind": "unproven", "what": f"{process!r} carries this job's mark", "removed": False}
            for process in ownership.marked(f"{job_id}/{node_rank}")
            if process not in running
        ]
        left += [
            {"kind": "shared_memory", "what": f"/dev/shm/{name}", "removed": gone}
            for name, gone in ownership.remove_shared_memory(job_id, node_rank)
        ]
        if not groups_gone and not control_groups.end(groups):
            left.append({"kind": "control_group", "what": groups, "removed": False})
        socket_dir = str(self.config.get("socket_dir", ""))
        if socket_dir and not ownership.remove_folder(socket_dir, self._folder):
            left.append({"kind": "socket", "what": socket_dir, "removed": False})
        ownership.remove_job_file(str(self.config.get("job_path", "")), socket_dir)
        self._write_report(left)
        code = self._agent_code()
        if code is None:
            return 1
        return code if code >= 0 else 128 - code

    def _agent_code(self) -> int | None:
        status = self.statuses.get(self.agent)
        return None if status is None else os.waitstatus_to_exitcode(status)

    def report(self, leftovers: list[dict[str, object]]) -> dict[str, object]:
        """The exit report: ``node_rank``; ``why`` it ended; ``agent_code`` (negative: minus the signal; null: did not
        end); ``agent`` (the agent's own last line, or null); ``leftovers`` (as
        :class:`rlmesh.agent.protocol.Leftover`): what the guardian had to end or remove; ``lived_s``."""
        agent_line: object = None
        if self._agent_output >= 0:
            while self._listen() and self._agent_pipe_has_more():
                pass
            try:
                agent_line = json.loads(self._agent_output_rest or b"null")
            except ValueError:
                pass
        rest = leftovers[REPORTED_LEFTOVERS:]
        removed = all(item["removed"] for item in rest)
        more = [{"kind": "unproven", "what": f"{len(rest)} more", "removed": removed}] if rest else []
        return {
            "node_rank": self.config.get("node_rank"),
            "why": self.why,
            "agent_code": self._agent_code(),
            "agent": agent_line,
            "leftovers": leftovers[:REPORTED_LEFTOVERS] + more,
            "lived_s": round(time.monotonic() - self._began, 3),
        }

    def _agent_pipe_has_more(self) -> bool:
        return bool(select.select([self._agent_output], [], [], 0)[0])

    def _write_report(self, leftovers: list[dict[str, object]]) -> None:
        line = json.dumps(self.report(leftovers)).encode() + b"\n"
        if "run_dir" in self.config:
            path = os.path.join(str(self.config["run_dir"]), f"exit-node{self.config.get('node_rank')}.json")
            try:
                private_files.write_whole(path, line, durable=False)
            except OSError:
                pass
        try:
            os.write(1, line)
        except OSError:
            pass  # the driver is gone


def suspend_aware_clock() -> float:
    """Seconds since the machine started, including the time in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def agent_environment(mark: str) -> dict[str, str]:
    """This environment with the node's mark; ``rlmesh`` stays importable if run from a checkout."""
    env = dict(os.environ)
    env[ownership.NODE_MARK] = mark
    env[ownership.GUARDIAN] = str(os.getpid())
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    root = os.path.dirname(package)
    if os.path.basename(root) not in ("site-packages", "dist-packages"):
        paths = env.get("PYTHONPATH", "").split(os.pathsep)
        if root not in paths:
            env["PYTHONPATH"] = os.pathsep.join([*filter(None, paths), root])
    return env


if __name__ == "__main__":
    default_command = [sys.executable, "-P", "-u", "-m", "rlmesh.agent"]
    sys.exit(Guardian(sys.argv[1:] or default_command).main())
