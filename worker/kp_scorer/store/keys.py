"""Every Redis key the scorer owns, in one place. Each has a TTL or a bound.

    {prefix}:log:{space}        stream   the novelty log: entry id = time and place; fields: i trace id, d digest,
                                         v vector. Trimmed by length and age; expires once all its entries have
    {prefix}:log:{space}:head   hash     epoch, time_ms and place of the newest entry, and the window that its workers
                                         share; expires a minute after the log
    {prefix}:log:{space}:erased stream   field e: an entry that was erased, for mirrors that have read it; trimmed by length;
                                         expires with the log
    {prefix}:gate:{space}       stream   a fact for each decision, where routing.gate is "coverage": i trace id, d domain, f
                                         the fact, in the form that ``gate/facts.py`` defines; and notes on facts, which
                                         ``lua/facts.lua`` lists; trimmed to 10,000
    {prefix}:gate:{space}:kept  stream   the facts of kept traces, and notes on those that are kept no longer, by the same ids;
                                         trimmed to ``gate.kept_elements`` and ``gate.kept_ttl_s``. Both expire when the newest
                                         of them would
    {prefix}:pin:{space}:{name} hash     a pinned set: fields space, name, kind, version, entries, and for every 1,000 entries
                                         ``ids:N`` (JSON) and ``vectors:N``; at most 100,000 entries, until it is removed
    {prefix}:pinning:{random}   hash     a set that is being written; expires after a minute
    {prefix}:copies             stream   copies of the traces that workers decide while another log is warmed: i trace id,
                                         t trace; at most 64 MiB; expires a minute after its reader last looked
    {prefix}:workers            zset     ids of workers by the time until which each counts as alive, in ms; an hour
    {prefix}:worker:{id}        string   a worker's report, as JSON; expires after 5 s
    {prefix}:trace:{id}         hash     the ledger's record of one trace; ``lua/ledger.lua`` lists its fields; expires
                                         ``ledger.ttl_s`` after it was decided or died, and not before
    {prefix}:outcome_secret     string   the secret behind the keys of late outcomes, for programs that may read it; one key
    {prefix}:pending            zset     ids of pending traces by the time each was last sent, in ms; each leaves when it ends
    {prefix}:counts             hash     the numbers of submissions, of decided and dead ones, and of dead-letterings for each
                                         reason; one key
    {prefix}:tallies            hash     the number of stored decisions of each domain; one key with a field for each of 1,000
                                         domains and of those that settings name. ``lua/commit.lua`` lists its fields
    {prefix}:drained            string   the time in ms since when every queue has been seen empty; expires after 30 days
    {prefix}:dropped            hash     the number of dead letters of each reason that were dropped to make room; one key
    {prefix}:dead               zset     ids of dead letters by the time each was last dead-lettered, in ms; trimmed by age
    {prefix}:dead_junk          zset     like ``dead``, for those that any producer can cause; trimmed to 50,000 and 128 MiB
    {prefix}:dead_rest          zset     like ``dead_junk``, for the rest
    {prefix}:dead_sizes         hash     bytes and kind of each dead letter, and the bytes of each kind. These four expire with
                                         the last dead letter
    {prefix}:dead:{id}          hash     a dead letter; expires 30 days after it was last dead-lettered
    {prefix}:reading:{id}       hash     the number of workers that began to read a message that has come back for the second
                                         time, and did not finish; the id is a dead letter's; expires after 30 days
    {prefix}:runs               zset     ids of runs whose spans are collected by the time each is to be submitted, in ms; at
                                         most 10,000
    {prefix}:runs_bytes         string   bytes of all these spans; at most ``serve.total_bytes``
    {prefix}:runs_by_sender     hash     the open runs of each token, by its digest, and their bytes; absent while none is open
    {prefix}:runs_kept          zset     ids of submitted runs whose spans are kept to be handed on, by the time when that ends;
                                         they make room for new runs. Expires an hour after the last of these times
    {prefix}:run:{id}           hash     the spans of one run; ``lua/store_spans.lua`` lists its fields. Expires with the first
                                         three, 30 days after the last span, or ``runs_kept``; without spans in an hour
    {prefix}:run_recording:{digest}
                                string   the run in which a conversation first came from one sender, its instrumentation and its
                                         times, as JSON; expires after an hour

Beside these, without the prefix, the streams of decisions, which ``decision_stream.py`` describes: their names begin as
``queues.decisions`` says, and ``queues.results_limit`` bounds them.

Queues belong to the broker, and their consumers bound them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

KEPT_S: Final = 30 * 86_400  # Seconds for which dead letters are kept, and pending traces without a submission to send again.


@dataclass(frozen=True)
class Prefixed:
    """Keys whose names share a prefix."""

    prefix: str


class Key:
    """A key that exists once under each prefix. A script fails before it writes anything if the key has another type."""

    def __init__(self, end: str, kind: str = "") -> None:
        self._end = end
        self.kind = kind  # Empty if no script checks the type.

    def __get__(self, keys: Prefixed, _: type) -> str:
        return keys.prefix + self._end


class _KeyOf:
    """A key that exists once for each id."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, keys: Prefixed, _: type) -> Callable[[str], str]:
        return f"{keys.prefix}:{self._name}:".__add__


