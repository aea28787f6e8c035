"""Decides traces again because of late outcomes, once for each outcome."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from kp_scorer.decider import Resolved, release_dead, releasing, resolved_by
from kp_scorer.decision import Decision, Received
from kp_scorer.errors import TraceDead
from kp_scorer.gate import GatePolicy
from kp_scorer.scoring import revise
from kp_scorer.store.ledger import RedisLedger
from kp_scorer.store.records import Change, Identity, Record, Revision
from kp_scorer.store.records import Revised as Committed
from kp_scorer.trace import LateOutcome

Revised = Resolved | Literal["waits"]
"""``waits``: the late outcome waits in the ledger for its trace."""

_FORGED: Final = "key: expected the text whose SHA-256 ends the id of the trace, or the key of a client"
_TOO_OLD: Final = "trace_id: expected a trace that this version, or a later one, has decided"
_TOO_MANY: Final = "trace_id: expected a trace with fewer late outcomes"


@dataclass
class Reviser:
    """Turns late outcomes into revisions, with four round trips to Redis for all of them together. One thread owns it."""

    ledger: RedisLedger
    gate: GatePolicy
    max_attempts: int

    def revise(
        self, outcomes: Sequence[LateOutcome], received: Sequence[Received | None], *, alone: bool = False
    ) -> list[Revised | None]:
        """Return for each late outcome its revision, or the reason for having none; None if it is to be tried again, alone.

        Revising again is safe: an outcome keeps its revision. Raises ServiceUnavailable if Redis cannot be reached.
        """
        identities = [Identity(each.id, each.digest()) for each in outcomes]
        records = self.ledger.acquire(identities, alone=alone)
        results: list[Revised | None] = [
            resolved_by(*each, self.max_attempts) for each in zip(identities, records, strict=True)
        ]
        claimed = [at for at, record in enumerate(records) if results[at] is None and (alone or not record.attempts)]
        with releasing(self.ledger, [outcomes[at].id for at in claimed]):
            revised = self._revise([outcomes[at] for at in claimed], [received[at] for at in claimed])
        for at, result in zip(claimed, revised, strict=True):
            results[at] = result
        release_dead(self.ledger, results)
        return results

    def _revise(self, outcomes: Sequence[LateOutcome], received: Sequence[Received | None]) -> list[Revised | None]:
        if not outcomes:
            return []
        secret = self.ledger.outcome_secret()
        records = self.ledger.look_up([each.trace_id for each in outcomes])
        judged = [self._judge(*each, secret) for each in zip(outcomes, records, received, strict=True)]
        committed = iter(self.ledger.revise([each for each in judged if isinstance(each, Revision)]))
        return [_result(each, next(committed)) if isinstance(each, Revision) else each for each in judged]

    def _judge(self, late: LateOutcome, record: Record | None, received: Received | None, secret: str) -> Revision | TraceDead:
        revision = Revision(late.id, late.digest(), late.trace_id, late.model_dump_json(exclude_none=True).encode())
        if not late.is_authentic(secret):
            return TraceDead(late.id, "invalid", _FORGED)
        if record is None or record.decision is None:
            return revision
        if record.decision.stated is None:
            return TraceDead(late.id, "invalid", _TOO_OLD)
        # Readers tell the decisions on a trace apart by their times, and the latest one counts. So a revision must be later,
        # even if this worker's clock is behind.
        at = max(datetime.now(UTC), datetime.fromisoformat(record.decision.decided_at) + timedelta(milliseconds=1))
        changed = {"received": received, "decided_at": at.isoformat(timespec="milliseconds")}
        decision = revise(record.decision, late, self.gate.admits).model_copy(update=changed)
        was_kept, is_kept = (bool(each.gate) and each.outcome == "accepted" for each in (record.decision, decision))
        change: Change = "" if was_kept == is_kept else "kept" if is_kept else "dropped"
        raw = decision.model_dump_json().encode()
        return revision._replace(supersedes=record.decision.decided_at, decision=raw, outcome=decision.outcome, change=change)


def _result(revision: Revision, committed: Committed) -> Revised | None:
    match committed:
        case "stored":
            return Decision.model_validate_json(revision.decision)
        case "again":
            return None
        case "too_many":
            return TraceDead(revision.outcome_id, "invalid", _TOO_MANY)
        case _:
            return committed
