"""BC and MARWIL: they learn from recorded steps (Wang et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlmesh.envs.algorithms.algorithm import Algorithm
from rlmesh.envs.algorithms.algorithm_config import AlgorithmConfig
from rlmesh.envs.algorithms.results import ResultDict
from rlmesh.envs.algorithms.train_ops import train_one_step
from rlmesh.envs.batches import columns
from rlmesh.envs.connectors.connector import ConnectorPipeline
from rlmesh.envs.learners.learner import MAX_SEQ_LEN, threads
from rlmesh.envs.offline.recorded_connectors import through_connectors
from rlmesh.envs.offline.recorded_sequences import RecordedSequences
from rlmesh.envs.offline.recorded_steps import RecordedSteps
from rlmesh.envs.offline.sources import parts_of, source_problem
from rlmesh.envs.runners.env_runner import EnvRunner
from rlmesh.envs.settings.allowed import WEIGHT, number
from rlmesh.errors import UsageError

if TYPE_CHECKING:
    from rlmesh.envs.learners.learner import Learner

__all__ = ["BC", "MARWIL", "BCConfig", "MARWILConfig"]


class MARWILConfig(AlgorithmConfig):
    """Settings of MARWIL, beside those of all algorithms:

    ============================================  ====================================================================
    ``offline_data(input_=…)``                    the recorded steps: see `rlmesh.envs.offline`
    ``beta``                                      how much actions with high returns are preferred; 0: not at all
    ``vf_coeff``                                  weight of half the squared error of the values
    ``moving_average_sqd_adv_norm_start``         the squared scale of the advantages at the start
    ``moving_average_sqd_adv_norm_update_rate``   share by which a minibatch moves it
    ``train_batch_size``                          rows of an update; with memory, rounded up to whole sequences
    ============================================  ====================================================================

    The environment gives the spaces, and is played by `Algorithm.evaluate` only. A truncated or cut episode is
    bootstrapped from the value of the observation after its last step.

    Connectors change recorded observations and rewards as they change those of an environment. A normaliser takes its
    mean and variance from all recorded steps, before the first update; evaluations use them too.

    With ``use_lstm`` or ``use_attention``, updates have sequences of ``max_seq_len`` steps. Recorded steps have no
    states of the module: at the beginning of each training step, it passes over the episodes that the updates draw
    from, and sequences begin with its states there.
    """

    algo_class: ClassVar = "rlmesh.envs.algorithms.marwil.MARWIL"
    is_offline: ClassVar = True
    training_defaults: ClassVar = {
        "beta": 1.0, "vf_coeff": 1.0, "moving_average_sqd_adv_norm_start": 100.0,
        "moving_average_sqd_adv_norm_update_rate": 1e-8,
    }  # fmt: skip
    allowed: ClassVar = {
        "beta": number(0, 100), "vf_coeff": WEIGHT, "moving_average_sqd_adv_norm_start": number(0, above=True),
        "moving_average_sqd_adv_norm_update_rate": number(0, 1),
    }  # fmt: skip
    changed_defaults: ClassVar = {"lr": 1e-4, "grad_clip": None, "train_batch_size": 2000, "adam_epsilon": 1e-8}

    def learner_class(self) -> type[Learner]:
        from rlmesh.envs.learners.marwil import MARWILLearner

        return MARWILLearner

    def problems(self) -> list[str]:
        values, found = self._values, super().problems()
        if values["input_"] is None:
            found.append("offline_data(input_=…): name the recorded steps")
        elif (problem := source_problem(values["input_"])) is not None:
            found.append(problem)
        if values["num_env_runners"]:
            found.append("num_env_runners: nothing is sampled; for evaluation, set evaluation_num_env_runners")
        if values["min_env_steps_per_iteration"]:
            found.append("min_env_steps_per_iteration: nothing is sampled; set dataset_num_iters_per_learner")
        return found


class BCConfig(MARWILConfig):
    """Settings of behaviour cloning: those of MARWIL, with ``beta=0``."""

    algo_class: ClassVar = "rlmesh.envs.algorithms.marwil.BC"
    changed_defaults: ClassVar = {"beta": 0.0}

    def problems(self) -> list[str]:
        found = super().problems()
        if self._values["beta"] != 0:
            found.append(f"beta={self._values['beta']!r}: BC has beta=0; MARWIL has others")
        return found


class MARWIL(Algorithm):
    """Updates the policy with recorded steps; `evaluate` shows what it has learnt.

    Attributes:
        data: the recorded steps, as the policy gets them behind its connectors.
        sequences: the same as sequences, of a module with memory; None without memory.
    """

    learns_from_rewards = False  # imitation needs none

    @classmethod
    def get_default_config(cls) -> Any:
        return MARWILConfig(cls)

    def setup(self, config: AlgorithmConfig) -> None:
        super().setup(config)
        try:
            self._read(config)
        except BaseException:
            self.stop()
            raise

    def _read(self, config: AlgorithmConfig) -> None:
        from gymnasium import spaces

        if not isinstance(self.env_runner, EnvRunner):
            raise UsageError("BC and MARWIL learn from recorded steps of one agent; the environment has several")
        if not isinstance(self.env_runner.action_space, spaces.Discrete | spaces.MultiDiscrete | spaces.Box):
            raise UsageError(
                f"BC and MARWIL learn actions of Discrete, MultiDiscrete and Box spaces, not of "
                f"{self.env_runner.action_space}"
            )
        rows = self.env_runner._vector.rows
        self._recorded = RecordedSteps(
            list(parts_of(config["input_"], rows, self._make)), rows, self.env_runner.action_space
        )
        self._pipeline = ConnectorPipeline(config.runner_connectors(), rows.space, 1)
        self._prepare(learn=True)
        self.env_runner.connectors.set_shared_state(self._pipeline.shared_state())
        self._rng = np.random.default_rng(config["seed"])
        self._order = np.zeros(0, np.int64)

    def _prepare(self, *, learn: bool) -> None:
        """Make the steps that the policy learns from of the recorded ones.

        Args:
            learn: connectors learn from the recorded steps; False: they have learnt already.
        """
        self.data = self._recorded
        if self._pipeline:
            self.data = through_connectors(self._recorded, self._pipeline, self.env_runner.action_space, learn=learn)
        self._last = self.data.last_observations() if self.config["beta"] else None
        self.sequences: RecordedSequences | None = None
        if self.get_policy().is_recurrent():
            longest = self.get_module().model_config.get("max_seq_len", MAX_SEQ_LEN)
            self.sequences = RecordedSequences(self.data, longest)

    def _make(self) -> Any:
        from rlmesh.envs.environments.registry import EnvContext, env_creator_of

        return env_creator_of(self.config["env"])(EnvContext(self.config["env_config"]))

    def training_step(self) -> ResultDict:
        """Updates with random batches of the recorded steps; each step once, before any is there again."""
        size = min(self.config["train_batch_size"], len(self.data))
        updates = self.config["dataset_num_iters_per_learner"] or -(-len(self.data) // size)
        drawn = [self._next_units(size) for _ in range(updates)]
        states, targets = self._estimates(drawn)
        results = ResultDict()
        for units in drawn:
            rows = units if self.sequences is None else self.sequences.rows(units)
            batch = self.data.batch[rows] if self.sequences is None else self.sequences.batch(units, states)
            if targets is not None:
                batch[columns.VALUE_TARGETS] = targets[rows]
            results = train_one_step(self, batch)
        return results

    def _estimates(self, drawn: list[np.ndarray]) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """The states before sequences, if there are any, and the value targets of all rows, if they are learnt."""
        states: dict[str, np.ndarray] = {}
        values = np.zeros(0)
        if self.sequences is not None:
            wants = self._last is not None
            with threads(self.get_policy().learner.torch_threads):  # type: ignore[attr-defined]
                states, each = self.sequences.look(self.get_module(), np.concatenate(drawn), values=wants)
            values = each[[not part.terminated for part in self.data.parts]]
        elif self._last is not None:
            values = self.get_policy().values_of(self._last)  # type: ignore[attr-defined]
        return states, None if self._last is None else self.data.returns(self.config["gamma"], values)

    @property
    def _units(self) -> int:
        """Number of what updates draw: rows, or sequences."""
        return len(self.data if self.sequences is None else self.sequences)

    def _next_units(self, size: int) -> np.ndarray:
        """The next units with at least ``size`` steps; each unit comes once, before any comes again."""
        while (count := self._count_of(size)) > len(self._order):
            self._order = np.concatenate([self._order, self._rng.permutation(self._units)])
        units, self._order = self._order[:count], self._order[count:]
        return units

    def _count_of(self, size: int) -> int:
        """How many units of the order have ``size`` steps; more than there are if all together have fewer."""
        if self.sequences is None:
            return size
        return int(np.searchsorted(np.cumsum(self.sequences.lengths[self._order]), size)) + 1

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "rows": {
            "order": self._order, "rng": self._rng.bit_generator.state, "of": self._units,
        }}  # fmt: skip

    def set_state(self, state: Mapping[str, Any]) -> None:
        rows = state["rows"]
        if rows["of"] == self._units:  # otherwise the numbers are those of other units: a new pass begins
            self._order = rows["order"]
        self._rng.bit_generator.state = rows["rng"]
        super().set_state(state)
        if self._pipeline:  # the policy has learnt with these means, which those of other recordings must not replace
            self._pipeline.set_shared_state(state["connectors"])
            self._prepare(learn=False)


class BC(MARWIL):
    """Behaviour cloning: the most likely policy of the recorded actions (Pomerleau 1989)."""

    @classmethod
    def get_default_config(cls) -> Any:
        return BCConfig(cls)
