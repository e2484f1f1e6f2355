"""Resources of one member."""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal

from pydantic import AliasChoices, Field, field_validator

from rlmesh.job.description.spec import Spec

__all__ = ["MOST", "ResourceDesc"]

MOST = 100_000
"""Maximum members of a role, accelerators of a member, and nodes of a job: more is a mistake, and planning would be
slow."""


class ResourceDesc(Spec):
    """Resources of one member.

    Attributes:
        cpu: cores; 0 reserves none.
        memory: MiB; 0 reserves none.
        accelerator: devices: a share of one (0 to 1, counted in thousandths) or a whole number of them.
    """

    cpu: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    memory: int = Field(default=0, ge=0, validation_alias=AliasChoices("memory", "mem"))
    accelerator: float = Field(
        default=0.0, ge=0, le=MOST, allow_inf_nan=False, validation_alias=AliasChoices("accelerator", "acc", "gpu")
    )

    @field_validator("accelerator")
    @classmethod
    def _possible_share(cls, value: float) -> float:
        if value > 1 and not value.is_integer():
            raise ValueError(f"{value:g} is neither a share of one accelerator (at most 1) nor a whole number of them")
        if value > 0 and _milli(value) == 0:
            raise ValueError(f"{value:g} is less than the smallest share, 0.001")
        return value

    @property
    def accelerator_milli(self) -> int:
        """``accelerator`` in thousandths: a whole number, so that sums are exact."""
        return _milli(self.accelerator)

    @property
    def memory_bytes(self) -> int:
        return self.memory * 2**20


def _milli(amount: float) -> int:
    """Return ``amount`` in thousandths, rounded by its decimal spelling: 0.1 is 100, 1/3 is 333."""
    return int((Decimal(str(amount)) * 1000).to_integral_value(ROUND_HALF_EVEN))
