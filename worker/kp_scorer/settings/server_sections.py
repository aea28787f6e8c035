"""The sections of the servers: their URLs, and the passwords in these, which may change."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, ClassVar, Final, Self

from pydantic import (
    Field,
    PrivateAttr,
    field_validator,
)

from kp_scorer.files import read_text
from kp_scorer.settings.section import Section
from kp_scorer.settings.urls import BROKER_SCHEMES, REDIS_SCHEMES, ServerUrl, parse_url

_LARGEST_SECRET_BYTES: Final = 65_536


class _ServerSection(Section):
    schemes: ClassVar[Sequence[str]]
    url: Annotated[str, Field(repr=False)] = ""
    _file: str = PrivateAttr("")  # The file that the URL was read from; empty if it had none of its own.

    @field_validator("url")
    @classmethod
    def _can_be_parsed(cls, url: str) -> str:
        if url:
            parse_url(url, cls.schemes)
        return url

    def server(self) -> ServerUrl:
        """Return the parsed URL, which must not be empty."""
        return parse_url(self.url, self.schemes)

    def from_file(self, file: str) -> Self:
        """Return a copy that knows the file that its URL was read from."""
        copy = self.model_copy()
        copy._file = file  # noqa: SLF001  # a copy of this one
        return copy

    def at(self, other: "_ServerSection") -> Self:
        """Return a copy with the URL of another section, and the file of that URL."""
        return self.model_copy(update={"url": other.url}).from_file(other._file)  # noqa: SLF001  # of this class

    @property
    def is_renewed(self) -> bool:
        """True if :meth:`server_now` may return another password than :meth:`server`."""
        return bool(self._file and self.server().password)

    def server_now(self) -> ServerUrl:
        """Return the parsed URL as its file has it now, or as it was read at the start if the file cannot be used."""
        with suppress(OSError, ValueError):
            if self._file and (renewed := parse_url(read_secret(self._file), self.schemes)).password:
                return renewed
        return self.server()


def read_secret(file: str) -> str:
    """Return the content of a file without its line ending."""
    return read_text(file, _LARGEST_SECRET_BYTES).removesuffix("\n").removesuffix("\r")


class BrokerSettings(_ServerSection):
    """The broker that traces come from and decisions go to."""

    schemes = BROKER_SCHEMES
    timeout_s: Annotated[float, Field(ge=0.001, le=86_400)] = 5.0
    visibility_timeout_s: Annotated[int, Field(ge=3, le=1_000_000_000)] = 60
    hold_s: ClassVar[float] = 600.0
    """On RabbitMQ a message that has been in flight for this long goes to the end of its queue.

    RabbitMQ would take it away after its consumer_timeout of 30 minutes, and count a delivery.
    """

    @property
    def is_redis(self) -> bool:
        """True if the queues are in Redis; otherwise the broker speaks AMQP."""
        return self.url.startswith("redis")


class RedisSettings(_ServerSection):
    """Where the novelty log and the ledger live."""

    schemes = REDIS_SCHEMES
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")] = "kp"
