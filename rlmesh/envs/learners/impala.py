"""Learners of steps that older policies sampled: IMPALA and APPO."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from rlmesh.envs.batches import columns
from rlmesh.envs.batches.estimates import rows_that_go_on
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.learners.learner import Learner, writable
from rlmesh.envs.learners.schedule import scheduled
from rlmesh.envs.learners.sequences import states_in, with_the_last, zeroed
from rlmesh.envs.learners.vtrace import vtrace
from rlmesh.envs.modules.dense import through
from rlmesh.envs.modules.rl_module import RLModule, require_one_per_row

__all__ = ["APPOLearner", "IMPALALearner"]

GOES_ON, ENDS, END_OBS = "goes_on", "ends", "end_obs"
"""Tensors that are made of columns: see `IMPALALearner.tensors_of`."""
AFTER = "values_after"
"""With memory, a result of the training pass: the values after the rows of ``ends``."""


class IMPALALearner(Learner):
    """The policy gradient with V-trace (Espeholt et al. 2018, section 4.2), over whole fragments.

    ``−log π(a|s)·A + c_v·½·(V(s) − v)² − c_e·H`` with targets v and advantages A of `vtrace`. The policy that sampled
    is known by the log-probabilities that the batch recorded; all values are those of the module as it is now.

    With memory, a sequence begins with the state that the sampling policy had there. The value after a fragment's last
    step is that of the observation there, with the state after this step.
    """

    recurrent: ClassVar = True
    wants: ClassVar = (
        columns.OBS, columns.NEW_OBS, columns.ACTIONS, columns.REWARDS, columns.TERMINATEDS, columns.TRUNCATEDS,
        columns.EPS_ID, columns.T, columns.ACTION_LOGP,
    )  # fmt: skip

    def __init__(self, module: RLModule, config: Mapping[str, Any]) -> None:
        super().__init__(module, config)
        self.before_update()

    def before_update(self) -> None:
        self.entropy_coeff = scheduled(self.config["entropy_coeff"], self.steps)

    def edges(self, batch: SampleBatch) -> np.ndarray:
        return np.concatenate([[0], np.flatnonzero(~rows_that_go_on(batch))[:-1] + 1])

    def tensors_of(self, batch: SampleBatch, *, may_be_empty: bool = False) -> dict[str, torch.Tensor]:
        """The columns, and: where rows go on, the rows after which values are bootstrapped, the observations there.

        With memory, the observations are sequences, ``[sequences, time + 1, …]``, that after the last step included;
        the other columns are ``[rows, …]``, in the order of the sequences.
        """
        if not may_be_empty:
            self.check(batch)
        tensors = {name: torch.from_numpy(writable(batch[name])) for name in self.wants}
        goes_on = rows_that_go_on(batch)
        ends = np.flatnonzero(~goes_on & ~batch[columns.TERMINATEDS])
        tensors[GOES_ON], tensors[ENDS] = torch.from_numpy(goes_on), torch.from_numpy(ends)
        if not self.states:
            tensors[END_OBS] = tensors.pop(columns.NEW_OBS)[tensors[ENDS]]
            return tensors
        tensors |= self.sequences(batch, (columns.OBS, columns.NEW_OBS))
        new_obs = tensors.pop(columns.NEW_OBS)
        return {**tensors, columns.OBS: with_the_last(tensors[columns.OBS], new_obs, tensors[columns.MASK])}

    def outputs_of(self, module: RLModule, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The results of a module's ``forward_train``, ``[rows, …]``."""
        if columns.MASK not in batch:
            outputs = module.forward_train(batch)
            require_one_per_row(module, outputs)
            return outputs
        mask = batch[columns.MASK]
        there = torch.arange(mask.shape[1] + 1) <= mask.sum(1, keepdim=True)
        obs, states = zeroed(batch[columns.OBS], there), states_in(batch)
        outputs = dict(module.forward_train({columns.OBS: obs, columns.STATE_IN: states, columns.MASK: there}))
        outputs.pop(columns.STATE_OUT, None)
        require_one_per_row(module, outputs, axes=2)
        rows = {name: value[:, :-1][mask] for name, value in outputs.items()}
        sequence, place = mask.nonzero()[batch[ENDS]].T
        return {**rows, AFTER: outputs[columns.VF_PREDS].detach()[sequence, place + 1]}

    def loss(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        distribution = self.module.distribution
        assert distribution is not None
        outputs = self.outputs_of(self.module, batch)
        inputs, values = outputs[columns.ACTION_DIST_INPUTS], outputs[columns.VF_PREDS]
        logp = distribution.log_prob(inputs, batch[columns.ACTIONS])
        targets, advantages = self.traced(batch, logp.detach(), values.detach(), outputs.get(AFTER))
        policy_loss = -(logp * advantages).mean()
        return self.whole_loss(policy_loss, values, targets, inputs, {})

    def traced(
        self, batch: dict[str, torch.Tensor], logp: torch.Tensor, values: torch.Tensor,
        after: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Targets and advantages by V-trace, for the policy with these log-probabilities ``[rows]``.

        Args:
            after: values after the rows of ``ends``; None: computed from the observations there.
        """
        bootstraps = torch.zeros_like(values)
        if len(batch[ENDS]):
            if after is None:
                with torch.no_grad():
                    after = self.module.compute_values({columns.OBS: batch[END_OBS]})
            bootstraps[batch[ENDS]] = after.to(values.dtype)
        config = self.config
        return vtrace(
            logp - batch[columns.ACTION_LOGP], batch[columns.REWARDS], values, bootstraps, batch[GOES_ON],
            config["gamma"], clip_rho=config["vtrace_clip_rho_threshold"],
            clip_pg_rho=config["vtrace_clip_pg_rho_threshold"],
        )  # fmt: skip

    def whole_loss(
        self, policy_loss: torch.Tensor, values: torch.Tensor, targets: torch.Tensor, inputs: torch.Tensor,
        more: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
        """The loss of the policy plus those of values and entropy, and statistics."""
        distribution = self.module.distribution
        assert distribution is not None
        vf_loss = 0.5 * (values - targets).square().mean()
        entropy = distribution.entropy(inputs if self.entropy_coeff else inputs.detach()).mean()
        loss = policy_loss + self.config["vf_loss_coeff"] * vf_loss
        if self.entropy_coeff:
            loss = loss - self.entropy_coeff * entropy
        stats = {"policy_loss": policy_loss, "vf_loss": vf_loss, "entropy": entropy, **more}
        return loss, {name: value.detach() for name, value in stats.items()}


KEPT = 16
"""Batches of which a learner keeps what the target network gave."""
COUNTED = ("kl_coeff", "updates", "followed_at", "uncounted")


class APPOLearner(IMPALALearner):
    """The clipped ratio of PPO with a target network and V-trace (Luo et al. 2020, equation 5 and algorithm 1).

    The ratio of probabilities is ``min(π_sampled / π_target, ρ)·π / π_sampled``, the advantages are those of V-trace
    for the target policy. With ``use_kl_loss``, the divergence from the target policy is a part of the loss.

    Attributes:
        target: a copy of the module, which takes over a share ``tau`` of it every ``target_period`` updates.
    """

    def __init__(self, module: RLModule, config: Mapping[str, Any]) -> None:
        super().__init__(module, config)
        self.target = copy.deepcopy(module).requires_grad_(False).eval()
        self.kl_coeff = float(self.config["kl_coeff"])
        self.updates = self.followed_at = self.uncounted = 0
        self._known: dict[bytes, torch.Tensor] = {}  # by digest of observations, the last used ones last

    def loss(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        config, distribution = self.config, self.module.distribution
        assert distribution is not None
        outputs = self.outputs_of(self.module, batch)
        inputs, values = outputs[columns.ACTION_DIST_INPUTS], outputs[columns.VF_PREDS]
        actions, sampled = batch[columns.ACTIONS], batch[columns.ACTION_LOGP]
        logp = distribution.log_prob(inputs, actions)
        with torch.no_grad():
            target_inputs = self.target_inputs(batch)
            target_logp = distribution.log_prob(target_inputs, actions)
            from_target = (sampled - target_logp).exp().clamp(max=config["target_worker_clipping"])
        targets, advantages = self.traced(batch, target_logp, values.detach(), outputs.get(AFTER))
        ratio = from_target * (logp - sampled).exp()
        clip = scheduled(config["clip_param"], self.steps)
        policy_loss = -torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).mean()
        kl = distribution.kl(target_inputs, inputs if config["use_kl_loss"] else inputs.detach()).mean()
        more = {"kl": kl, "target_ratio": from_target.mean()}
        loss, stats = self.whole_loss(policy_loss, values, targets, inputs, more)
        return (loss + self.kl_coeff * kl if config["use_kl_loss"] else loss), stats

    def target_inputs(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The inputs of the distribution by the target network, ``[rows, …]``; called without gradients.

        Batches are used several times and the target moves rarely: the outputs of plain layers are kept until it moves.
        """
        layers = self.target.layers_to_act(explore=True)  # without those of values, where that is possible
        if layers is None:
            given: torch.Tensor = self.outputs_of(self.target, batch)[columns.ACTION_DIST_INPUTS]
            return given
        observations = batch[columns.OBS]
        digest = hashlib.blake2b(observations.numpy().tobytes(), digest_size=16).digest()
        known = self._known.pop(digest, None)
        self._known[digest] = through(observations, layers) if known is None else known
        if len(self._known) > KEPT:
            del self._known[next(iter(self._known))]
        return self._known[digest]

    def after_update(self, stats: dict[str, float]) -> None:
        if self.config["use_kl_loss"]:
            if stats["kl"] > 2.0 * self.config["kl_target"]:
                self.kl_coeff *= 1.5
            elif stats["kl"] < 0.5 * self.config["kl_target"]:
                self.kl_coeff *= 0.5
            stats["curr_kl_coeff"] = self.kl_coeff
        self.updates += 1
        if self.updates - self.followed_at >= self.config["target_period"]:
            self.follow(self.config["tau"])
            self.followed_at = self.updates

    def _count(self, rows: int) -> None:
        # Each batch of the circular buffer is given several times, and schedules are over sampled steps.
        counted, self.uncounted = divmod(self.uncounted + rows, self.config.get("uses", 1))
        super()._count(counted)

    @torch.no_grad()
    def follow(self, share: float) -> None:
        """Move the target by a share of its distance to the module; 1 copies the module."""
        self._known.clear()
        torch._foreach_lerp_(list(self.target.parameters()), list(self.module.parameters()), share)
        for late, now in zip(self.target.buffers(), self.module.buffers(), strict=True):
            late.copy_(now)

    def get_state(self) -> dict[str, Any]:
        numbers = {name: getattr(self, name) for name in COUNTED}
        return {**super().get_state(), "target": self.target.state_dict(), **numbers}

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self.target.load_state_dict(state["target"])
        self._known.clear()
        for name in COUNTED:
            setattr(self, name, state[name])
