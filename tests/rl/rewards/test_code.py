"""Programs in the sandbox: right and wrong ones, and programs that attack."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlmesh.errors import UsageError
from rlmesh.rl.rewards import Reward, code
from rlmesh.rl.rewards.process_pool import ScoringPool
from rlmesh.rl.rewards.sandbox import Limits, Ran, Sandbox
from rlmesh.rl.types import Failed, Score
from tests.own_time import HANG_S, OwnTime

DOUBLE = "Here it is:\n```python\nprint(2 * int(input()))\n```\nDone."
TWICE = "```python\ndef twice(x):\n    return 2 * x\n```"
SMALL = Limits(cpu_s=2, memory_bytes=128 * 2**20, output_bytes=100_000, folder_bytes=2**20, processes=16)


def isolation() -> str:
    try:
        Sandbox().close()
    except UsageError as error:
        return str(error)
    return ""


REFUSED = isolation()
isolated = pytest.mark.skipif(bool(REFUSED), reason=REFUSED[:100])
BOTH = [pytest.param(True, marks=isolated), False]


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    if REFUSED:
        pytest.skip(REFUSED[:100])
    with Sandbox(SMALL) as made:
        yield made


@pytest.mark.parametrize("isolated", BOTH)
@pytest.mark.parametrize(
    ("response", "truth", "expected", "reason"),
    [
        (DOUBLE, {"inputs": ["2\n", "21"], "outputs": ["4", "42\n"]}, 1, ""),
        (DOUBLE, json.dumps({"inputs": ["2", "x"], "outputs": ["4", "5"]}), 0, "test 1: ValueError: invalid literal"),
        (DOUBLE, {"inputs": ["2"], "outputs": ["5"]}, 0, "test 0: wrong answer"),
        (TWICE, {"fn_name": "twice", "inputs": [[2], ["ab"]], "outputs": [4, "abab"]}, 1, ""),
        (TWICE, {"fn_name": "thrice", "inputs": [[2]], "outputs": [4]}, 0, "test 0: NameError: the program defines no"),
        (TWICE, "assert twice(2) == 4\nassert twice('a') == 'aa'", 1, ""),
        (TWICE, ["assert twice(2) == 4", "assert twice(2) == 5"], 0, "test 1: AssertionError"),
        (TWICE, {"test": "def check(f):\n    assert f(3) == 6", "entry_point": "twice"}, 1, ""),
        (TWICE, {"tests": ["assert twice(3) == 6"]}, 1, ""),
        ("print(4)", "assert True", 0, "no program"),
        ("```python\ndef twice(x) return\n```", "assert True", 0, "test 0: SyntaxError"),
        ("```python\nimport sys; sys.exit(0)\n```", "assert False", 0, "the program ended before its test"),
        ("```python\nimport os; os._exit(0)\n```", "assert False", 0, "the program ended before its test"),
        (
            "```python\nimport os\ndef twice(x): os._exit(0)\n```",
            {"fn_name": "twice", "inputs": [[2]], "outputs": [4]},
            0,
            "the program ended before its test",
        ),
        (
            "```\nclass Solution:\n    def twice(self, x): return (x, x)\n```",
            '{"fn_name": "twice", "inputs": [[1]], "outputs": [[1, 1]]}',
            1,
            "",
        ),
        ("```js\nalert()\n```\n```py\nprint(1)\n```", {"inputs": [""], "outputs": ["1"]}, 1, ""),
        (
            "```python\nimport threading\nthreading.Thread(target=lambda: print(7)).start()\n```",
            {"inputs": [""], "outputs": ["7"]},
            1,
            "",
        ),
    ],
)
def test_programs_are_scored_by_their_tests(
    response: str, truth: Any, expected: float, reason: str, isolated: bool
) -> None:
    found = code.compute_score(response, truth, isolated=isolated)
    assert found.value == expected and reason in found.reason, found


def test_shares_tolerances_and_values(box: Sandbox) -> None:
    truth = {"inputs": ["1", "2", "3"], "outputs": ["2", "5", "6"]}
    partial = code.compute_score(DOUBLE, truth, partial=True, score=3.0)
    assert partial.value == pytest.approx(2.0) and partial.metrics["passed"] == pytest.approx(2 / 3)
    third = "```python\nprint(1 / 3)\n```"
    assert code.compute_score(third, {"inputs": [""], "outputs": ["0.33333"]}).value == 0
    assert code.compute_score(third, {"inputs": [""], "outputs": ["0.33333"]}, tolerance=1e-4).value == 1
    kinds = "```python\ndef f(x): return {'a': [1, 2.0, None, True]}\n```"
    for right, value in (({"a": [1, 2, None, True]}, 1), ({"a": [1, 2, 0, True]}, 0), ({"a": [1, 2, None, 1]}, 0)):
        assert code.compute_score(kinds, {"fn_name": "f", "inputs": [[0]], "outputs": [right]}).value == value
    assert (
        code.compute_score("```python\nprint('nan')\n```", {"inputs": [""], "outputs": ["1"]}, tolerance=1).value == 0
    )


@pytest.mark.parametrize(
    "truth",
    [
        None, "", [], {"inputs": ["1"], "outputs": []}, {"inputs": []}, "{no json", 7,
        {"fn_name": "f", "inputs": [1], "outputs": [1]},
    ],
)  # fmt: skip
def test_a_truth_without_tests_is_refused(truth: Any) -> None:
    with pytest.raises(ValueError, match=r"ground truth must|list of its arguments"):
        code.compute_score(DOUBLE, truth)


ATTACKS = {
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", ("timeout", "memory")),
    "bomb of sessions": (
        "import os\nfor _ in range(10**6):\n    try:\n        if not os.fork(): os.setsid()\n    except OSError: pass",
        ("timeout", "memory", "ok"),
    ),
    "endless loop": ("while True: pass", ("timeout",)),
    "endless native call": ("10 ** 10 ** 8", ("timeout", "memory")),
    "deaf to signals": (
        "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n    except OSError: pass\n"
        "import time\ntime.sleep(60)",
        ("timeout",),
    ),
    "huge allocation": ("x = b'x' * 2**33", ("memory",)),
    "memory in many processes": (
        "import os, time\nfor _ in range(3): os.fork()\nx = b'x' * 60 * 2**20\ntime.sleep(30)",
        ("memory",),
    ),
    "a gigabyte of output": ("while True: print('x' * 10**6)", ("output",)),
    "a gigabyte of errors": ("import sys\nwhile True: sys.stderr.write('x' * 10**6)", ("output",)),
    "a full folder": ("f = open('big', 'wb')\nwhile True: f.write(b'x' * 10**6)", ("error",)),
    "many files": ("for i in range(10**6): open(str(i), 'w').close()", ("error",)),
    "deep recursion": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", ("error", "memory", "timeout")),
    "kill everybody": ("import os, signal\nos.kill(-1, signal.SIGKILL)", ("ok", "error", "timeout")),
    "kill the keeper": (
        "import os\nos.kill(1, 9)\nopen('x', 'w').write('alive')\nprint(open('x').read())",
        ("ok", "error"),
    ),
    "new privileges": ("import os\nos.setuid(0)", ("error",)),
}
SLOW = ("deep recursion", "endless native call", "a gigabyte of errors")


@isolated
@pytest.mark.parametrize(
    "attack", [pytest.param(one, marks=pytest.mark.slow) if one in SLOW else one for one in ATTACKS]
)
def test_an_attack_ends_alone(box: Sandbox, attack: str, own_time: OwnTime) -> None:
    source, expected = ATTACKS[attack]
    before = {process.pid for process in psutil.process_iter()}
    began = time.monotonic()
    ran = box.run(source, wall_s=3)
    assert ran.status in expected, ran
    assert own_time.since(began) < 6
    assert len(ran.stdout) + len(ran.stderr) < 300_000
    # The next program finds nothing of it.
    assert box.run("import os\nprint(os.listdir('.'))") == Ran("ok", "[]\n", "", None, 0)
    left = [p for p in psutil.process_iter(["ppid", "cmdline"]) if p.pid not in before and _of_sandbox(p)]
    assert left == []


def _of_sandbox(process: psutil.Process) -> bool:
    try:
        return any("sandbox_child" in word for word in process.cmdline())
    except psutil.Error:
        return False


@isolated
def test_nothing_of_the_parent_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_PARENT", "hunter2")
    (tmp_path / "secret").write_text("hunter2")
    own = [str(tmp_path / "secret"), __file__, "/etc/passwd", "/root/.ssh", str(Path.home() / ".netrc"), "/var", "/sys"]
    with (tmp_path / "secret").open() as inherited, Sandbox(SMALL) as box:
        os.set_inheritable(inherited.fileno(), True)
        ran = box.run(
            f"""
