"""`EnvRunnerGroup`: a local runner, and remote ones in a job that the group starts."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.environments.registry import EnvCreator, env_creator_of
from rlmesh.envs.external.spec import ExternalEnv
from rlmesh.envs.modules.numpy_policy import NumpyPolicy, numpy_arguments
from rlmesh.envs.modules.policy import Policy
from rlmesh.envs.runners.base import is_count
from rlmesh.envs.runners.creation import make_runner
from rlmesh.envs.runners.env_runner import CONNECTORS, EnvRunner
from rlmesh.envs.runners.episode_stats import EpisodeStats
from rlmesh.envs.runners.jobs import end_with_the_program, outside_of_loops
from rlmesh.envs.runners.kept_episodes import KeptEpisodes
from rlmesh.envs.runners.remote import RemoteEnvRunner
from rlmesh.errors import UsageError

if TYPE_CHECKING:  # what starts a job is imported when a job starts
    from rlmesh import JobHandle, MemberHandle, RoleGroup, Runtime

__all__ = ["EnvRunnerGroup", "RemoteWorkers", "WorkerSet"]

logger = logging.getLogger(__name__)

ROLE = "ENV_RUNNER"
OF_RLLIB = ("from_worker", "from_worker_or_learner_group", "global_vars", "inference_only", "timeout_seconds")
_numbers = itertools.count(1)


class RemoteWorkers(list["MemberHandle[RemoteEnvRunner]"]):
    """Handles of the remote runners: ``handle.call("sample")`` is a future.

    Calling the list returns the list: in older versions, ``remote_workers()`` was a method.
    """

    def __call__(self) -> RemoteWorkers:
        return self


class EnvRunnerGroup:
    """A runner in this process, and ``num_env_runners`` remote ones.

    With remote runners, the group starts an rlmesh job with one role, and ends it with `stop`, or when the program
    ends. A remote runner that dies comes back by itself; `sample` gives it the last weights before it samples again.
    A call of its own ``sample`` raises an error until it has weights.

    Args:
        policy_class: class of the policy.
        env_creator: see `EnvRunner`.
        num_env_runners: number of remote runners; 0: no job is started, and the local runner samples.
        max_restarts: restarts of remote runners within ten minutes; one more ends the job.
        sample_timeout_s: longest wait for a call to remote runners.
        run_dir: folder of the job; None: a new one under ``runs``.
        runner: further arguments of `EnvRunner`; of `MultiAgentEnvRunner`, if the environment has several agents.

    Raises:
        UsageError: arguments that cannot work. They are tried in this process before the job starts.
        LaunchError: the job could not be started.

    Attributes:
        fragment_length: steps of each environment that ``synchronous_parallel_sample`` samples in a row; None: as many
            as it is asked for.
        episodes: what remote runners that die go on with.
        samples_ahead: True if an `AsyncSampler` has batches of the remote runners that nobody has taken yet.
    """

    def __init__(
        self, *, policy_class: type[Policy], env_creator: str | type | EnvCreator, num_env_runners: int = 0,
        max_restarts: int = 100, sample_timeout_s: float | None = 600.0, run_dir: str | None = None, **runner: Any,
    ) -> None:  # fmt: skip
        if type(num_env_runners) is not int or num_env_runners < 0:
            raise UsageError(f"EnvRunnerGroup(num_env_runners={num_env_runners!r}): a whole number of at least 0")
        creator = env_creator_of(env_creator)
        given = {"policy_class": policy_class, "env_creator": creator, "num_workers": num_env_runners, **runner}
        self.num_env_runners, self.timeout_s = num_env_runners, sample_timeout_s
        self.fragment_length: int | None = runner.get("rollout_fragment_length")
        # The local runner of a group with remote ones holds the weights; one environment tells it the spaces.
        local = {**given, "num_envs": 1} if num_env_runners else given
        self.local_env_runner: Any = make_runner(**local)
        self._external, self._num_envs = isinstance(creator, ExternalEnv), runner.get("num_envs", 1)
        self._version = 0
        self.local_env_runner.weights_version = 0
        self._weights: Any = None
        self._weights_version = 0
        self._stats: list[EpisodeStats] = []
        self.episodes, self.samples_ahead = KeptEpisodes(num_env_runners), False
        self._handle: JobHandle | None = None
        self._stack: list[Any] = []
        self._remote: RoleGroup[Any] | None = None
        if num_env_runners:
            try:
                remote = {**given, **numpy_arguments(self.local_env_runner, given)}
                if isinstance(creator, ExternalEnv):  # its `sample` waits for clients
                    remote["sample_timeout_s"] = sample_timeout_s
                outside_of_loops(lambda: self._start(remote, max_restarts, run_dir))
            except BaseException:
                self.stop()
                raise

    @property
    def local_worker(self) -> Any:
        """`local_env_runner`, under its older name. It may be called too, as in older versions."""
        return self.local_env_runner

    @property
    def remote_workers(self) -> RemoteWorkers:
        """Handles of the remote runners, as a property or as a call: ``group.remote_workers()``.

        The caller may sample by them, so episodes that were kept before are forgotten.
        """
        self.episodes.forget()
        return RemoteWorkers(self._remote or ())

    @property
    def agents_at_once(self) -> int:
        """Number of agents that may act in one step of an environment, as far as the environment names them."""
        return int(getattr(self.local_env_runner, "agents_at_once", 1))

    @property
    def envs_of_a_runner(self) -> int:
        """Number of environments of each runner that samples."""
        local = int(self.local_env_runner.num_envs)  # beside remote runners: 1, unless it is a vector environment
        return local if local > 1 or not self.num_env_runners else int(self._num_envs)

    @property
    def steps_of_a_round(self) -> int | None:
        """Steps of one fragment of each sampling runner, those that only reset an environment included.

        None if there is no ``fragment_length``, or if clients decide.
        """
        if self.fragment_length is None or self._external:
            return None
        return self.fragment_length * self.envs_of_a_runner * max(1, self.num_env_runners)

    def num_remote_workers(self) -> int:
        """Number of remote runners."""
        return self.num_env_runners

    def connection(self) -> tuple[str, str]:
        """Address and key file of the job, for an `ExternalEnvClient`. The key file is for your user alone.

        Raises:
            UsageError: there are no remote runners, so there is no job.
        """
        found = None if self._handle is None else self._handle.address_and_key()
        if found is None:
            raise UsageError("connection(): there is no job; set num_env_runners to at least 1")
        address = found[0]
        return address, str(Path(address.removeprefix("unix://")).with_name("key"))

    def sample(self, num_steps: int | None = None, *, num_episodes: int | None = None) -> Any:
        """A batch of all runners: the remote ones at the same time, or the local one if there are none.

        Args:
            num_steps: steps of environments in total, see `EnvRunner.sample`.
            num_episodes: whole episodes in total.

        Returns:
            A `SampleBatch`, or, of several agents, a `MultiAgentBatch`.
        """
        return SampleBatch.concat_samples(self.sample_all(num_steps, num_episodes=num_episodes))

    def sample_all(self, num_steps: int | None = None, *, num_episodes: int | None = None) -> list[Any]:
        """The batches of the runners, one each; arguments as for `sample`.

        A runner that dies meanwhile restarts, gets the last weights, and samples its share: it goes on with the
        episodes that its last batch left under way, if its environments can be pickled. What the dead process had
        sampled since is lost as a whole: no step is there twice.
        """
        if self._remote is None:
            batch, stats = self.local_env_runner.sample_with_stats(num_steps, num_episodes=num_episodes)
            self._stats.append(stats)
            return [batch]
        if self._weights is None:
            self.sync_weights()
        shares = _shares(num_steps, num_episodes, self.num_env_runners)
        members = [handle.options(timeout_s=self.timeout_s, idempotent=True) for handle in self._remote]
        given = [(i, m, share) for i, (m, share) in enumerate(zip(members, shares, strict=True)) if share is not None]
        futures = [(i, m, share, self._ask(m, share)) for i, m, share in given]
        batches, stats = [], []
        for i, member, share, future in futures:
            while (result := future.result()) is None:  # the runner restarted
                self.go_on(i)
                member.call("set_weights", *self.kept_weights).result()
                future = self._ask(member, share)
            batches.append(result[0])
            stats.append(result[1])
            self.episodes.keep(i, result[2])
        self._stats.append(EpisodeStats.interleaved(stats))
        return batches

    def go_on(self, index: int) -> None:
        """Let a remote runner that restarted go on with its episodes; it needs weights afterwards."""
        assert self._remote is not None
        member = self._remote[index].options(timeout_s=self.timeout_s, idempotent=True)
        member.call("go_on", *self.episodes.of(index)).result()

    def _ask(self, member: Any, share: Mapping[str, int]) -> Any:
        return member.call("sample_with_stats", **share, version=self._weights_version)

    def take_stats(self) -> EpisodeStats:
        """The statistics of the batches since the last call."""
        stats, self._stats = EpisodeStats.merged(self._stats), []
        return stats

    def add_stats(self, stats: EpisodeStats) -> None:
        """Count the episodes of a batch that was sampled by other means than `sample`."""
        self._stats.append(stats)

    @property
    def version(self) -> int:
        """Number of the local runner's weights."""
        return self._version

    @property
    def kept_weights(self) -> tuple[Any, int]:
        """The weights that remote runners get, and their number."""
        return self._weights, self._weights_version

    def advance(self, updates: int = 1) -> None:
        """Count updates of the local runner's weights."""
        self._version += updates
        self.local_env_runner.weights_version = self._version

    def keep_weights(self, policies: Iterable[str] | None = None) -> None:
        """Keep the local runner's weights of now, for remote runners; of other policies, those that they have."""
        found = self.local_env_runner.get_weights()
        if policies is not None and self._weights is not None:
            found |= {name: each for name, each in self._weights.items() if name not in (*policies, CONNECTORS)}
        self._weights, self._weights_version = found, self._version

    def sync_weights(self, policies: Iterable[str] | None = None, **without_effect: Any) -> None:
        """Send the local runner's weights to the remote runners, and wait until they have them.

        Args:
            policies: the policies whose weights are sent; None: all.
            without_effect: arguments of RLlib that change nothing here: weights come from the local runner.

        Raises:
            UsageError: there is no such policy, or no such argument.
        """
        for name in without_effect:
            if name not in OF_RLLIB:
                raise UsageError(f"sync_weights({name}=…): there is no such argument; there is policies")
        policies = None if policies is None else list(policies)
        for policy_id in policies or ():
            self.local_env_runner.get_policy(policy_id)  # raises
        self.advance()
        self.merge_connectors()
        if self._remote is not None:
            self.keep_weights(policies)
            group = self._remote.options(timeout_s=self.timeout_s, idempotent=True)
            group.call("set_weights", *self.kept_weights).result()

    def merge_connectors(self) -> None:
        """Merge what the connectors of all runners have learnt into those of the local runner, in a fixed order."""
        connectors = self.local_env_runner.connectors
        if not connectors:
            return
        deltas = [connectors.take_delta()]
        if self._remote is not None:
            members = [each.options(timeout_s=self.timeout_s, idempotent=True) for each in self._remote]
            futures = [member.call("take_delta") for member in members]
            for i, (member, future) in enumerate(zip(members, futures, strict=True)):
                while (delta := future.result()) is None and not self.samples_ahead:  # it restarted: its state has them
                    self.go_on(i)
                    future = member.call("take_delta")
                if delta is not None:
                    deltas.append(delta)
                    self.episodes.note_delta_taken(i)
        connectors.merge(deltas)

    def begin_episodes(self) -> None:
        """Let the sampling runners drop the episodes that go on, and begin new ones."""
        self.episodes.forget()
        if self._remote is None:
            self.local_env_runner.begin_episodes()
            return
        import cloudpickle

        group = self._remote.options(timeout_s=self.timeout_s, idempotent=True)
        group.call("apply", cloudpickle.dumps(lambda runner: runner.begin_episodes())).result()

    def foreach_worker(
        self, func: Callable[[EnvRunner], Any], *, local_env_runner: bool = True, local_worker: bool | None = None
    ) -> list[Any]:
        """``func(runner)`` of the local runner, then of the remote ones; the results in this order.

        Args:
            func: a function; it is pickled, lambdas and closures too.
            local_env_runner: False leaves the local runner out.
            local_worker: the older name of ``local_env_runner``.
        """
        self.episodes.forget()  # the function may have changed them
        include = local_env_runner if local_worker is None else local_worker
        results = [func(self.local_env_runner)] if include else []
        if self._remote is not None:
            import cloudpickle

            results += self._remote.options(timeout_s=self.timeout_s).call("apply", cloudpickle.dumps(func)).result()
        return results

    foreach_env_runner = foreach_worker

    def runner_states(self) -> list[Any]:
        """The states of the sampling runners: the remote ones, or the local one if there are none."""
        return self.foreach_worker(lambda runner: runner.get_state(), local_env_runner=self._remote is None)

    def set_runner_states(self, pickled: bytes) -> None:
        """Give the sampling runners states that `runner_states` gave, pickled together.

        Runners beyond the number of states begin new episodes, and states beyond the number of runners are left out; a
        warning says so.
        """
        import cloudpickle

        number, here = len(cloudpickle.loads(pickled)), max(1, self.num_env_runners)
        if number != here:
            logger.warning(
                "the checkpoint has the episodes of %d runners, and %d sample now: %s", number, here,
                "the further ones begin new episodes" if here > number else "those of the others are dropped",
            )  # fmt: skip

        def take_over(runner: EnvRunner) -> None:
            import cloudpickle

            states = cloudpickle.loads(pickled)
            index = max(0, runner.worker_index - 1)
            if index < len(states):
                runner.set_state(states[index])

        self.foreach_worker(take_over, local_env_runner=self._remote is None)

    def stop(self) -> None:
        """Close the environments, and end the job; a second call does nothing."""
        local, self._remote = getattr(self, "local_env_runner", None), None
        stack, self._stack, self._handle = self._stack, [], None
        while stack:
            outside_of_loops(partial(stack.pop().__exit__, None, None, None))
        if local is not None:
            local.stop()

    def __enter__(self) -> EnvRunnerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, runner: dict[str, Any], max_restarts: int, run_dir: str | None) -> None:
        import cloudpickle

        from rlmesh import DLJobBuilder, RoleGroup

        number = self.num_env_runners
        config = {"runner": cloudpickle.dumps(runner)}
        role_class = _role_class(needs_torch=runner["policy_class"] is not NumpyPolicy)
        role = DLJobBuilder().config(config).role(ROLE).run(role_class).total(number)
        job = role.restart("member", max_restarts=max_restarts, delay_s=0.05, max_delay_s=1.0).build()
        self._handle = job.start(f"env-runners-{next(_numbers)}", view="none", run_dir=run_dir)
        self._stack.append(self._handle.__enter__())
        end_with_the_program(self._handle)
        joined = self._handle.join()
        runtime: Runtime = joined.__enter__()
        self._stack.append(joined)
        self._remote = RoleGroup(ROLE, runtime=runtime)
        self.sync_weights()


WorkerSet = EnvRunnerGroup


def _shares(num_steps: int | None, num_episodes: int | None, number: int) -> list[dict[str, int] | None]:
    """The part of each runner of a number of steps or episodes; None for a runner that gets none."""
    if num_steps is not None and num_episodes is not None:
        raise UsageError("sample: give num_steps or num_episodes, not both")
    name, total = ("num_episodes", num_episodes) if num_episodes is not None else ("num_steps", num_steps)
    if total is None:
        return [{}] * number
    if not is_count(total):
        raise UsageError(f"sample: a whole number of at least 1, not {total!r}")
    each = [total // number + (i < total % number) for i in range(number)]
    return [{name: int(share)} if share else None for share in each]


def _role_class(*, needs_torch: bool) -> type[RemoteEnvRunner]:
    """The role's class: that with torch if the policy needs it, and this process has imported it."""
    if not needs_torch or "torch" not in sys.modules:
        return RemoteEnvRunner
    from rlmesh.envs.runners.remote_torch import TorchEnvRunner

    return TorchEnvRunner
