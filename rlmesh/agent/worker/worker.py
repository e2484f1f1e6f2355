"""The worker: a process that becomes one member of a role.

::

    bind → register → import and build the entry → setup() [→ on_restart()] → serve → member_ready
         → [begin_run → run() → run_finished] → teardown() → exit 0

Calls that come before ``setup()`` has returned wait for it. The main thread runs setup, the member's ``def``
methods, ``run()`` and teardown; the runtime has its own thread. Exceptions of user code are reported to the
master with their traceback, printed to the log, and end the process with code 1; ``sys.exit(n)`` ends it with code
n (0 in ``run()`` or a script counts as returning). After SIGTERM and teardown the process ends by that signal.

Standard output and error are the member's log file.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rlmesh.agent.monitoring.logs import last_lines, member_log
from rlmesh.agent.monitoring.rejections import RejectionReporter
from rlmesh.agent.processes import control_groups, ownership
from rlmesh.agent.processes.process import become_member, open_log
from rlmesh.agent.processes.start_claim import make_claim
from rlmesh.agent.protocol import (
    AGENT,
    CONTROL,
    MASTER,
    MemberHello,
    WorkerSpec,
    origin_of,
    portable_error,
    public_address,
)
from rlmesh.agent.reliable_outbox import Outbox, new_sender
from rlmesh.agent.worker import own_output, stacks
from rlmesh.agent.worker.call_reporter import CallReporter
from rlmesh.agent.worker.chaos_hooks import ChaosHooks
from rlmesh.agent.worker.control import Control, MasterLink, Orders, Terminated
from rlmesh.agent.worker.device_lease_client import DeviceLeaseClient
from rlmesh.agent.worker.entrypoint import Loaded, call_plainly, load_entry, load_user_config, take_over
from rlmesh.agent.worker.fused import acting_for
from rlmesh.agent.worker.reaper import Reaper, StartedChildren
from rlmesh.agent.worker.worker_process import (
    bound_exit,
    exit_code,
    flush_c_output_by_line,
    memory_limits,
    print_error,
    reseed,
)
from rlmesh.errors import RLMeshError, UsageError
from rlmesh.job.context import JobInfo, WorkerContext, acting_as, set_current_worker
from rlmesh.job.status import Alarm
from rlmesh.placement.machine.affinity import bind
from rlmesh.placement.machine.device_check import check_devices, check_torch_devices
from rlmesh.placement.machine.environment import mask_disagrees
from rlmesh.placement.machine.gpus import CUDA_MASK, CUDA_ORDER
from rlmesh.placement.machine.inventory import VIRTUAL
from rlmesh.placement.machine.system import Machine
from rlmesh.runtime.default_runtime import set_default_runtime
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.process import clock
from rlmesh.runtime.process.forked import end_child, forget_in_children
from rlmesh.runtime.rpc import exported, exported_functions
from rlmesh.runtime.runtime import Runtime
from rlmesh.runtime.serving.activity_board import Board, board_path, link_board
from rlmesh.wire.failure import format_error

__all__ = ["exec_main", "forked_main", "reseed"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

MASTER_TIMEOUT_S = 30.0
FAILURE_TIMEOUT_S = 5.0
LAST_REPORTS_S = 2.0
"""Seconds for which the end of a member waits for the master to take its last reports."""
LAST_ANSWERS_S = 1.0
"""Seconds that answers may take that ``run()`` did not wait for, once it is over."""
BOOK_WAIT_S = 30.0


def forked_main(payload: bytes, agent: int) -> int:
    """Become a member, in a fork of the zygote; return the exit code. ``payload``: a pickled `WorkerSpec`."""
    spec: WorkerSpec = pickle.loads(payload)
    _use_null_input()
    log = open_log(spec.log_path)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    try:
        if make_claim(spec.claim) != os.getpid():
            print_error(f"{spec.name}: this process was forked too late and ends; its agent starts another one")
            return 1
    except OSError as error:
        print_error(f"{spec.name} does not begin: it cannot claim its start by {spec.claim}: {error}")
        return 1
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(spec.env)
    time.tzset()
    return _become(spec, agent)


def exec_main(agent: int) -> int:
    """Become a member, in a new program; return the exit code. Standard input has a pickled `WorkerSpec`."""
    with os.fdopen(os.dup(0), "rb") as file:
        spec: WorkerSpec = pickle.load(file)
    _use_null_input()
    return _become(spec, agent)


def _use_null_input() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    if null != 0:  # 0 is free after the zygote's socket was closed
        os.dup2(null, 0)
        os.close(null)


def _become(spec: WorkerSpec, agent: int) -> int:
    if not become_member(agent, _comm(spec)):
        return 1
    # First of all: processes that are started before this would stay outside of the group.
    if spec.cgroup and (why := control_groups.enter(spec.cgroup)):
        print_error(f"{spec.name}: it has no control group of its own: {why}")
    os.environ[ownership.MEMBER_MARK] = f"{spec.role}:{spec.rank}:{spec.incarnation}"
    faulthandler.enable(2)
    stacks.listen(spec.socket_dir, spec.role, spec.rank)
    if spec.binding is not None:
        for failed in bind(spec.binding):  # before other threads start, which inherit the binding
            print_error(f"{spec.role}:{spec.rank}: not bound to {failed}")
    flush_c_output_by_line()
    own_output.protect()
    _link_logs(spec)
    take_over(spec.program, spec.import_roots, spec.main_path)
    reseed(spec)
    member = WorkerMember(spec)
    atexit.register(member.end_by_signal)  # registered first, so that it runs after the handlers of user code
    code = member.live()
    set_current_worker(None)
    bound_exit(code, spec.grace_s)
    return code


def _comm(spec: WorkerSpec) -> str:
    """``ROLE:rank`` in the 15 bytes that the kernel stores: a long role is cut, not the rank."""
    rank = f":{spec.rank}"
    return spec.role[: 15 - len(rank)] + rank


def _link_logs(spec: WorkerSpec) -> None:
    """Link the log under the names of the fused members as well."""
    for member in spec.fused:
        link = member_log(spec.run_dir, member.role, member.rank)
        try:
            link.symlink_to(Path(spec.log_path).name)
        except FileExistsError:
            pass  # made by an earlier incarnation of this member
        except OSError as error:
            print_error(f"{spec.name}: {link} could not be made: {error}")


class _Failed(Exception):
    """User code raised; the master has the report."""


class _Role:
    """One member of a process: its specification, and its object, context and functions."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.object: object = None
        self.context: WorkerContext | None = None
        self.run: Callable[[], object] | None = None
        self.functions: Mapping[str, Callable[..., Any]] = {}

    @property
    def restored(self) -> int | None:
        return self.context.restored if self.context is not None else None

    def hook(self, name: str, *args: object) -> None:
        hook = getattr(self.object, name, None)
        if callable(hook):
            call_plainly(f"{type(self.object).__name__}.{name}()", hook, *args)


