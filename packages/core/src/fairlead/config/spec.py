"""What the user's own code is named by."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, model_validator

from fairlead.config_bases import ConfigModel


class ClassSpec(ConfigModel):
    """A callable of the user's and its arguments: `{class: "my.module:Name", args: {...}}`, or just the name.

    Arguments may hold further `{class:, args:}` mappings; they are built first.
    """

    class_: str = Field(alias="class", min_length=1)
    """`module:object`, looked up as the documentation's page on user code says."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the call."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"class": value} if isinstance(value, str) else value