import os, glob, pathlib
assert not [p for p in {own!r} if os.path.exists(p)], [p for p in {own!r} if os.path.exists(p)]
assert 'SECRET_OF_THE_PARENT' not in os.environ
assert not glob.glob('/proc/*')
def is_open(n):
    try: os.fstat(n)
    except OSError: return False
    return True
assert [n for n in range(1024) if is_open(n)] == [0, 1, 2, 3], [n for n in range(1024) if is_open(n)]
assert os.getuid() == os.geteuid() != 0 and os.getgid() != 0 and os.getgroups() in ([], [65534])
assert os.getppid() == 1
print(os.path.realpath('.'), os.listdir('.'))
"""
        )
    assert (ran.status, ran.stdout) == ("ok", "/box []\n"), ran.stderr


@isolated
@pytest.mark.parametrize(
    "act",
    [
        "open('/usr/x', 'w')", "open('/x', 'w')", "os.mkdir('/dev/x')", "os.unlink('/bin/sh')", "os.chroot('.')",
        f"open({os.__file__!r}, 'a')", "os.mknod('x', 0o60666, os.makedev(8, 0))", "os.chmod('/usr/bin', 0o777)",
        "socket.create_connection(('127.0.0.1', PORT), 2)", "socket.create_connection(('1.1.1.1', 53), 2)",
        "socket.getaddrinfo('example.org', 80)", "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
        "call(libc.unshare(0x10000000))", "call(libc.unshare(0x40000000))", "call(libc.memfd_create(b'x', 0))",
        "call(libc.shmget(0, 4096, 0o1600))", "call(libc.ptrace(16, 1, 0, 0))", "call(libc.prctl(4, 1) - 1)",
        "call(libc.mount(b'proc', b'/proc', b'proc', 0, 0))", "resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
        "os.setgroups([0])", "os.nice(-5)",
    ],
)  # fmt: skip
def test_what_is_outside_cannot_be_reached_or_changed(box: Sandbox, act: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ran = box.run(
            f"""
