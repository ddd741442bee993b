"""The one base of all configuration classes."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A group of settings: frozen, unknown keys refused, the string below a field is its description."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True, allow_inf_nan=False
    )
