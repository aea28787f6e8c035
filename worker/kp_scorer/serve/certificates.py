"""Checks the server's certificate, and loads a renewed one, because a certificate may expire before the process ends."""

import binascii
import math
import re
import ssl
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog

from kp_scorer.errors import SettingsError
from kp_scorer.files import check_writer
from kp_scorer.settings.sections import ServeSettings

_BLOCK: Final = re.compile(rb"-----BEGIN [A-Z0-9 ]*CERTIFICATE-----([^-]+)")
# The period of validity in DER, of two times: years from 2050 on have four digits.
_VALIDITY: Final = re.compile(rb"0.(?:\x17\r\d{12}|\x18\x0f\d{14})Z(?:\x17\r|\x18\x0f)(\d{12,14})Z")

log = structlog.get_logger("kp_scorer.serve.certificates")


class Renewal:
    """Loads the certificate again after its files have been replaced; new connections get the new one."""

    def __init__(self, settings: ServeSettings, load: Callable[[], None]) -> None:
        self._settings, self._load = settings, load
        self._last = self._files()

    def _files(self) -> list[tuple[int, int]]:
        states = (Path(file).stat() for file in (self._settings.certificate, self._settings.key))
        return [(state.st_ino, state.st_mtime_ns) for state in states]

    def renew(self) -> None:
        """Load both files again if either has changed. While they do not match, the old pair stays in use."""
        with suppress(OSError):
            if (files := self._files()) == self._last:
                return
            self._last = files
            try:
                # A pair that does not match would break the context.
                check_certificate(self._settings)
            except SettingsError as error:
                log.warning("certificate_not_renewed", detail=str(error))
                return
            self._load()
            log.info("certificate_renewed")


class Expiry:
    """The time at which the certificate that new connections get expires."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings, self._last_s = settings, math.inf
        # A scrape may find files that do not match.
        self.time_s()

    def time_s(self) -> float:
        """Return the Unix time; infinity without a certificate. While replaced files do not match, the old pair counts."""
        if self._settings.certificate:
            with suppress(OSError, SettingsError):
                check_certificate(self._settings)
                self._last_s = _expires_s(Path(self._settings.certificate).read_bytes())
        return self._last_s


def _expires_s(file: bytes) -> float:
    """Return the time at which the first certificate in a PEM file expires, that of the server itself."""
    block = _BLOCK.search(file)
    validity = _VALIDITY.search(binascii.a2b_base64(block[1])) if block else None
    if not validity:
        return math.inf
    digits = validity[1].decode()
    return datetime.strptime(digits, "%Y%m%d%H%M%S" if len(digits) == 14 else "%y%m%d%H%M%S").replace(tzinfo=UTC).timestamp()


def check_certificate(settings: ServeSettings) -> None:
    """Raise SettingsError if the settings name a certificate and key that cannot be used."""
    if not settings.certificate:
        return
    try:
        for file in (settings.certificate, settings.key):
            check_writer(file)
        # Without a password OpenSSL would ask for one on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.certificate, settings.key, password="")
    except OSError as error:
        raise SettingsError(f"serve.certificate, serve.key: cannot be used: {error.strerror}") from None