class WorkerMember:
    """The life of one member, and of the members fused with it, on the main thread."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self._roles = tuple(map(_Role, spec.members))
        self._objects: dict[str, object] = dict.fromkeys(role.spec.role for role in self._roles)
        self._user_config: Any = None
        self._by_signal = self._forked = False
        forget_in_children(self)

    def forked(self) -> None:
        """Reset a forked child: it is not a member, and ends as any process does."""
        self._forked = True
        atexit.unregister(self.end_by_signal)
        stacks.ignore()

    def live(self) -> int:
        """Run the member from start to end; return the exit code."""
        spec = self.spec
        runtime = Runtime.start(
            name=self.name,
            key=bytes.fromhex(spec.key_hex),
            socket_dir=spec.socket_dir,
            public=public_address(spec.host),
            job_id=spec.job_id,
            node_rank=spec.node_rank,
        )
        with runtime:
            runtime.outbound.default_timeout_s = spec.call_timeout_s
            self._runtime = runtime
            runtime.post(stacks.take_signals, spec.socket_dir, spec.role, spec.rank)
            runtime.outbound.peers.last_line_of = self._last_line_of
            master = runtime.peer(MASTER, spec.master_endpoint)
            self._master = master.options(timeout_s=MASTER_TIMEOUT_S, idempotent=True)
            self._outbox = Outbox(runtime, master, new_sender(f"{self.name}.{spec.incarnation}"))
            own_output.tell_losses(
                lambda text: self._outbox.put(Alarm(clock.epoch(), spec.role, spec.rank, None, text))
            )
            self._agent = runtime.peer(AGENT, spec.agent_endpoint).options(timeout_s=MASTER_TIMEOUT_S)
            self._orders = Orders(runtime, spec.grace_s)
            runtime.exit_hook = self._orders.exit
            self._orders.handle_signals()
            for role in self._roles:
                runtime.expect(role.spec.name)
            self._chaos_hooks = ChaosHooks(runtime, self._master)
            reporter = CallReporter(
                runtime, self._master, self.name, spec.incarnation, Path(spec.run_dir), self._open_board()
            )
            control = Control(runtime, self._orders, self._chaos_hooks, reporter, self.name)
            runtime.serve(CONTROL, control, incarnation=spec.incarnation, inline=True)
            rejections = RejectionReporter(runtime, partial(self._master.notify, "rejected", self.name))
            reporter.start()
            rejections.start()
            started = StartedChildren()
            if started.watch():
                Reaper(started).start(runtime)
            set_default_runtime(runtime)
            code = self._guarded(self._work)
            reporter.close()
            runtime.post(rejections.flush)
            self._outbox.drain(LAST_REPORTS_S)
            self._outbox.close()
            self._by_signal = self._orders.terminated and code == 0
        return code

    def _open_board(self) -> Board | None:
        """Open the activity board; None if the folder is full or gone, which only prevents a view from outside."""
        folder = self.spec.socket_dir
        try:
            board = Board(board_path(folder, self.name))
        except OSError:
            return None
        self._runtime.note_methods_on(board)
        for member in self.spec.fused:
            link_board(folder, self.name, f"{member.role}:{member.rank}")
        return board

    def _last_line_of(self, role: str, rank: int) -> str:
        """The last line of a member's log, if this node can read it."""
        return next(iter(last_lines(member_log(self.spec.run_dir, role, rank), 1)), "")

    def end_by_signal(self) -> None:
        """Kill this process by SIGTERM if SIGTERM ended the member, so that its exit status shows it."""
        if self._by_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _guarded(self, work: Callable[[], None]) -> int:
        try:
            work()
        except Terminated:
            print_error(f"{self.name}: SIGTERM; ends after teardown()")
            return self._guarded(self._teardown)
        except _Failed:
            return 1
        except SystemExit as exit:
            return exit_code(exit)
        except RLMeshError:
            traceback.print_exc()
            return 1
        return 0

    def _work(self) -> None:
        own, public = self._runtime.endpoint, self._runtime.public_endpoint or ""
        assert own is not None
        first = self._roles[0]
        for role in self._roles:
            self._call_master("register_member", MemberHello(*role.spec.key, os.getpid(), own, public))
        self._attempt(first, "does not have what the plan gave it", self._check_devices)
        for role in self._roles:
            self._build(role)
        self._restore_mask()
        runner = self._attempt(first, "cannot run", self._runner)
        self._orders.runs = runner.spec.name if runner is not None else ""
        self._await_book()
        for role in self._roles:
            with self._runtime.activity.occupied(f"{role.spec.name}.setup()"):
                self._attempt(role, "setup() failed", partial(role.hook, "setup"))
            if (restart := role.spec.restart) is not None:
                event = restart.with_restored(role.spec.rank, role.restored)
                with self._runtime.activity.occupied(f"{role.spec.name}.on_restart()"):
                    self._attempt(role, "on_restart() failed", partial(role.hook, "on_restart", event))
        self._attempt(
            first, "does not have what the plan gave it", lambda: check_torch_devices(self.name, self.spec.devices)
        )
        for role in self._roles:
            self._serve(role)
        self._chaos_hooks.served()
        for role in self._roles:
            self._call_master("member_ready", *role.spec.key, role.restored)
        while self._attempt(runner or first, "a listener of on_event() failed", self._orders.take) == "run":
            assert runner is not None and runner.run is not None
            self._run(runner, runner.run)
        self._teardown()

    def _build(self, role: _Role) -> None:
        set_current_worker(self._roles[0].context or self._context(role, None))  # while the own context is being made
        loaded = self._attempt(role, "the import of its entry point failed", partial(self._load, role))
        if loaded.build is not None:
            role.object = self._attempt(role, "its __init__() failed", loaded.build)
        role.run = loaded.run or getattr(role.object, "run", None)
        role.functions = loaded.functions
        self._objects[role.spec.role] = role.object

    def _runner(self) -> _Role | None:
        """The role whose ``run()`` the main thread runs."""
        having = [role for role in self._roles if role.run is not None]
        if len(having) > 1:
            names = " and ".join(role.spec.name for role in having)
            raise UsageError(f"{names} share a process and both have a run(): leave it to one of them")
        return having[0] if having else None

    def _serve(self, role: _Role) -> None:
        serve = partial(self._runtime.serve, role.spec.name, incarnation=role.spec.incarnation)
        if len(self._roles) == 1:
            serve(role.object, functions=role.functions)
            return
        assert role.context is not None
        functions = {**exported_functions(), **role.functions, **exported(role.object)}
        own = {name: acting_for(role.context, function) for name, function in functions.items()}
        serve(None, functions=own, fused=role is not self._roles[0])

    def _check_devices(self) -> None:
        spec = self.spec
        seen = check_devices(self.name, spec.devices, spec.binding, Machine(nvml=spec.nvml), os.environ)
        if seen is not None:
            print_error(f"{self.name}: sees {seen}, as planned")

    def _restore_mask(self) -> None:
        """Restore the planned device mask: the code of a role may change it when it is imported."""
        if wrong := mask_disagrees(self.spec.devices, os.environ):
            print_error(f"{self.name}: its code changed what rlmesh had set: {wrong}; it is set back")
            os.environ.update({name: self.spec.env[name] for name in (CUDA_MASK, CUDA_ORDER)})

    def _load(self, role: _Role) -> Loaded:
        loaded = load_entry(role.spec.entry, role.spec.main_path, role.spec.program)
        if role is self._roles[0]:
            self._user_config = load_user_config(role.spec)
        role.context = self._context(role, self._user_config)
        set_current_worker(self._roles[0].context)
        return loaded

    def _context(self, role: _Role, user_config: Any) -> WorkerContext:
        spec = role.spec
        real = [device.kind for device in spec.devices if device.kind != VIRTUAL]
        return WorkerContext(
            job_info=JobInfo(spec.job_name, spec.job_id, user_config, real[0].upper() if real else "CPU", spec.resume),
            role=spec.role,
            rank=spec.rank,
            world_size=spec.world_size,
            link=MasterLink(self._runtime, self._master, self._outbox, self._orders, spec.key),
            lease_link=DeviceLeaseClient(self._agents(spec), spec.node_rank, spec.key, spec.world_size),
            local_rank=spec.local_rank,
            local_world_size=spec.local_world_size,
            node_rank=spec.node_rank,
            node_name=spec.node_name,
            incarnation=spec.incarnation,
            run_dir=Path(spec.run_dir),
            group=spec.group,
            devices=tuple(device.uuid for device in spec.devices),
            lease_timeout_s=spec.call_timeout_s,
            objects=self._objects,
        )

    def _agents(self, spec: WorkerSpec) -> dict[int, MemberHandle]:
        """The agents of the nodes whose devices the member's group leases."""
        others = {
            node: self._runtime.peer(AGENT, endpoint).options(timeout_s=MASTER_TIMEOUT_S)
            for node, endpoint in spec.lease_agents
            if node != spec.node_rank
        }
        return {**others, spec.node_rank: self._agent}

    def _await_book(self) -> None:
        """Wait for the address book, so that ``setup()`` may already call other roles."""
        if not self._orders.book_arrived.wait(BOOK_WAIT_S):
            logger.warning("%s: the master sent no address book within %g s", self.name, BOOK_WAIT_S)

    def _run(self, role: _Role, run: Callable[[], object]) -> None:
        def call() -> None:
            try:
                call_plainly("run()", run)
            except SystemExit as exit:
                if exit_code(exit) != 0:
                    raise

        self._orders.run_began_at = time.monotonic()
        with self._runtime.main_busy(), self._runtime.activity.occupied(f"{role.spec.name}.run()"):
            self._attempt(role, "run() failed", call)
        self._orders.run_began_at = None
        self._runtime.activity.await_answers(LAST_ANSWERS_S)  # so that a failure that nobody waited for is in the log
        self._outbox.drain(MASTER_TIMEOUT_S)  # the job may end when the master learns that run() has ended
        self._call_master("run_finished", *role.spec.key)

    def _teardown(self) -> None:
        self._orders.phase = "ending"
        for role in reversed(self._roles):
            if (stop := self._orders.last_stop) is not None:
                self._attempt(role, "on_stop() failed", partial(role.hook, "on_stop", stop))
            self._attempt(role, "teardown() failed", partial(role.hook, "teardown"))

    def _call_master(self, method: str, *args: object) -> None:
        self._master.call(method, *args).result()

    def _attempt(self, role: _Role, what: str, work: Callable[[], T]) -> T:
        """Run user code of a role; print and report an exception.

        Raises:
            _Failed: the code raised.
        """
        name = role.spec.name
        try:
            with acting_as(role.context) if role.context is not None and len(self._roles) > 1 else nullcontext():
                done = work()
            if self._forked:
                end_child(None)
            return done
        except BaseException as error:
            if self._forked:
                end_child(error)
            if not isinstance(error, Exception):
                raise
            origin = origin_of(error)
            text = format_error(error) + memory_limits(error)
            if self._orders.ending and origin.from_call:  # the called member has ended before
                print_error(f"{name}: ends with the job, which cut a call short: {text.rstrip().splitlines()[-1]:.200}")
            else:
                print_error(f"{name}: {what}\n{text}")
            master = self._master.options(timeout_s=FAILURE_TIMEOUT_S)
            try:
                master.call("member_failed", *role.spec.key, portable_error(error), text, origin).result()
            except RLMeshError as unheard:
                print_error(f"{name}: the master got no report: {unheard}")
            raise _Failed from error


if __name__ == "__main__":
    from rlmesh.agent.worker import worker

    sys.exit(worker.exec_main(int(sys.argv[1])))
