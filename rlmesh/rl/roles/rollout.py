"""`RolloutRole`: an engine that samples with the weights that it was pushed last."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rlmesh import ReceivesWeights, current_worker, rpc
from rlmesh.rl.engines.rollout import RolloutEngine, Sample, SamplingParams

__all__ = ["RolloutRole", "make_rollout_engine"]


class RolloutRole(ReceivesWeights):
    """Samples responses. Override `make_engine` for an engine of your own."""

    engine: RolloutEngine

    def setup(self) -> None:
        self.run_settings: Any = current_worker().job_info.user_config
        self.rank = current_worker().rank
        self.engine = self.make_engine()
        self.receive_weights(self.engine.sink)

    def teardown(self) -> None:
        self.close_weights()
        self.engine.close()

    def make_engine(self) -> RolloutEngine:
        """An engine that serves nothing before the first push of weights."""
        return make_rollout_engine(self.run_settings)

    @rpc
    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Sample]:
        """One sample per prompt. Each engine draws from a seed of its own, which the call's seed determines."""
        seed = None if params.seed is None else params.seed * 1009 + self.rank
        return self.engine.generate(prompts, dataclasses.replace(params, seed=seed))


def make_rollout_engine(run: Any) -> RolloutEngine:
    """The engine that the settings of a run name."""
    settings = run.rollout
    if settings.engine == "transformers":
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from rlmesh.rl.engines.transformers import TransformersEngine

        if settings.threads and not torch.cuda.is_available():
            torch.set_num_threads(settings.threads)
        model = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32).eval()
        if torch.cuda.is_available():
            model = model.cuda()
        tokenizer = AutoTokenizer.from_pretrained(run.model)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
        options = {"lora": run.actor.lora.options(), "tokenizer": tokenizer, **settings.options}
        return TransformersEngine(model, pad_token_id=pad, **options)
    from rlmesh.rl.engines.vllm.async_engine import AsyncVllmEngine
    from rlmesh.rl.engines.vllm.sync_engine import VllmEngine

    kinds: dict[str, Any] = {"vllm": VllmEngine, "vllm-async": AsyncVllmEngine}
    longest = run.max_prompt_tokens + settings.max_tokens
    options = {"dtype": "float32", "max_model_len": longest, **settings.options}
    engine: RolloutEngine = kinds[settings.engine](run.model, **options)
    return engine
