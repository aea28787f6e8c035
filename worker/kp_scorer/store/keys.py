"""Every Redis key the scorer owns, in one place. Each has a TTL or a bound.

    {prefix}:log:{space}        stream   the novelty log: entry id = time and place; fields: i trace id, d digest,
                                         v vector. Trimmed by length and age; expires once all its entries have
    {prefix}:log:{space}:head   hash     epoch, time_ms and place of the newest entry, and the window that its workers
                                         share; expires a minute after the log
    {prefix}:log:{space}:erased stream   field e: an entry that was erased, for mirrors that have read it; trimmed by length;
                                         expires with the log
    {prefix}:workers            zset     ids of workers by the time until which each is taken for alive, in ms; an hour
    {prefix}:worker:{id}        string   what a worker says of itself, as JSON; expires after 5 s
    {prefix}:trace:{id}         hash     the ledger's record of one trace; ``lua/ledger.lua`` lists its fields; expires
                                         ``ledger.ttl_s`` after it was decided or died, and not before
    {prefix}:pending            zset     ids of pending traces by the time each was last sent, in ms; each leaves when it ends
    {prefix}:counts             hash     how many were submitted, decided and dead; one key
    {prefix}:tallies            hash     how many decisions were stored of each domain; one key with a field a domain, of 1,000
                                         domains and those that settings name. ``lua/commit.lua`` lists its fields
    {prefix}:compared:{policies} hash    what a shadow would have made of them, by the fingerprint of the live policy and its
                                         own; at most nine fields a domain, of the same domains; expires 30 days after the
                                         last decision that these two were compared on
    {prefix}:drained            string   when the queue was last seen empty, in ms; expires after 30 days
    {prefix}:dropped            hash     how many decisions were dropped unread, by queue or stream, and how many dead letters,
                                         to make room; one key with a field a queue
    {prefix}:dead               zset     ids of dead letters by the time each was last buried, in ms; trimmed by age, and to
                                         ``ledger.max_dead_letters`` and ``ledger.max_dead_letter_bytes``
    {prefix}:dead_sizes         hash     bytes of each dead letter's payload, by its id, and of all in ``total``
    {prefix}:dead:{id}          hash     a dead letter; expires 30 days after it was last buried

Beside these, without the prefix, the streams of decisions, which ``decision_stream.py`` describes: called as
``queues.accepted``, ``queues.review`` and ``queues.rejected`` say, and bounded by ``queues.results_limit``.

Queues belong to the broker and are bounded by whoever consumes them.
"""

from dataclasses import dataclass
from typing import Final

KEPT_S: Final = 30 * 86_400
"""How long dead letters are kept, pending traces that nothing is known of but that they once came, and counts of policies that
are compared no more."""


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

    def erased(self, space: str) -> str:
        """What was erased from a novelty log."""
        return f"{self.prefix}:log:{space}:erased"

    def space_of(self, key: str) -> str:
        """The space whose log is at ``key``; empty if it is no log, but belongs to one."""
        return "" if key.endswith((":head", ":erased")) else key.removeprefix(self.log(""))

    @property
    def workers(self) -> str:
        """Which workers are alive."""
        return f"{self.prefix}:workers"

    def worker(self, worker: str) -> str:
        """What a worker says of itself."""
        return f"{self.prefix}:worker:{worker}"

    @property
    def any_log(self) -> str:
        """A pattern for the logs of all spaces; what belongs to them matches it too."""
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
    def tallies(self) -> str:
        """How many decisions there were of each domain."""
        return f"{self.prefix}:tallies"

    def compared(self, policies: str) -> str:
        """What came of comparing two policies, which ``policies`` stands for."""
        return f"{self.prefix}:compared:{policies}"

    @property
    def drained(self) -> str:
        """When the queue was last seen empty."""
        return f"{self.prefix}:drained"

    @property
    def dropped(self) -> str:
        """How much was dropped to make room."""
        return f"{self.prefix}:dropped"

    @property
    def dead_letters(self) -> str:
        """The index of dead letters."""
        return f"{self.prefix}:dead"

    @property
    def letter_sizes(self) -> str:
        """How large dead letters are."""
        return f"{self.prefix}:dead_sizes"

    def letter(self, letter_id: str) -> str:
        """One dead letter."""
        return f"{self.prefix}:dead:{letter_id}"
