"""The fields that Redis has for a trace and for a dead letter, and their times to live."""

from dataclasses import dataclass
from typing import Final

from kp_scorer.settings.sections import LedgerSettings
from kp_scorer.store.keys import KEPT_S, Keys

KEYS: Final = Keys("m")
WORKER_LEASE_MS: Final = 5_000
WORKERS_REMEMBERED_MS: Final = 3_600_000
TRACE_LEASE_MS: Final = 120_000
RESEND_AFTER_MS: Final = 600_000
RECORD_TTL_MS: Final = 86_400_000
KEPT_MS: Final = KEPT_S * 1_000


class SmallLedger(LedgerSettings):
    max_resends = 1
    # So few that letters are often dropped, for being too many or, two of those that can be decoded, too large.
    max_dead_letters = 3
    max_dead_letter_bytes = 790


LEDGER: Final = SmallLedger(ttl_s=RECORD_TTL_MS / 1_000, resend_after_s=RESEND_AFTER_MS / 1_000)


def key_of(kind: str) -> str:
    return {"junk": KEYS.dead_junk, "rest": KEYS.dead_rest}[kind]


@dataclass
class TraceRecord:
    """A trace's record; state is empty where only its place is known."""

    state: str = ""
    digest: bytes = b""
    decision: bytes = b""
    reason: str = ""
    detail: str = ""
    letter: str = ""
    as_letter: bytes = b""
    since_ms: int = 0
    submission: bytes = b""
    resends: int = 0
    attempts: int = 0
    owner: str = ""
    held_until_ms: int = 0
    epoch: str = ""
    entry: str = ""
    revised: bytes = b""
    outcomes: str = ""
    revises: str = ""
    fact: str = ""
    """The serial number of its newest fact; in Redis that has a place."""

    def forget_place(self) -> None:
        self.epoch = self.entry = ""

    def release(self, held_until_ms: int = 0) -> None:
        self.owner, self.held_until_ms = "", held_until_ms


@dataclass
class Letter:
    """A dead letter. Its serial tells this dead-lettering from every other, whatever the record in Redis holds."""

    payload: bytes
    reason: str
    detail: str
    trace_id: str
    deliveries: int
    first_ms: int
    last_ms: int
    burials: int
    serial: int
