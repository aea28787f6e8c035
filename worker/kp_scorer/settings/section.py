"""The base of all sections of the settings."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(ge=0.001, le=1e9)]


class Section(BaseModel):
    """A section of the settings. It is frozen and refuses unknown names; errors do not quote values, which may be secrets."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)
