"""The fields that Redis holds for a trace and for a dead letter, and their lifetimes."""

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
    # The limits are so low that letters are often dropped: for their number, or because two that can be decoded are too large.
    max_dead_letters = 3
    max_dead_letter_bytes = 790


LEDGER: Final = SmallLedger(ttl_s=RECORD_TTL_MS / 1_000, resend_after_s=RESEND_AFTER_MS / 1_000)


def key_of(kind: str) -> str:
    return {"junk": KEYS.dead_junk, "rest": KEYS.dead_rest}[kind]


@dataclass
class TraceRecord:
    """The record of a trace. Its state is empty where only its place in the log is known."""

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
    """The serial number of the trace's newest fact, where Redis has the fact's place."""

    def forget_place(self) -> None:
        self.epoch = self.entry = ""

    def release(self, held_until_ms: int = 0) -> None:
        self.owner, self.held_until_ms = "", held_until_ms


@dataclass
class Letter:
    """A dead letter. Its serial number identifies this dead-lettering, even if the same letter is stored again."""

    payload: bytes
    reason: str
    detail: str
    trace_id: str
    deliveries: int
    first_ms: int
    last_ms: int
    burials: int
    serial: int
