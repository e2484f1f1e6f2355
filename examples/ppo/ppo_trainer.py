"""The trainer role: drives the others until the training ends."""

import torch

from .trainer import PPOTrainer


class PPOTrainerActor(PPOTrainer):
    def setup(self) -> None:
        torch.set_num_threads(1)  # Eight processes share the cores.
        super().setup()
