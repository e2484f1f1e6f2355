"""`MultiAgentRLModule`: the modules of several policies, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from rlmesh.envs.environments.registry import did_you_mean
from rlmesh.envs.modules.rl_module import RLModule
from rlmesh.errors import UsageError

__all__ = ["MultiAgentRLModule"]


class MultiAgentRLModule(nn.Module):
    """Several `RLModule`: ``module["red"]``; the forward passes take and give dicts by name.

    Args:
        modules: by name; they are used as they are, not copied.
    """

    def __init__(self, modules: Mapping[str, RLModule] | None = None) -> None:
        super().__init__()
        self._places: dict[str, int] = {}
        self._modules_in_order = nn.ModuleList()  # names of policies may be any text, those of torch may not
        for name, module in (modules or {}).items():
            self.add_module_of(name, module)

    def add_module_of(self, name: str, module: RLModule) -> None:
        """Add a module, or replace that of the same name."""
        if not isinstance(module, RLModule):
            raise UsageError(f"MultiAgentRLModule: {name!r} has an RLModule, not {type(module).__name__}")
        if name in self._places:
            self._modules_in_order[self._places[name]] = module
        else:
            self._places[name] = len(self._modules_in_order)
            self._modules_in_order.append(module)

    def __getitem__(self, name: str) -> RLModule:
        if name not in self._places:
            raise UsageError(f"there is no module {name!r}.{did_you_mean(name, self._places)}")
        module = self._modules_in_order[self._places[name]]
        assert isinstance(module, RLModule)
        return module

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def keys(self) -> Any:
        """Names of the modules."""
        return self._places.keys()

    def items(self) -> list[tuple[str, RLModule]]:
        """Names and modules."""
        return [(name, self[name]) for name in self._places]

    def forward_train(self, batch: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
        """The passes of losses: ``{name: batch}`` to ``{name: outputs}``."""
        return {name: self[name].forward_train(part) for name, part in batch.items()}

    def forward_exploration(
        self, batch: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """The passes that sample for training."""
        return {name: self[name].forward_exploration(part) for name, part in batch.items()}

    def forward_inference(self, batch: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
        """The passes that take the best actions."""
        return {name: self[name].forward_inference(part) for name, part in batch.items()}

    def forward(self, batch: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
        return self.forward_train(batch)

    def get_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """``state_dict`` of each module, by name."""
        return {name: dict(module.state_dict()) for name, module in self.items()}

    def set_state(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take over a state of `get_state`; modules without an entry keep theirs."""
        for name, each in state.items():
            self[name].load_state_dict(dict(each))