import ctypes, os, resource, socket
libc, PORT = ctypes.CDLL(None, use_errno=True), {server.getsockname()[1]}
def call(code):
    if code < 0: raise OSError(ctypes.get_errno(), 'refused')
try:
    {act}
except (OSError, ValueError) as error:
    print('refused')
else:
    print('done')
"""
        )
    assert ran.stdout == "refused\n", ran


@isolated
def test_tests_cannot_be_read_before_the_program_has_loaded(box: Sandbox) -> None:
    spy = (
        "import gc, sys\nframe, seen = sys._getframe(), []\n"
        "while frame:\n    seen.append(repr(frame.f_locals))\n    frame = frame.f_back\n"
        "seen += [repr(o)[:10000] for o in gc.get_objects() if isinstance(o, (dict, str, list))]\n"
        "print('NEEDLE' + '_X' in ''.join(seen))"
    )
    assert box.test(spy, "assert 'NEEDLE_X'").stdout == "False\n"


def test_isolation_that_the_kernel_refuses_is_an_error_and_not_a_risk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "release", lambda: "5.10.0-8-amd64")
    with pytest.raises(UsageError, match=r"Linux 5\.10\.0-8-amd64 is older than 5\.14\. Programs cannot be isolated"):
        code.compute_score("nothing", "assert True")
    assert code.compute_score(TWICE, "assert twice(1) == 2", isolated=False).value == 1


def test_namespaces_that_are_forbidden_are_an_error(tmp_path: Path) -> None:
    """In a process whose user may have no more namespaces."""
    if REFUSED or os.geteuid() != 0:
        pytest.skip("needs root and namespaces")
    script = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "assert libc.unshare(0x10000000) == 0\n"
        "open('/proc/self/uid_map', 'w').write('0 0 1')\n"
        "open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"
        "from rlmesh.rl.rewards import code\n"
        "try: code.compute_score('x', 'assert True')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    said = "unshare: No space left on device. Programs cannot be isolated here, so none was run"
    assert done.stdout.startswith("UsageError") and said in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_without_isolation_limits_hold_and_no_process_stays(tmp_path: Path) -> None:
    with Sandbox(SMALL, isolated=False) as box:
        assert box.run("while True: pass", wall_s=5).status == "timeout"
        assert box.run("x = b'x' * 2**33").status == "memory"
        assert box.run("while True: print('x' * 10**6)").status == "output"
        later = f"    os.setsid()\n    time.sleep(1)\n    open({str(tmp_path / 'x')!r}, 'w')"
        orphan = f"import os, time\nif not os.fork():\n{later}"
        assert box.run(orphan).status == "ok"
        box.run("open('left', 'w')")
        assert box.run("import os\nprint(os.listdir('.'))").stdout == "[]\n"
        time.sleep(1.5)
        assert not (tmp_path / "x").exists()
        folder = box._folder
    assert folder is not None and not os.path.exists(folder)


@pytest.mark.parametrize("isolated", BOTH)
def test_programs_may_import_from_folders_that_are_given(tmp_path: Path, isolated: bool) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "extra_module.py").write_text("VALUE = 5")
    source = "import extra_module\nprint(extra_module.VALUE)"
    with Sandbox(SMALL, isolated=isolated, paths=[tmp_path / "given"]) as box:
        assert box.run(source).stdout == "5\n"
    with Sandbox(SMALL, isolated=isolated) as box:
        assert "No module named 'extra_module'" in box.run(source).stderr
    with pytest.raises(UsageError, match="there is no folder"):
        Sandbox(paths=[tmp_path / "none"])


@isolated
def test_a_scorer_that_is_killed_takes_its_program_along(tmp_path: Path) -> None:
    began, before = time.monotonic(), {process.pid for process in psutil.process_iter()}
    reward = Reward(code.compute_score, timeout_s=2.0, options={"total_s": 60.0, "cpu_s": 60})
    with ScoringPool({"code": reward.function}, workers=1, timeout_s=reward.timeout_s) as pool:
        outcome = pool.submit(
            "code", solution_str="```python\nwhile True: pass\n```", ground_truth="1", **reward.options
        )
        assert isinstance(outcome.result(30), Failed)
        right = pool.submit("code", solution_str=DOUBLE, ground_truth={"inputs": ["1"], "outputs": ["2"]})
        assert right.result(30) == Score(1.0, {"passed": 1.0})
    while any(_of_sandbox(one) for one in psutil.process_iter() if one.pid not in before):
        assert time.monotonic() - began < HANG_S, "a program is still there"
        time.sleep(0.05)


@isolated
def test_sandboxes_run_side_by_side_in_threads() -> None:
    found: list[float] = []

    def work() -> None:
        found.append(code.compute_score(DOUBLE, {"inputs": ["4"], "outputs": ["8"]}).value)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [1.0] * 4


def test_a_sandbox_that_died_is_a_fault_of_the_sandbox(box: Sandbox) -> None:
    with Sandbox(SMALL) as own:
        own._process.kill()
        own._process.wait()
        with pytest.raises(RuntimeError, match="the sandbox failed"):
            own.run("print(1)")
    with pytest.raises(UsageError, match="each limit must be"):
        Limits(cpu_s=0)


@isolated
@pytest.mark.parametrize(
    "program",
    [
        "class Deep(list): pass\nimport json\njson.dumps = lambda _: '[' * 100_000\ndef f(): return 1",
        "def f(): return 10 ** 4000",
        "def f(): return float('nan')",
        "def f(): return {1, 2}",
        "import sys\nsys.set_int_max_str_digits(0)\ndef f(): return 10 ** 5000",
        "def f(): return '\\ud800'",
        "f = 3",
        "x = '\ud800'",
        "def f(): return 1\n\0",
        "(" * 100_000,
        "import os\nos.write(3, b'x' * 10**6)",
        "import os\nos.write(3, b'loaded\\n' * 10)\nos.close(3)",
        "import os\nos.close(1), os.close(2), os.close(0)\ndef f(): return 2",
    ],
)
def test_odd_programs_are_wrong_and_no_failure_of_the_scorer(program: str) -> None:
    for tolerance in (0.0, 0.1):
        truth = {"fn_name": "f", "inputs": [[]], "outputs": [1]}
        found = code.compute_score(f"```python\n{program}\n```", truth, tolerance=tolerance)
        assert found.value == 0 and found.reason


def test_programs_are_found_in_long_responses_at_once() -> None:
    for unit in ("```python x\n", "```\n", "``` ", "`", "```a\n```\n", "\n"):
        began = time.process_time()
        code.program_of(unit * (100_000 // len(unit)))
        assert time.process_time() - began < 0.25
    assert code.program_of("```python\na\n```\n```python\nb\n  ```\n```python\nnever closed") == "b\n"
    assert code.program_of("```json\n{}\n```") is None and code.program_of("") is None