class LogKeys(Prefixed):
    """The keys of one novelty log."""

    log = Key("", "stream")
    head = Key(":head", "hash")  # It holds the newest place, so that trimming the log cannot lose it.
    erasures = Key(":erased", "stream")


class FactKeys(LogKeys):
    """The keys of the facts of one space. A note that a fact was erased is stored among the facts."""

    erasures = Key("", "stream")


class KeptFactKeys(FactKeys):
    """The keys of the facts of kept traces."""

    log = Key(":kept", "stream")


class Keys(Prefixed):
    """Names of the keys under one prefix."""

    workers = Key(":workers", "zset")
    copies = Key(":copies")
    pending = Key(":pending", "zset")
    outcome_secret = Key(":outcome_secret")
    counts = Key(":counts", "hash")
    tallies = Key(":tallies", "hash")
    drained = Key(":drained")
    dropped = Key(":dropped", "hash")
    dead_letters = Key(":dead", "zset")
    dead_letter_sizes = Key(":dead_sizes", "hash")
    dead_junk = Key(":dead_junk", "zset")
    dead_rest = Key(":dead_rest", "zset")
    runs = Key(":runs", "zset")
    runs_bytes = Key(":runs_bytes")
    runs_by_sender = Key(":runs_by_sender", "hash")
    runs_kept = Key(":runs_kept", "zset")
    record_prefix = Key(":trace:")  # Scripts build keys by appending ids to this one and the next two.
    dead_letter_prefix = Key(":dead:")
    run_prefix = Key(":run:")
    any_log = Key(":log:*")  # The pattern of the logs of all spaces, which matches their heads and erasures too.
    any_facts = Key(":gate:*")  # The pattern of the facts of all spaces, those of kept traces too.
    any_pinned_set = Key(":pin:*")  # The pattern of the pinned sets of all spaces.

    worker = _KeyOf("worker")
    record = _KeyOf("trace")
    dead_letter = _KeyOf("dead")
    reading = _KeyOf("reading")
    run = _KeyOf("run")
    recording = _KeyOf("run_recording")
    pinning = _KeyOf("pinning")

    def of_log(self, space: str) -> LogKeys:
        """Return the keys of the novelty log of one embedding space."""
        return LogKeys(f"{self.prefix}:log:{space}")

    def of_facts(self, space: str) -> str:
        """Return the prefix of the keys of the facts of one embedding space."""
        return f"{self.prefix}:gate:{space}"

    def pinned_set(self, space: str, name: str) -> str:
        """Return the key of a pinned set of one embedding space."""
        return f"{self.prefix}:pin:{space}:{name}"
