"""The trainer of document 002: its diagram, two steps of it. Whatever is not as expected fails the job."""

# mypy: allow-untyped-calls, disable-error-code="arg-type"
from __future__ import annotations

from pathlib import Path

import torch

from rlmesh import FutureSequence, RLRoleType, current_worker

from . import remote_call
from .ppo_rollout import SamplingParams
from .utils.experience_maker import SamplesGenerator

PROMPTS = [[1], [2], [3], [4], [5]]


class PPOTrainerActor:
    def run(self) -> None:
        self.args = current_worker().job_info.user_config
        self.init_workers()
        for step in range(2):
            self.fit_step(step)
        for future in remote_call.save_checkpoint("last"):
            assert all(Path(path).read_text() == "2" for path in future.result())
        remote_call.end_job()
        current_worker().report(step=2, reward_mean=1.0)

    def init_workers(self) -> None:
        strategy = {"args": self.args.job_name}
        futures = [
            remote_call.reference_init(strategy, "ref"),
            remote_call.reward_init(strategy, "reward"),
            remote_call.critic_init(strategy, "critic"),
            remote_call.actor_init(strategy, "actor"),
        ]
        reference, reward, critic, actor = [future.result() for future in futures]
        assert (reference, reward, critic) == (["REFERENCE:0"], ["REWARD:0"], ["CRITIC:0"])
        assert actor == [("ACTOR:0", "0", "2"), ("ACTOR:1", "1", "2")], actor
        assert remote_call.group(RLRoleType.ACTOR) is remote_call.group(RLRoleType.ACTOR)

    def fit_step(self, step: int) -> None:
        samples = SamplesGenerator().generate_samples(PROMPTS, SamplingParams(max_tokens=2))
        assert [s.token_ids for s in samples] == [[p[0] + 1, p[0] + 2] for p in PROMPTS], samples
        assert [s.engine for s in samples] == [0, 0, 0, 1, 1], samples
        assert {s.weights for s in samples} == {step}, samples

        sequences = [torch.tensor(s.prompt_token_ids + s.token_ids) for s in samples]
        masks = [torch.ones(3, dtype=torch.bool) for _ in samples]
        rewards = remote_call.reward_forward(sequences)
        log_probs = remote_call.actor_forward(sequences, masks, masks)
        values = remote_call.critic_forward(sequences)
        ref_log_probs = remote_call.reference_forward(sequences)
        assert isinstance(log_probs, FutureSequence)
        assert len(log_probs) == len(PROMPTS)
        assert torch.equal(log_probs[-1], sequences[-1] - 1)  # the last shard is rank 1's
        for i, sequence in enumerate(sequences):
            assert rewards[i] == float(sequence.sum())
            assert torch.equal(log_probs[i], sequence - int(i > 2))
            assert torch.equal(values[i], sequence.float().mean())
            assert torch.equal(ref_log_probs[i], -sequence)

        experiences = [{"reward": reward} for reward in rewards]
        for future in (
            remote_call.actor_append_experience(experiences),
            remote_call.critic_append_experience(experiences),
        ):
            future.result()
        updates = [remote_call.critic_update(), remote_call.actor_update()]
        assert updates[0].result() == [5]
        assert updates[1].result() == [{"samples": 5, "updates": step + 1}] * 2
        remote_call.broadcast_to_vllm(step + 1)
