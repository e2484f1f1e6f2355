"""The inside of the sandbox, run as a file by an interpreter of its own; see :mod:`rlmesh.rl.rewards.sandbox`.

There are three processes. The *spawner* leaves the namespaces of the host and starts the *keeper*, which is process 1
of the new ones. The keeper builds a file system. For each case (a source to run) it starts, watches and ends one
*program*, a process that gives up all privileges before it runs the untrusted code.

The keeper and the parent exchange lines of JSON. The parent sends a case, and the keeper says when the program has
loaded. Then the parent sends the test, or null. At the end the keeper reports how the program ended.

Only the standard library is imported: nothing else is visible here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import selectors
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

NOBODY = 65534
POLL_S = 0.02
WORK = "/box"
NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000  # user mount pid net ipc uts
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH, CLONE_NEWNS, AT_RECURSIVE = 2, 0x00020000, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
# System calls that get memory beyond the limits, look at other processes, or open more of the kernel to attacks:
# memfd_create, memfd_secret, shmget, msgget, semget, mq_open, io_uring_setup, bpf, userfaultfd, add_key, request_key,
# keyctl, perf_event_open, ptrace, process_vm_readv, process_vm_writev.
DENIED = {
    "x86_64": (0xC000003E, 155, (319, 447, 29, 68, 64, 240, 425, 321, 323, 248, 249, 250, 298, 101, 310, 311)),
    "aarch64": (0xC00000B7, 41, (279, 447, 194, 186, 190, 180, 425, 280, 282, 217, 218, 219, 241, 117, 270, 271)),
}
MOUNT_SETATTR = 442

libc = ctypes.CDLL(None, use_errno=True)


def main() -> NoReturn:
    """Run as the spawner."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    settings = json.loads(sys.argv[1])
    if os.getppid() != settings["parent"]:
        os._exit(1)
    os.umask(0o077)
    if settings["isolated"]:
        try:
            check("unshare", libc.unshare(NAMESPACES))
        except OSError as error:
            say({"error": str(error)})
            os._exit(1)
        say({"ready": True})
        take()  # the parent has mapped the users
    else:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper = os.fork()
    if keeper:
        # From here on only the keeper reads and writes these: their end tells the parent that it has ended.
        os.close(0)
        os.close(1)
        os.waitpid(keeper, 0)
        os._exit(0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        keep(settings)
    except OSError as error:
        say({"error": str(error)})
    os._exit(0)


def keep(settings: dict[str, Any]) -> None:
    """Run as the keeper: prepare, then run the cases that come in, one line each."""
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    if settings["isolated"]:
        build_root(settings["visible"])
    else:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    say({"ready": True})
    while (case := take()) is not None:
        say(run_case(case, settings))


def build_root(visible: dict[str, str]) -> None:
    """Make a file system of read-only folders, a few devices and nothing else, and move into it."""
    root = "/sys"  # the new root is mounted here: every system has this folder, and no program needs it
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.umask(0o022)
    for source, target in visible.items():
        if os.path.islink(source):
            os.symlink(os.readlink(source), root + target)
        else:
            os.makedirs(root + target, exist_ok=True)
            mount(source, root + target, "", MS_BIND | MS_REC)
            read_only(root + target, AT_RECURSIVE)
    os.mkdir(f"{root}/dev")
    for device in ("null", "zero", "full", "random", "urandom"):
        with open(f"{root}/dev/{device}", "wb"):
            pass
        mount(f"/dev/{device}", f"{root}/dev/{device}", "", MS_BIND)
    for folder in ("proc", WORK[1:]):
        os.mkdir(f"{root}/{folder}")
    with contextlib.suppress(FileExistsError):
        os.symlink(WORK, f"{root}/tmp")
    mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.chdir(root)
    check("pivot_root", libc.syscall(DENIED[platform.machine()][1], b".", b"."))
    check("umount", libc.umount2(b".", MNT_DETACH))
    os.chdir("/")
    read_only("/", 0)
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")


def run_case(case: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Run one program, and give its status, its output and its answer."""
    out, err, into = os.pipe(), os.pipe(), os.pipe()
    ours, theirs = socket.socketpair()
    program = os.fork()
    if not program:
        try:
            for source, target in ((into[0], 0), (out[1], 1), (err[1], 2), (theirs.fileno(), 3)):
                os.dup2(source, target)
            os.closerange(4, 65536)
            enter(case, settings)
            code = execute(case["source"], settings["paths"])
        except BaseException:
            with contextlib.suppress(BaseException):
                traceback.print_exc()
            code = 1
        os._exit(code)
    for own in (into[0], out[1], err[1]):
        os.close(own)
    theirs.close()
    try:
        return Watched(case, settings, program, into[1], {out[0]: "stdout", err[0]: "stderr"}, ours).run()
    finally:
        end_all(settings["isolated"])
        ours.close()
        for own in (out[0], err[0]):
            os.close(own)
        if not settings["isolated"]:
            empty(settings["folder"])


class Watched:
    """A running program: writes its input, reads its output, and ends it at the first limit that it breaks."""

    def __init__(
        self, case: dict[str, Any], settings: dict[str, Any], program: int, into: int, outputs: dict[int, str],
        channel: socket.socket,
    ) -> None:  # fmt: skip
        self.settings, self.program, self.into, self.channel = settings, program, into, channel
        self.deadline = time.monotonic() + case["wall_s"]
        self.left = memoryview(case["stdin"].encode("utf-8", "replace"))
        self.names = {**outputs, channel.fileno(): "answer"}
        self.found = {name: bytearray() for name in self.names.values()}
        self.asked, self.fault = False, ""
        self.ended: int | None = None

    def run(self) -> dict[str, Any]:
        """Wait for the end of the program."""
        with selectors.DefaultSelector() as self.selector:
            for one in (self.into, *self.names):
                os.set_blocking(one, False)
            for one in self.names:
                self.selector.register(one, selectors.EVENT_READ)
            self.selector.register(self.into, selectors.EVENT_WRITE)
            while not self.fault:
                last_look = self.ended is not None
                for key, _ in self.selector.select(0 if last_look else POLL_S):
                    if key.fd == self.into:
                        self.feed()
                    else:
                        self.read(key.fd)
                if last_look:
                    break
                self.look()
            if self.into in self.selector.get_map():
                os.close(self.into)
        return self.verdict()

    def feed(self) -> None:
        """Write standard input, and close it at its end."""
        with contextlib.suppress(BlockingIOError):
            try:
                self.left = self.left[os.write(self.into, self.left[:65536]) :]
            except BrokenPipeError:
                self.left = self.left[:0]
        if not self.left:
            self.selector.unregister(self.into)
            os.close(self.into)

    def read(self, fd: int) -> None:
        """Read what the program wrote."""
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        name = self.names[fd]
        self.found[name] += data
        if not data:
            self.selector.unregister(fd)
        elif sum(map(len, self.found.values())) > self.settings["output_bytes"]:
            self.fault = "output"
        elif name == "answer" and not self.asked and b"\n" in data:
            # The program has loaded. The test is read only now, so that no code sees it while the program loads.
            self.asked = True
            self.found[name].clear()
            say({"loaded": True})
            self.channel.settimeout(1)
            with contextlib.suppress(OSError):
                self.channel.sendall(json.dumps(take()).encode() + b"\n")
            self.channel.setblocking(False)

    def look(self) -> None:
        """Find out if the program has ended, or broken a limit."""
        pid, ended = os.waitpid(self.program, os.WNOHANG)
        if pid:
            self.ended = ended
        elif time.monotonic() > self.deadline:
            self.fault = self.fault or "timeout"
        elif self.settings["isolated"] and resident() > self.settings["memory_bytes"]:
            self.fault = self.fault or "memory"

    def verdict(self) -> dict[str, Any]:
        """The report for the parent: how the program ended."""
        texts = {name: data.decode("utf-8", "replace") for name, data in self.found.items()}
        code = 0 if self.ended is None else os.waitstatus_to_exitcode(self.ended)
        if not self.fault and code:
            out_of_time = code in (-signal.SIGXCPU, -signal.SIGKILL)
            memory = texts["stderr"].rstrip().rpartition("\n")[2].startswith("MemoryError")
            self.fault = "timeout" if out_of_time else "memory" if memory else "error"
        return {"status": self.fault or "ok", "code": code, **texts, "stderr": texts["stderr"][-4000:]}


def enter(case: dict[str, Any], settings: dict[str, Any]) -> None:
    """Set the limits and give up all privileges, in the program's own process."""
    os.setsid()
    if settings["isolated"]:
        check("unshare", libc.unshare(CLONE_NEWNS))
        options = f"size={settings['folder_bytes']},nr_inodes=2000,mode=777"
        mount("tmpfs", WORK, "tmpfs", MS_NOSUID | MS_NODEV, options)
        check("umount", libc.umount2(b"/proc", MNT_DETACH))
    folder = WORK if settings["isolated"] else settings["folder"]
    os.chdir(folder)
    seconds, memory = case["cpu_s"], settings["memory_bytes"]
    for kind, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, settings["folder_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(kind, (most, most))
    if settings["isolated"]:  # outside a user namespace, the limit would count all processes of this user
        resource.setrlimit(resource.RLIMIT_NPROC, (settings["processes"], settings["processes"]))
        if os.getuid() != NOBODY:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        for capability in range(64):
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        check("capset", libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))
    check("no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    deny_calls()
    os.environ.clear()
    os.environ.update(HOME=folder, TMPDIR=folder, PATH="/usr/local/bin:/usr/bin:/bin", LANG="C.UTF-8")


def deny_calls() -> None:
    """Install a seccomp filter under which the calls of `DENIED` fail with EPERM."""
    architecture, _, calls = DENIED[platform.machine()]
    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
    rules = [(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, kill), (load, 0, 0, 0)]
    rules.append((at_least, len(calls) + 1, 0, 0x40000000))  # x32 numbers of the same calls
    rules += [(equal, len(calls) - place, 0, call) for place, call in enumerate(calls)]
    rules += [(end, 0, 0, allow), (end, 0, 0, refuse)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
    check("seccomp", libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0))


def execute(source: str, paths: list[str]) -> int:
    """Run the source as a main program, then the keeper's test; returns the exit code."""
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = ["main.py"]
    sys.path += paths
    for handled in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(handled, signal.SIG_DFL)
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    try:
        exec(compile(source, "main.py", "exec"), module.__dict__)
        answer(module.__dict__)
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    return code & 255


def answer(names: dict[str, Any]) -> None:
    """Report that the program has loaded, and carry out the keeper's request: call a function, or run tests."""
    with socket.socket(fileno=3) as channel, channel.makefile("rw", encoding="utf-8") as file:
        file.write("loaded\n")
        file.flush()
        ask = json.loads(file.readline())
        if ask is None:
            return
        if "tests" in ask:
            exec(compile(ask["tests"], "tests.py", "exec"), names)
            found = ask["secret"]
        else:
            function = names.get(ask["call"])
            if function is None and "Solution" in names:
                function = getattr(names["Solution"](), ask["call"], None)
            if function is None:
                raise NameError(f"the program defines no {ask['call']}")
            found = function(*ask["arguments"])
        file.write(json.dumps(found) + "\n")


def end_all(isolated: bool) -> None:
    """Kill what is left of the program, and wait for it."""
    while True:
        if isolated:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            for child in children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, 0)[0]:
                if not isolated:
                    break  # children of a process that ended are now children of this one: look again
        except ChildProcessError:
            return


def children() -> list[int]:
    """The direct children of this process."""
    own, found = os.getpid(), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == own:
                found.append(int(name))
    return found


def resident() -> int:
    """Bytes of memory that all processes of the sandbox hold, without this one."""
    pages = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        if name != "1":
            with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/statm", "rb") as file:
                pages += int(file.read().split()[1])
    return pages * resource.getpagesize()


def empty(folder: str) -> None:
    """Remove what a program left in its folder."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount, or raise an error that names the target."""
    done = libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode() or None)
    check(f"mount {target}", done)


def read_only(target: str, flags: int) -> None:
    """Make a mount read-only, without devices and set-user-id programs."""
    attributes = struct.pack("QQQQ", MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    done = libc.syscall(MOUNT_SETATTR, -100, target.encode(), flags, attributes, len(attributes))
    check(f"mount_setattr {target}", done)


def check(what: str, returned: int) -> None:
    """Raise the error of a system call that failed."""
    if returned < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def say(message: dict[str, Any]) -> None:
    """Write a line to the parent."""
    data = memoryview(json.dumps(message).encode() + b"\n")
    while data:
        data = data[os.write(1, data) :]


def take() -> Any:
    """Read a line of the parent; ``None`` at the end."""
    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(0, 65536)
        if not data:
            return None
        line += data
    return json.loads(line)


if __name__ == "__main__":
    main()
