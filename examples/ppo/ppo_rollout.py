"""A rollout engine: samples responses with the weights of the last push."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from transformers import Qwen2ForCausalLM

from rlmesh import ReceivesWeights, RestartEvent, current_worker, rpc
from rlmesh.rl import RolloutEngine, Sample, SamplingParams, TransformersEngine

from . import remote_call
from .common import MAX_LENGTH, job_config, pretrained
from .model import PAD_ID


class RolloutActor(ReceivesWeights):
    engine: RolloutEngine | None = None

    def setup(self) -> None:
        torch.set_num_threads(1)
        self.rank = current_worker().rank

    def on_restart(self, event: RestartEvent) -> None:
        """Set up a restarted process, which refuses to sample until the next push."""
        self.init(str(pretrained()))

    @rpc(remote_call.rollout_init)
    def init(self, model_path: str) -> None:
        """Make the engine; called again when the learners go back to a checkpoint, where the engine stays."""
        if self.engine is None:
            self.engine = make_engine(job_config().rollout_engine, model_path)
            self.receive_weights(self.engine.sink)

    @rpc(remote_call.rollout_generate)
    def generate(self, prompt_token_ids: Sequence[list[int]], params: SamplingParams) -> list[Sample]:
        if self.engine is None:
            raise RuntimeError("rollout_generate before rollout_init: there is no engine yet")
        own = dataclasses.replace(params, seed=(params.seed or 0) * 1009 + self.rank)
        return self.engine.generate(prompt_token_ids, own)

    @rpc(remote_call.end_job)
    def end_job(self) -> None:
        self.close_weights()
        if self.engine is not None:
            self.engine.close()


def make_engine(kind: str, model_path: str) -> RolloutEngine:
    """An engine that serves nothing before the first push."""
    if kind == "transformers":
        return TransformersEngine(Qwen2ForCausalLM.from_pretrained(model_path).eval(), pad_token_id=PAD_ID)
    from rlmesh.rl import AsyncVllmEngine, VllmEngine

    engines: dict[str, type[VllmEngine] | type[AsyncVllmEngine]] = {"vllm": VllmEngine, "vllm-async": AsyncVllmEngine}
    return engines[kind](model_path, dtype="float32", max_model_len=MAX_LENGTH, max_num_seqs=256)
