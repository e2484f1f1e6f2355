"""Document 002, step 2: remote methods are called as plain functions, wherever they are needed."""

# The documents' code, as it is written there: neither typed nor sorted as ours.
# mypy: ignore-errors
# ruff: noqa
# utils/experience_maker.py
from .. import remote_call


class SamplesGenerator:
    def __generate_vllm(self, *args, **kwargs):
        all_prompt_token_ids, sampling_params = args
        all_outputs = remote_call.vllm_generate(all_prompt_token_ids, sampling_params)
        return all_outputs

    def generate_samples(self, prompts, params):
        with remote_call.vllm_running(True):
            return list(self.__generate_vllm(prompts, params))
