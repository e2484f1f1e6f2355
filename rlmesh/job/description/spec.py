"""The base of all parts of a job description: pydantic models whose faults are ``JobSpecError``."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from rlmesh.errors import JobSpecError
from rlmesh.job.nearest_name import did_you_mean

__all__ = ["Spec", "SpecError", "describe_faults"]


class SpecError(JobSpecError, ValueError):
    """A ``JobSpecError`` that pydantic collects when it comes from a nested part."""


def describe_faults(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Return the faults of a pydantic error, one line each: key, value, what is wrong, the nearest valid key."""
    found: list[str] = []
    for item in error.errors(include_url=False):
        path = ".".join(map(str, item["loc"]))
        inner = item.get("ctx", {}).get("error")
        if isinstance(inner, JobSpecError):
            found += [f"{path}.{problem}" for problem in inner.problems]
            continue
        if item["type"] == "extra_forbidden":
            text = f"there is no such key.{did_you_mean(str(item['loc'][-1]), model.model_fields)}"
        elif item["type"] == "missing":
            text = "is missing"
        elif item["type"] == "value_error":
            text = str(inner)
        else:
            text = f"{item['msg'][:1].lower()}{item['msg'][1:]} (got {item['input']!r:.120})"
        found.append(f"{path}: {text}" if path else text)
    return found


def _nested_key_fault(error: TypeError) -> Exception:
    """Return the error for a mapping with keys that are not text, which pydantic passes on as a part's keyword
    arguments."""
    return SpecError(["a mapping has a key that is not a text"]) if "keywords must be strings" in str(error) else error


class Spec(BaseModel):
    """A part of a job description. Unknown keys are errors; assignments are checked like arguments."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    def faults(self, exclude: Collection[str] = ()) -> list[str]:
        """Return the faults of the current values, including values that were changed in place, without validation.

        Valid values in another form (a mapping for a part) are converted as assignment would convert them.
        """
        values = {name: getattr(self, name) for name in type(self).model_fields if name not in exclude}
        try:
            made = type(self)(**values)
        except SpecError as error:
            return list(error.problems)
        for name, value in values.items():
            if (new := getattr(made, name)) is not value and new != value:
                self.__dict__[name] = new
        return []

    if not TYPE_CHECKING:  # hidden, so that type checkers see the fields' own signature

        def __init__(self, /, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise SpecError(describe_faults(error, type(self))) from None
            except TypeError as error:
                raise _nested_key_fault(error) from None

        def __setattr__(self, name: str, value: Any) -> None:
            if not name.startswith("_") and name not in type(self).model_fields:
                hint = did_you_mean(name, type(self).model_fields)
                raise SpecError(f"{name}: there is no such key in {type(self).__name__}.{hint}")
            try:
                super().__setattr__(name, value)
            except ValidationError as error:
                raise SpecError(describe_faults(error, type(self))) from None
            except TypeError as error:
                raise _nested_key_fault(error) from None
