"""`AlgorithmConfig`: the settings of an algorithm, in sections."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rlmesh.envs.algorithms.settings import (
    ALIASES,
    ALLOWED,
    NOT_THERE,
    SECTIONS,
    problems_of,
    require_one_name_each,
)
from rlmesh.envs.environments.registry import did_you_mean, env_creator_of
from rlmesh.envs.external.spec import external_problems
from rlmesh.envs.multi_agent.policies import PolicySpec, policy_specs
from rlmesh.envs.settings.allowed import Allowed, plain
from rlmesh.envs.settings.model import MODEL_KEYS, keys_of_module
from rlmesh.errors import UsageError

if TYPE_CHECKING:
    from rlmesh.envs.algorithms.algorithm import Algorithm
    from rlmesh.envs.learners.learner import Learner
    from rlmesh.envs.modules.policy import Policy

__all__ = ["AlgorithmConfig"]


class AlgorithmConfig:
    """The settings of an algorithm. Methods set them section by section and return the same object::

        PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=2).training(lr=1e-3).build()

    Settings are read as attributes or items: ``config.lr``, ``config["lr"]``. Names of RLlib's older versions are
    accepted: ``num_workers``, ``rollouts(…)``, ``sgd_minibatch_size``, and their like.

    A subclass names its algorithm, and adds settings by `training_defaults`, with their rules in `allowed`, and changes
    others by `changed_defaults`. NumPy's numbers and arrays become Python's numbers and lists.

    Raises:
        UsageError: an unknown setting, or one of another section; names the nearest right name and section.
    """

    algo_class: ClassVar[str] = "rlmesh.envs.algorithms.algorithm.Algorithm"
    """Import path of the algorithm, so that settings need no torch."""
    training_defaults: ClassVar[Mapping[str, Any]] = {}
    changed_defaults: ClassVar[Mapping[str, Any]] = {}
    allowed: ClassVar[Mapping[str, Allowed]] = ALLOWED
    """The values that settings may have; a subclass has those of the settings that it adds."""
    model_keys: ClassVar[Collection[str]] = MODEL_KEYS
    """Keys of ``model`` and ``model_config`` of the built-in module."""
    is_asynchronous: ClassVar[bool] = False
    """True for algorithms whose runners sample while the learner trains."""
    is_offline: ClassVar[bool] = False
    """True for algorithms that learn from recorded steps alone."""

    def __init__(self, algo_class: type[Algorithm] | None = None) -> None:
        sections = {section: dict(settings) for section, settings in SECTIONS.items()}
        for base in reversed(type(self).__mro__):
            sections["training"].update(vars(base).get("training_defaults", {}))
        values = {name: copy.deepcopy(value) for settings in sections.values() for name, value in settings.items()}
        for base in reversed(type(self).__mro__):
            for name, value in vars(base).get("changed_defaults", {}).items():
                if name not in values:
                    raise UsageError(f"{base.__name__}.changed_defaults: there is no setting {name!r}")
                values[name] = copy.deepcopy(value)
        self.__dict__.update(_sections=sections, _values=values, _frozen=False, _algo_class=algo_class)
        self.__dict__["_per_learner"] = frozenset()  # names of sizes per learner that were given

    def environment(self, env: Any = None, **settings: Any) -> Self:
        """The environment: a registered name, a Gymnasium id, a class, or a creator.

        Args:
            env: see above.
            settings: ``env_config`` (passed to the creator), ``disable_env_checking`` (False: `build` refuses an
                environment in which `rlmesh.envs.checks.check_env` finds a fault), ``max_sequence_length`` (room for
                the elements of a Sequence, and the nodes and edges of a Graph, in observations).
        """
        if env is not None:
            settings["env"] = env
        return self._set("environment", settings)

    def env_runners(self, **settings: Any) -> Self:
        """Settings of the runners that step environments.

        Args:
            settings: ``num_env_runners`` (0: in this process), ``num_envs_per_env_runner``,
                ``rollout_fragment_length`` (steps of each environment per sample, or ``"auto"``: the batch divided by
                the number of environments), ``explore``, ``vectorize_mode``, ``sample_timeout_s``,
                ``connectors`` (objects of `rlmesh.envs.connectors`, applied in their order, or a dict of such lists by
                policy),
                ``max_requests_in_flight_per_env_runner`` (of IMPALA and APPO).
        """
        return self._set("env_runners", settings)

    def rollouts(self, **settings: Any) -> Self:
        """`env_runners`, under its older name."""
        return self.env_runners(**settings)

    def training(self, **settings: Any) -> Self:
        """Settings of learning: ``lr``, ``gamma``, ``train_batch_size``, ``model``, and the algorithm's own."""
        return self._set("training", settings)

    def learners(self, **settings: Any) -> Self:
        """Settings of the place of learning: ``num_learners`` (0: in this process; otherwise processes of their own,
        which share each batch), ``torch_threads``. Batch sizes are those of all learners together."""
        return self._set("learners", settings)

    def offline_data(self, **settings: Any) -> Self:
        """Recorded steps, for BC and MARWIL.

        Args:
            settings: ``input_`` (files, folders, patterns, batches, or Minari data sets: see `rlmesh.envs.offline`),
                ``dataset_num_iters_per_learner`` (updates per training step; None: each step of the data once).
        """
        return self._set("offline_data", settings)

    def multi_agent(self, **settings: Any) -> Self:
        """Policies of several agents.

        Args:
            settings: ``policies`` (names, or a dict by name of `PolicySpec`, of classes of policies, or of None),
                ``policy_mapping_fn`` (a function of ``agent_id`` and ``episode`` that returns a name),
                ``policies_to_train`` (names, or a function of a name and a batch; the others stay as they are),
                ``count_steps_by`` (``"env_steps"`` or ``"agent_steps"``: what ``train_batch_size`` counts).
        """
        return self._set("multi_agent", settings)

    def evaluation(self, **settings: Any) -> Self:
        """Evaluation: ``evaluation_interval`` (iterations; None: by `Algorithm.evaluate` only),
        ``evaluation_duration``, ``evaluation_duration_unit`` (``"episodes"`` or ``"timesteps"``),
        ``evaluation_num_env_runners``, ``evaluation_config`` (settings that differ; by default ``explore=False``; of
        ``env_config`` the keys that differ)."""
        return self._set("evaluation", settings)

    def fault_tolerance(self, **settings: Any) -> Self:
        """Failures: ``restart_failed_env_runners``, ``restart_failed_sub_environments``,
        ``max_env_runner_restarts`` (of one runner, within ten minutes), ``max_learner_restarts`` (of the remote
        learners, which restart together)."""
        return self._set("fault_tolerance", settings)

    def rl_module(self, **settings: Any) -> Self:
        """Networks: ``module_class`` (an `RLModule`), ``model_config``."""
        return self._set("rl_module", settings)

    def debugging(self, **settings: Any) -> Self:
        """``seed`` of environments, weights and minibatches."""
        return self._set("debugging", settings)

    def reporting(self, **settings: Any) -> Self:
        """``metrics_num_episodes_for_smoothing``: the number of episodes of the means; ``min_env_steps_per_iteration``:
        `Algorithm.train` repeats the training step until that many steps are sampled."""
        return self._set("reporting", settings)

    def framework(self, framework: str = "torch") -> Self:
        """The framework: torch is the only one."""
        if framework not in ("torch", "torch2"):
            raise UsageError(f"framework({framework!r}): torch is the only one")
        return self

    def resources(self, **settings: Any) -> Self:
        """`learners`, for ``num_gpus=0``; there is no setting for GPUs yet."""
        if any(settings.values()):
            raise UsageError(f"resources({', '.join(settings)}): GPUs cannot be chosen yet; leave the call out")
        return self

    def build(self, env: Any = None) -> Algorithm:
        """Make the algorithm. All faults of the settings come in one error, before any process starts.

        Args:
            env: replaces the environment.
        """
        if env is not None:
            self.environment(env)
        self.validate()
        if not self._values["disable_env_checking"]:
            self._check_environment()
        return self.algorithm_class(self.copy(copy_frozen=True))

    build_algo = build

    def _check_environment(self) -> None:
        """Raise `UsageError` with what `check_env` finds; it plays some episodes in a process of its own."""
        from rlmesh.envs.checks import check_env

        report = check_env(self._values["env"], config=self._values["env_config"])
        if not report.passed:
            raise UsageError("environment(disable_env_checking=False):\n" + "\n".join(report.lines()))

    @property
    def algorithm_class(self) -> type[Algorithm]:
        """The class that `build` makes an instance of."""
        from importlib import import_module

        if self._algo_class is not None:
            return self._algo_class  # type: ignore[no-any-return]
        module, _, name = self.algo_class.rpartition(".")
        return getattr(import_module(module), name)  # type: ignore[no-any-return]

    def policy_class(self) -> type[Policy]:
        """The class of the policy: `ModulePolicy`."""
        from rlmesh.envs.modules.module_policy import ModulePolicy

        return ModulePolicy

    def learner_class(self) -> type[Learner]:
        """The class of the learner; a subclass returns its own."""
        from rlmesh.envs.learners.learner import Learner

        return Learner

    def policy_config(self) -> dict[str, Any]:
        """The settings that policies and learners get: those of training, and the classes."""
        training = {name: self._values[name] for name in self._sections["training"] if name != "model"}
        return {
            **training, "module_class": self._values["module_class"], "learner_class": self.learner_class(),
            "model_config": {**self._values["model"], **self._values["model_config"]},
            "torch_threads": self._values["torch_threads"],
        }  # fmt: skip

    of_all_policies: ClassVar[tuple[str, ...]] = ("train_batch_size", "estimate_advantages")
    """Settings of training that cannot differ from policy to policy."""

    def runner_policies(self) -> dict[str, Any]:
        """The arguments of a runner that say which policies there are, with the changes of each `PolicySpec`.

        Raises:
            UsageError: a spec changes a setting that does not exist, or that is not one of a policy.
        """
        specs, mapping = self._specs(), self._values["policy_mapping_fn"]
        configs = {name: self._config_of(name, spec.config).policy_config() for name, spec in specs.items()}
        if specs.keys() == {"default_policy"} and mapping is None:
            (spec,) = specs.values()
            return {
                "policy_class": spec.policy_class or self.policy_class(), "policy_config": configs["default_policy"],
            }  # fmt: skip
        return {
            "policy_class": self.policy_class(), "policy_config": self.policy_config(), "policies": specs,
            "policy_mapping_fn": mapping, "policy_configs": configs,
        }  # fmt: skip

    def of_evaluation(self) -> Self:
        """The settings of evaluations: these with the changes of ``evaluation_config``.

        Its ``env_config`` changes single keys of that of training, unless it names another environment.
        """
        changes = {"explore": False, **self._values["evaluation_config"]}
        if "env" not in changes and "env_config" in changes:
            changes["env_config"] = {**self._values["env_config"], **(changes["env_config"] or {})}
        return self.copy().update_from_dict(changes)

    def runner_connectors(self) -> Any:
        """The connectors of runners: a list; by policy, if the runners have several and the settings differ."""
        given = self._values["connectors"]
        alone = self._specs().keys() == {"default_policy"}
        return given.get("default_policy", ()) if alone and isinstance(given, Mapping) else given

    def _specs(self) -> dict[str, PolicySpec]:
        return policy_specs(self._values["policies"])

    def _config_of(self, policy_id: str, changes: Mapping[str, Any] | None) -> Self:
        known = {*self._sections["training"], *self._sections["rl_module"]} - set(self.of_all_policies)
        config = self.copy()
        require_one_name_each(f"policies: the config of {policy_id!r}", changes or {})
        for name, value in (changes or {}).items():
            if ALIASES.get(name, name) not in known:
                raise UsageError(
                    f"policies: the config of {policy_id!r} has no setting {name!r}, which could differ from policy to "
                    f"policy.{did_you_mean(name, known, listed=False)}"
                )
            config[name] = value
        return config

    def problems(self) -> list[str]:
        """The faults of the settings; a subclass appends those of its own."""
        found = problems_of(self._values, self._all_allowed(), self._defaults(), self._model_keys())
        found += external_problems(self._values)
        found += self._problems_of_policies()
        name = type(self).__name__.removesuffix("Config")
        if self._values["max_requests_in_flight_per_env_runner"] != 1 and not self.is_asynchronous:
            found.append(f"max_requests_in_flight_per_env_runner: {name} waits for its runners; leave the setting out")
        if self._values["input_"] is not None and not self.is_offline:
            found.append(f"input_: {name} samples its own steps; BC and MARWIL learn from recorded ones")
        if self._values["num_learners"] and not self.learner_class().shares_batches():
            found.append(f"num_learners: {name} learns from whole batches, in this process; set 0")
        if self._values["num_learners"] not in (0, 1) and (given := self._per_learner):
            found.append(
                f"{sorted(given)[0]}: batch sizes are of all learners together; set {ALIASES[sorted(given)[0]]}"
            )
        if self._values["env"] is None:
            found.append("environment(…): name an environment")
        else:
            try:
                env_creator_of(self._values["env"])
            except UsageError as error:
                found.append(str(error))
        return found

    def _model_keys(self) -> Collection[str] | None:
        """The keys of the model's settings; None if a class of one's own chooses policies or networks."""
        if (module := self._values["module_class"]) is not None:
            return keys_of_module(module)
        chosen_by = (type(self).policy_class, type(self).policy_config)
        built_in = all(each.__module__.startswith("rlmesh.envs.") for each in chosen_by)
        return self.model_keys if built_in else None

    @classmethod
    def _all_allowed(cls) -> dict[str, Allowed]:
        each = [vars(base).get("allowed", {}) for base in reversed(cls.__mro__)]
        return {name: allowed for rules in each for name, allowed in rules.items()}

    def _problems_of_policies(self) -> list[str]:
        """The faults of settings that differ from policy to policy."""
        found = []
        try:
            specs = self._specs()
        except UsageError:
            return []  # problems_of has it
        for name, spec in specs.items():
            if not spec.config:
                continue
            try:
                config = self._config_of(name, spec.config)
            except UsageError as error:
                found.append(str(error))
                continue
            alone = {"policies": None, "policies_to_train": None}
            before = set(self.copy().multi_agent(**alone).problems())
            config.multi_agent(**alone)
            found += [f"policies: {name!r}: {fault}" for fault in config.problems() if fault not in before]
        return found

    def validate(self) -> None:
        """Raise `UsageError` with all faults, if there are any."""
        if found := self.problems():
            count = "1 fault" if len(found) == 1 else f"{len(found)} faults"
            lines = "".join(f"\n  {i}. {fault}" for i, fault in enumerate(found, 1))
            raise UsageError(f"{type(self).__name__} has {count}:{lines}")

    def copy(self, copy_frozen: bool | None = None) -> Self:
        """The same settings in an object of their own.

        Args:
            copy_frozen: True: the copy cannot be changed; otherwise it can.
        """
        twin = copy.copy(self)
        twin.__dict__["_values"] = {
            name: value if name in ("env", "input_") else copy.deepcopy(value) for name, value in self._values.items()
        }
        twin.__dict__["_frozen"] = bool(copy_frozen)
        return twin

    def freeze(self) -> None:
        """Refuse changes from now on."""
        self.__dict__["_frozen"] = True

    def to_dict(self) -> dict[str, Any]:
        """All settings by name."""
        return dict(self._values)

    def update_from_dict(self, settings: Mapping[str, Any]) -> Self:
        """Set settings of any section."""
        require_one_name_each(type(self).__name__, settings)
        for name, value in settings.items():
            self[name] = value
        return self

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """The defaults with changes."""
        return cls().update_from_dict(settings)

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(ALIASES.get(name, name), default)

    def keys(self) -> Any:
        return self._values.keys()

    def items(self) -> Any:
        return self._values.items()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values or ALIASES.get(str(name)) in self._values

    def __getitem__(self, name: str) -> Any:
        key = ALIASES.get(name, name)
        if key not in self._values:
            raise KeyError(f"{type(self).__name__} has no setting {name!r}.{did_you_mean(name, self._values)}")
        return self._values[key]

    def __setitem__(self, name: str, value: Any) -> None:
        key = ALIASES.get(name, name)
        section = next((each for each, settings in self._sections.items() if key in settings), None)
        if section is None:
            raise UsageError(
                f"{type(self).__name__} has no setting {name!r}.{did_you_mean(name, self._values, listed=False)}"
            )
        self._set(section, {name: value})

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        key = ALIASES.get(name, name)
        if name.startswith("__") or key not in values:
            methods = [one for one in dir(type(self)) if not one.startswith("_")]
            hint = did_you_mean(name, [*values, *methods], listed=False) or did_you_mean(name, values)
            raise AttributeError(f"{type(self).__name__} has no setting {name!r}.{hint}")
        return values[key]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def _set(self, section: str, given: Mapping[str, Any]) -> Self:
        where = f"{type(self).__name__}.{section}"
        if self._frozen:
            raise UsageError(f"{where}: the algorithm is built; change a copy() of its config and build again")
        known = self._sections[section]
        require_one_name_each(where, given)
        for name, value in given.items():
            key = ALIASES.get(name, name)
            if key in NOT_THERE:
                raise UsageError(f"{where}({name}=…): {NOT_THERE[key]}")
            if key not in known:
                other = next((each for each, settings in self._sections.items() if key in settings), None)
                hint = f" It belongs to {other}(…)." if other else did_you_mean(name, known)
                raise UsageError(f"{where} has no setting {name!r}.{hint}")
            if isinstance(known[key], dict) and value is None:
                value = {}
            self._values[key] = plain(value)
            if name.endswith("_per_learner") and name in ALIASES:
                self.__dict__["_per_learner"] |= {name}
        return self

    def _defaults(self) -> Mapping[str, Any]:
        """The defaults of this class; empty if its constructor may need arguments."""
        return type(self)()._values if type(self).__init__ is AlgorithmConfig.__init__ else {}

    def __repr__(self) -> str:
        defaults = self._defaults()
        changed = {name: value for name, value in self._values.items() if defaults.get(name) != value}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"
