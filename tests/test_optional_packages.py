"""An optional package that is installed but broken is told with what its import raised, and is not taken as absent."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh.errors import UsageError, import_fault
from rlmesh.job.status import MetricRecord
from rlmesh.observe.files.metric_files import MetricsWriter

BROKEN = "undefined symbol: _ZN3abc"
FAULT = f"is installed, but its import fails (ImportError: {BROKEN}): repair its installation, or remove it"

Break = Callable[..., None]


def _forget(package: str, patch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        patch.delitem(sys.modules, name)


class _Absent:
    """A finder for which a package is not installed."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, *args: object) -> None:
        if name == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture
def break_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Break:
    """Function that lets the import of a package raise an error, or run another program."""

    def do(package: str, program: str = f"raise ImportError({BROKEN!r})") -> None:
        folder = tmp_path / "packages" / package
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(program)
        monkeypatch.syspath_prepend(str(folder.parent))
        _forget(package, monkeypatch)

    return do


@pytest.fixture
def remove_package(monkeypatch: pytest.MonkeyPatch) -> Break:
    """Function that makes a package one that is not installed."""

    def do(package: str) -> None:
        _forget(package, monkeypatch)
        monkeypatch.setattr(sys, "meta_path", [_Absent(package), *sys.meta_path])

    return do


def test_a_dependency_that_is_missing_does_not_make_a_package_absent() -> None:
    own, other = (ModuleNotFoundError(f"No module named {name!r}", name=name) for name in ("minari", "h5py"))
    assert import_fault("minari", own, "rlmesh[minari]") == "minari is not installed: pip install 'rlmesh[minari]'"
    assert "minari is installed, but its import fails (ModuleNotFoundError: No module named 'h5py')" in import_fault(
        "minari", other, "rlmesh[minari]"
    )


@pytest.mark.parametrize(
    "program, said",
    [
        (f"raise ImportError({BROKEN!r})", FAULT),
        ("import no_such_dependency", "(ModuleNotFoundError: No module named 'no_such_dependency')"),
        ("raise RuntimeError('the CPU has no AVX')", "(RuntimeError: the CPU has no AVX)"),
    ],
)
def test_a_broken_envpool_is_told_where_an_id_may_be_its_own(break_package: Break, program: str, said: str) -> None:
    pytest.importorskip("gymnasium")
    from rlmesh.envs.environments.envpool_vector import EnvPoolVector
    from rlmesh.envs.environments.registry import env_creator_of

    break_package("envpool", program)
    with pytest.raises(UsageError) as raised:
        env_creator_of("Pong-v5")
    assert "neither register_env nor Gymnasium knows the environment 'Pong-v5'" in str(raised.value)
    assert "EnvPool cannot be asked: envpool is installed, but" in str(raised.value) and said in str(raised.value)
    with pytest.raises(UsageError) as raised:
        EnvPoolVector("CartPole-v1", 1, lambda start: [start], config={})
    assert "vectorize_mode='envpool': envpool is installed, but" in str(raised.value) and said in str(raised.value)
    creator: Any = env_creator_of("CartPole-v1")  # Gymnasium has it
    creator({}).close()


def test_without_envpool_an_unknown_id_is_what_is_told(remove_package: Break) -> None:
    pytest.importorskip("gymnasium")
    from rlmesh.envs.environments.envpool_vector import EnvPoolVector
    from rlmesh.envs.environments.registry import env_creator_of

    remove_package("envpool")
    with pytest.raises(UsageError, match=r"there is no environment 'CartPol-v1'.* Did you mean 'CartPole-v1'\?"):
        env_creator_of("CartPol-v1")
    with pytest.raises(UsageError, match=r"envpool is not installed: pip install 'rlmesh\[envpool\]'"):
        EnvPoolVector("CartPole-v1", 1, lambda start: [start], config={})


def test_a_broken_package_of_a_namespace_is_told(break_package: Break) -> None:
    pytest.importorskip("gymnasium")
    from rlmesh.envs.environments.registry import env_creator_of

    break_package("ale_py")
    with pytest.raises(UsageError) as raised:
        env_creator_of("ALE/Pong-v5")
    assert str(raised.value) == f"the environment 'ALE/Pong-v5': ale_py {FAULT}"


def test_a_broken_minari_is_told(break_package: Break) -> None:
    pytest.importorskip("gymnasium")
    from rlmesh.envs.offline.sources import source_problem

    break_package("minari")
    assert source_problem("minari:D4RL/door/human-v2") == f"input_='minari:D4RL/door/human-v2': minari {FAULT}"


def test_pictures_that_a_broken_matplotlib_cannot_draw_are_told_with_a_warning(
    tmp_path: Path, break_package: Break, remove_package: Break, caplog: pytest.LogCaptureFixture
) -> None:
    from rlmesh.observe.run_report import draw_report
    from rlmesh.tune.curves import PANELS, draw_curves

    writer = MetricsWriter(tmp_path)
    writer.write(MetricRecord(1.0, "TRAINER", 0, 1, {"loss": 1.0}))
    writer.close()
    rows = {"trial": [{"timesteps_total": 1, PANELS[0][1]: 1.0}, {"timesteps_total": 2, PANELS[0][1]: 2.0}]}

    def told() -> list[tuple[str, str]]:
        caplog.clear()
        with caplog.at_level("INFO"):
            assert draw_report(tmp_path) is None and draw_curves(tmp_path / "curves.png", rows) is None
        return [(each.levelname, each.getMessage()) for each in caplog.records]

    break_package("matplotlib")
    drawn = ("no report was drawn", "no curves were drawn")
    assert told() == [("WARNING", f"{each}: matplotlib {FAULT}") for each in drawn]
    remove_package("matplotlib")
    absent = "matplotlib is not installed: pip install 'rlmesh[report]'"
    assert told() == [("INFO", f"{each}: {absent}") for each in drawn]


def test_a_broken_omegaconf_is_told(tmp_path: Path, break_package: Break) -> None:
    pytest.importorskip("torch")
    from rlmesh.rl import Run

    break_package("omegaconf")
    (tmp_path / "run.yaml").write_text("steps: 1\n")
    with pytest.raises(UsageError) as raised:
        Run.from_config(tmp_path / "run.yaml")
    assert str(raised.value) == f"{tmp_path}/run.yaml: YAML needs OmegaConf: omegaconf {FAULT}. Or write JSON"


def test_a_broken_liger_is_told_also_where_nobody_asked_for_it(
    break_package: Break, remove_package: Break, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torch")
    from rlmesh.rl.engines.training.liger import use_liger_layers

    model: Any = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=SimpleNamespace(type="cuda"))]))
    break_package("liger_kernel")
    assert use_liger_layers(model, None) is False
    assert caplog.messages == [f"Liger is not used: liger_kernel {FAULT}"]
    with pytest.raises(UsageError, match="undefined symbol"):
        use_liger_layers(model, True)
    caplog.clear()
    remove_package("liger_kernel")
    assert use_liger_layers(model, None) is False and caplog.messages == []


@pytest.mark.parametrize("broken", [False, True])
def test_the_head_tells_that_a_broken_triton_makes_it_slow(
    broken: bool, break_package: Break, remove_package: Break, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    pytest.importorskip("torch")
    from rlmesh.rl.head.log_probs import _kernels

    monkeypatch.delitem(sys.modules, "rlmesh.rl.head.cuda_kernels", raising=False)
    (break_package if broken else remove_package)("triton")
    assert _kernels.__wrapped__() is None
    assert caplog.messages == [f"the head computes without its kernels: triton {FAULT}"] * broken
