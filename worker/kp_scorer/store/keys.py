"""Every Redis key the scorer owns, in one place. Each has a TTL or a bound.

    {prefix}:log:{space}        stream   the novelty log: entry id = time and place; fields: i trace id, d digest,
                                         v vector, or e the erased place. Trimmed by length and age; expires once all its
                                         entries have
    {prefix}:log:{space}:head   hash     epoch, time_ms and place of the newest entry; expires a minute after the log
    {prefix}:trace:{id}         hash     the ledger's record of one trace: state, digest, decision, reason, detail; the epoch of
                                         the log, its entry there, and entries given_up; while it is pending its submission, the
                                         attempts to decide it and its resends; expires ``ledger.ttl_s`` after its last change,
                                         or 30 days while it is pending
    {prefix}:pending            zset     ids of pending traces by the time each was last sent, in ms; expires with the last
    {prefix}:counts             hash     how many were submitted, decided and dead; expires 30 days after the last change
    {prefix}:drained            string   when the queue was last seen empty, in ms; expires after 30 days
    {prefix}:dead               zset     ids of dead letters by the time each was last buried, in ms; trimmed by age
    {prefix}:dead:{id}          hash     a dead letter; expires 30 days after it was last buried

Queues belong to the broker and are bounded by whoever consumes them.
"""

from dataclasses import dataclass
from typing import Final

KEPT_S: Final = 30 * 86_400
"""How long dead letters, and traces that are pending, are kept."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of the keys under one prefix."""

    prefix: str

    def log(self, space: str) -> str:
        """The novelty log of one embedding space."""
        return f"{self.prefix}:log:{space}"

    def head(self, space: str) -> str:
        """The newest place of a novelty log, kept apart so that trimming cannot lose it."""
        return f"{self.prefix}:log:{space}:head"

    @property
    def any_log(self) -> str:
        """A pattern for the logs of all spaces; their heads match it too."""
        return f"{self.prefix}:log:*"

    def record(self, trace_id: str) -> str:
        """The ledger's record of a trace."""
        return f"{self.prefix}:trace:{trace_id}"

    @property
    def pending(self) -> str:
        """The index of pending traces."""
        return f"{self.prefix}:pending"

    @property
    def counts(self) -> str:
        """How many submissions there were, and what became of them."""
        return f"{self.prefix}:counts"

    @property
    def drained(self) -> str:
        """When the queue was last seen empty."""
        return f"{self.prefix}:drained"

    @property
    def dead_letters(self) -> str:
        """The index of dead letters."""
        return f"{self.prefix}:dead"

    def letter(self, letter_id: str) -> str:
        """One dead letter."""
        return f"{self.prefix}:dead:{letter_id}"
