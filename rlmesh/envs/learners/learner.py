"""`Learner`: updates a module with batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch

from rlmesh.envs.batches import columns
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.learners.flat_adam import FlatAdam
from rlmesh.envs.learners.partners import ALONE, LearnerShare, Partners
from rlmesh.envs.learners.schedule import scheduled
from rlmesh.envs.learners.sequences import forward_sequences, sequence_columns, sequence_starts, sequences_of
from rlmesh.envs.modules.rl_module import RLModule, require_one_per_row
from rlmesh.errors import UsageError

__all__ = ["Learner", "threads", "writable"]

SMALL = 1_000_000
"""Modules with fewer parameters, and without convolutions, are updated on one thread: more threads cost more."""
MAX_SEQ_LEN = 20
"""Longest sequence for modules with memory whose settings have no ``max_seq_len``."""
ONE_PER_ROW = (columns.REWARDS, columns.ACTION_LOGP, columns.ADVANTAGES, columns.VALUE_TARGETS)
"""Columns whose rows are one number: others would be broadcast in a loss without an error."""
DEFAULTS: dict[str, Any] = {
    "lr": 3e-4, "grad_clip": 0.5, "num_epochs": 1, "minibatch_size": None, "adam_epsilon": 1e-5,
}  # fmt: skip


class Learner:
    """Base of learners: a subclass defines `loss`, and may define `make_optimizer` or `update`.

    Args:
        module: the module to update.
        config: ``lr`` (a number or a schedule over trained steps), ``grad_clip`` (largest norm of the gradients; None
            for no limit), ``num_epochs``, ``minibatch_size`` (None: the whole batch), ``adam_epsilon``, ``seed``, and
            the settings of the loss.

    Attributes:
        wants: columns that `loss` reads; they become tensors.
        recurrent: True if the loss works for modules with memory too: it then calls `forward` instead of the module's
            ``forward_train``.
        steps: rows that this learner was given so far, each counted once.
        reports: False in those passes of an update whose statistics nobody reads: all but the last one.
        states: names of the module's states; empty without memory.
        partners: the learners that update copies of the same module, each with a share of the batch. A loss must be
            a mean over rows; statistics of the whole minibatch, such as those of standardised advantages, come from
            `Partners.mean_and_std`.
    """

    wants: ClassVar[tuple[str, ...]] = ()
    recurrent: ClassVar[bool] = False
    reports = True

    def __init__(self, module: RLModule, config: Mapping[str, Any]) -> None:
        self.require_fit(module)
        self.module = module
        self.config: dict[str, Any] = {**DEFAULTS, **config}
        self.steps = 0
        self.states = list(module.get_initial_state())
        self._longest: int = module.model_config.get("max_seq_len", MAX_SEQ_LEN)
        self.partners: Partners = ALONE
        self._ratios: list[float] | None = None
        self.generator = torch.Generator()
        if (seed := self.config.get("seed")) is None:
            self.generator.seed()  # of this generator alone: the global one belongs to the program
        else:
            self.generator.manual_seed(seed)
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = self.make_optimizer(self._parameters)
        convolutions = any(isinstance(layer, torch.nn.Conv2d) for layer in module.modules())
        small = sum(p.numel() for p in self._parameters) < SMALL and not convolutions
        self._threads: int | None = self.config.get("torch_threads") or (1 if small else None)

    @property
    def torch_threads(self) -> int | None:
        """Threads that torch is to use for passes over batches; None: as many as it uses anyway."""
        return self._threads

    @property
    def _weights(self) -> Sequence[torch.Tensor]:
        """The values of all parameters that learn."""
        if isinstance(self.optimizer, FlatAdam):
            self.optimizer.attach()
            return [self.optimizer.flat]
        return self._parameters

    @classmethod
    def require_fit(cls, module: RLModule) -> None:
        """Raise `UsageError` if the module has memory and the loss does not work with sequences."""
        if module.is_stateful() and not cls.recurrent:
            raise UsageError(
                f"{cls.__name__} cannot train a module with memory, such as one with use_lstm or use_attention. With "
                "these settings, built-in algorithms choose learners that can. A learner of your own needs "
                "recurrent = True, and calls self.forward(batch) in its loss"
            )

    def make_optimizer(self, parameters: list[torch.nn.Parameter]) -> FlatAdam | torch.optim.Optimizer:
        """The optimizer: Adam; a subclass may return one of torch's.

        The rate of its first group of parameters becomes ``lr``; the rates of other groups keep their ratio to it.
        """
        lr = scheduled(self.config["lr"], 0)
        if FlatAdam.fits(parameters):
            return FlatAdam(parameters, lr, eps=self.config["adam_epsilon"])
        return torch.optim.Adam(parameters, lr=lr, eps=self.config["adam_epsilon"])

    def optimizers(self) -> list[FlatAdam | torch.optim.Optimizer]:
        """All optimizers."""
        return [self.optimizer]

    def set_lr(self, step: int) -> float:
        """Set the learning rates to those of a step; returns the first one."""
        ratios, lr = self._lr_ratios(), scheduled(self.config["lr"], step)
        groups = [group for optimizer in self.optimizers() for group in optimizer.param_groups]
        for group, ratio in zip(groups, ratios, strict=True):
            group["lr"] = lr * ratio
        return float(groups[0]["lr"])

    def _lr_ratios(self) -> list[float]:
        """The rate of each group of parameters, by that of the first one, as the optimizers were made."""
        if self._ratios is None:
            groups = [group for optimizer in self.optimizers() for group in optimizer.param_groups]
            first = float(groups[0]["lr"])
            self._ratios = [float(group["lr"]) / first if first else 1.0 for group in groups]
        return self._ratios

    def loss(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of a minibatch, and statistics: tensors without axes, averaged over the last epoch.

        Args:
            batch: the columns that the learner `wants`, ``[rows, …]``; if the module has memory, sequences for
                `forward`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The results of the module's ``forward_train``, and the batch that they belong to, both ``[rows, …]``.

        If the module has memory, the batch that `loss` gets has sequences, ``[sequences, time, …]``. The results are
        then those of their steps, without padding.
        """
        sequences = columns.MASK in batch
        outputs, rows = (
            forward_sequences(self.module, batch) if sequences else (self.module.forward_train(batch), batch)
        )
        require_one_per_row(self.module, outputs)
        return outputs, rows

    def before_update(self) -> None:
        """Set what depends on `steps`, such as schedules, before an update."""

    def after_update(self, stats: dict[str, float]) -> None:
        """Adapt settings to the statistics of an update."""

    def update(self, batch: SampleBatch) -> dict[str, float]:
        """Update the module with ``num_epochs`` passes over a batch, in minibatches of random rows.

        Minibatches for a module with memory have sequences of at most ``max_seq_len`` steps (of ``model_config``).

        The minibatches of a pass have about the same size, ``minibatch_size`` at most, so that no last one has a row
        or two, whose standardised advantages would be noise.

        Returns:
            Statistics of the last pass, and the learning rate.

        Raises:
            UsageError: the batch is empty or lacks a column.
            FloatingPointError: the loss is NaN or infinite; the weights are those from before the update.
        """
        return self.update_share(batch, None)

    def update_share(self, batch: SampleBatch, share: LearnerShare | None) -> dict[str, float]:
        """`update` of this learner and its partners, each with some rows of a batch, which may be none.

        Args:
            batch: the rows of this learner.
            share: the place of these rows in the whole batch, as `shares` gives it; None: it is the whole batch. The
                minibatches are those that one learner would have made of the whole batch, whatever part of each of them
                is here.
        """
        tensors, config = self.tensors_of(batch, may_be_empty=share is not None), self.config
        mine = len(next(iter(tensors.values()), batch))  # rows, or sequences
        first, units, lengths = share or LearnerShare(0, mine)
        rows = len(batch) if share is None else units if lengths is None else int(lengths.sum())

        def rows_of(index: torch.Tensor) -> int:
            return len(index) if lengths is None else int(lengths[index.numpy()].sum())

        parts = min(-(-rows // (config["minibatch_size"] or rows)), units)
        bounds = [units * i // parts for i in range(parts + 1)]
        lr = self.set_lr(self.steps)
        self.before_update()
        sums: dict[str, torch.Tensor] = {}
        with threads(self._threads), self.training(), self._kept_if_it_fails():
            for epoch in range(config["num_epochs"]):
                order = torch.randperm(units, generator=self.generator) if parts > 1 else None
                self.reports = epoch == config["num_epochs"] - 1
                for start, end in pairwise(bounds):
                    part, here, whole = tensors, len(batch), rows
                    if order is not None:
                        index = order[start:end]
                        here = whole = rows_of(index)
                        if share is not None:
                            index = index[(index >= first) & (index < first + mine)]
                            here, index = rows_of(index), index - first
                        part = {name: tensor.index_select(0, index) for name, tensor in tensors.items()}
                    stats = self._step(part, here, whole)
                    if self.reports:
                        for name, value in stats.items():
                            sums[name] = sums[name] + value if name in sums else value
            names = list(sums)
            totals = torch.stack([sums[name].float() for name in names]) / parts
            self.partners.add(totals)
            values = totals.tolist()
            if not (all(map(np.isfinite, values)) and all(_finite(p) for p in self._weights)):
                raise FloatingPointError(f"the update gave {dict(zip(names, values, strict=True))}")
        self._count(rows)
        result = dict(zip(names, values, strict=True))
        self.after_update(result)
        return {**result, "curr_lr": lr}

    def _count(self, rows: int) -> None:
        """Count the rows of an update."""
        self.steps += rows

    def require_parameters(self) -> None:
        """Raise `UsageError` if there is nothing to learn."""
        if not self._parameters:
            raise UsageError(
                f"{type(self).__name__}: all parameters of {type(self.module).__name__} were frozen when its learner "
                "was made, so it cannot learn; with several agents, leave its policy out of policies_to_train"
            )

    def check(self, batch: SampleBatch) -> None:
        """Raise `UsageError` if the batch is empty or lacks a column, or if there is nothing to learn."""
        self.require_parameters()
        if not len(batch):
            raise UsageError(f"{type(self).__name__}: the batch has no rows to learn from")
        lacks = [name for name in (*self.wants, *sequence_columns(self.states)) if name not in batch]
        if lacks:
            raise UsageError(f"{type(self).__name__} needs the column {lacks[0]!r}; the batch has {', '.join(batch)}")
        if wrong := [name for name in ONE_PER_ROW if name in self.wants and np.ndim(batch[name]) != 1]:
            raise UsageError(
                f"{type(self).__name__}: the column {wrong[0]!r} has shape {np.shape(batch[wrong[0]])}; it has one "
                "number for each row"
            )

    def tensors_of(self, batch: SampleBatch, *, may_be_empty: bool = False) -> dict[str, torch.Tensor]:
        """The columns that `loss` reads, as tensors on the memory of the batch; sequences, if the module has memory."""
        if not may_be_empty:
            self.check(batch)
        if self.states:
            return self.sequences(batch, self.wants)
        return {name: torch.from_numpy(writable(batch[name])) for name in self.wants}

    def sequences(self, batch: SampleBatch, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Columns as the sequences of `sequences_of`, of at most ``max_seq_len`` steps."""
        found = sequences_of(batch, names, self.states, self._longest)
        return {name: torch.from_numpy(each) for name, each in found.items()}

    @classmethod
    def shares_batches(cls) -> bool:
        """True if several learners can update copies of the module with shares of a batch."""
        return cls.update is Learner.update

    def edges(self, batch: SampleBatch) -> np.ndarray:
        """The rows that a share of a batch may begin with, ascending, 0 the first of them: all rows, or those that
        begin sequences."""
        return sequence_starts(batch, self._longest) if self.states else np.arange(len(batch))

    def shares(self, batch: SampleBatch, bounds: list[int]) -> list[tuple[SampleBatch, LearnerShare]]:
        """The parts of a batch between bounds that are `edges`, each with its place in the batch.

        Raises:
            UsageError: the batch is empty or lacks a column.
        """
        self.check(batch)
        names, units, lengths = self.wants, np.arange(len(batch)), None
        if self.states:
            names = (*dict.fromkeys([*names, *sequence_columns(self.states)]),)
            units = sequence_starts(batch, self._longest)
            lengths = np.diff(units, append=len(batch))
        places = np.searchsorted(units, bounds).tolist()
        rows = [SampleBatch({name: batch[name][a:b] for name in names}) for a, b in pairwise(bounds)]
        return [(each, LearnerShare(first, len(units), lengths)) for each, first in zip(rows, places, strict=False)]

    def _step(self, part: dict[str, torch.Tensor], here: int, whole: int) -> dict[str, torch.Tensor]:
        """One step of the optimizer with a minibatch of ``whole`` rows, of which ``here`` are in this process.

        Returns:
            Statistics, weighted by the share of the rows.
        """
        loss, stats = self.loss(part)
        stats["total_loss"] = loss.detach()
        self.optimizer.zero_grad()
        if here == whole:
            loss.backward()
        elif here:
            (loss * (here / whole)).backward()
        if self.partners.size > 1:
            stats = {name: value * (here / whole) if here else torch.zeros_like(value) for name, value in stats.items()}
            self._add_gradients()
        if (most := self.config["grad_clip"]) is not None:
            if isinstance(self.optimizer, FlatAdam):
                norm = self.optimizer.clip(most)
            else:
                norm = torch.nn.utils.clip_grad_norm_(self._parameters, most).detach()
            stats["grad_norm"] = norm * (here / whole)
        self.optimizer.step()
        return stats

    def _add_gradients(self) -> None:
        """Add up the gradients of all partners."""
        if isinstance(self.optimizer, FlatAdam):
            self.partners.add(self.optimizer.whole_gradient())
            return
        for p in self._parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            self.partners.add(p.grad)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Layers such as dropout are in training mode within the block, and in evaluation mode after it.

        All passes outside of the block report their statistics.
        """
        layers = list(self.module.modules())
        if all(map(_has_plain_modes, layers)):  # the calls for each layer take longer than a pass of a small module
            modes: list[Callable[[], object]] = [partial(_set_mode, layers, mode) for mode in (True, False)]
        else:
            modes = [self.module.train, self.module.eval]
        modes[0]()
        try:
            yield
        finally:
            modes[1]()
            self.reports = True

    @contextmanager
    def _kept_if_it_fails(self) -> Iterator[None]:
        """Put the weights and the optimizer back if the block raises."""
        state = self.optimizer.state_dict()
        if not isinstance(self.optimizer, FlatAdam):  # its state is in memory of its own
            state = copy.deepcopy(state)
        weights = [p.detach().clone() for p in self._weights]
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for p, kept in zip(self._weights, weights, strict=True):
                    p.copy_(kept)
            self.optimizer.load_state_dict(state)
            raise

    def get_state(self) -> dict[str, Any]:
        """Optimizer, generator and counters; tensors and numbers only."""
        return {
            "optimizer": self.optimizer.state_dict(), "generator": self.generator.get_state(), "steps": self.steps,
        }  # fmt: skip

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over a state of `get_state`."""
        self._lr_ratios()  # as they were made, before the rates of the state are there
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.steps = state["steps"]


def writable(array: np.ndarray) -> np.ndarray:
    """The array, or a copy if it is read-only memory, of which torch has no tensors."""
    return array if array.flags.writeable else array.copy()


def _has_plain_modes(layer: torch.nn.Module) -> bool:
    """True if ``train()`` and ``eval()`` do nothing but set the attribute ``training``."""
    kind, own = type(layer), vars(layer)
    plain = kind.train is torch.nn.Module.train and kind.eval is torch.nn.Module.eval
    return plain and "train" not in own and "eval" not in own


def _set_mode(layers: list[torch.nn.Module], training: bool) -> None:
    for each in layers:
        vars(each)["training"] = training


def _finite(tensor: torch.Tensor) -> bool:
    """False if an element is NaN or infinite: the sum is then, too."""
    return math.isfinite(tensor.detach().sum(dtype=torch.float64).item())


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Let torch use this many threads within the block; None changes nothing."""
    before = torch.get_num_threads()
    if number is None or number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
