"""Every Redis key the scorer owns, in one place. Each has a TTL or a bound.

    {prefix}:log:{space}        stream   the novelty log: entry id = time and place; fields: i trace id, c content digest,
                                         v vector, or e the erased place. Trimmed by length and age; expires once all its
                                         entries have
    {prefix}:log:{space}:head   hash     epoch, time_ms and place of the newest entry; expires a minute after the log
    {prefix}:trace:{id}         hash     the ledger's record of one trace: state, content, decision, reason; and the epoch of
                                         the log, its entry there, and entries given_up; expires ``ledger.ttl_s`` after its
                                         last change
    {prefix}:dead               stream   dead letters; trimmed by age, expires with the last

Queues belong to the broker and are bounded by whoever consumes them.
"""

from dataclasses import dataclass


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
    def dead_letters(self) -> str:
        """All dead letters."""
        return f"{self.prefix}:dead"
