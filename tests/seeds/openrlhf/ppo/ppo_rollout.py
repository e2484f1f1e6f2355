"""Document 002, step 3: methods are bound to the declared functions. The engine is a stub that counts on."""

# The documents' code, as it is written there: neither typed nor sorted as ours.
# mypy: ignore-errors
# ruff: noqa
from dataclasses import dataclass
from typing import List

from rlmesh import current_worker, rpc

from . import remote_call


@dataclass
class SamplingParams:
    max_tokens: int


@dataclass
class RequestOutput:
    prompt_token_ids: List[int]
    token_ids: List[int]
    engine: int
    weights: int


class LLM:
    def __init__(self):
        self.awake, self.version = False, 0

    def wake_up(self):
        self.awake = True

    def sleep(self):
        self.awake = False

    def generate(self, prompts, params):
        assert self.awake, "generate() on a sleeping engine"
        rank = current_worker().rank
        tail = range(1, params.max_tokens + 1)
        return [RequestOutput(p, [p[-1] + i for i in tail], rank, self.version) for p in prompts]


class VLLMActor:
    def __init__(self):
        self.llm = LLM()

    @rpc(remote_call.vllm_wakeup)
    def wake_up(self):
        self.llm.wake_up()

    @rpc(remote_call.vllm_generate)
    def generate(self, prompt_token_ids, params):
        return self.llm.generate(prompt_token_ids, params)

    @rpc(remote_call.vllm_sleep)
    def sleep(self):
        self.llm.sleep()

    @rpc(remote_call.weight_sync)
    def weight_sync(self, version):
        self.llm.version = version

    @rpc
    def end_job(self):
        assert not self.llm.awake
