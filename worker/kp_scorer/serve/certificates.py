"""Checks the server's certificate, and loads a renewed one, because a certificate may expire before the process ends."""

import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from kp_scorer.errors import SettingsError
from kp_scorer.files import check_writer
from kp_scorer.settings.sections import ServeSettings

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
