"""The one base of all configuration classes, and what their unions have in common."""

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Settings(BaseModel):
    """A group of settings: frozen, unknown keys refused, the string below a field is its description."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True, allow_inf_nan=False
    )


def _spelled_out(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


A_WORD_IS_A_KIND = BeforeValidator(_spelled_out)
"""Lets `position: alibi` stand for `position: {kind: alibi}`."""
