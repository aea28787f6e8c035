"""Defines the description of a format, which each module of ``formats`` provides."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kp_scorer.adapters.building import Run
from kp_scorer.adapters.node import Node


class Format(NamedTuple):
    """The functions and properties by which a converter finds the records in a source, and makes runs of them."""

    fits: Callable[[Any], bool]
    """Returns whether an object looks like a source of this format, or like an item of one. A general format gets the source
    itself, which may be a list."""
    run: Callable[[str, Sequence[Node]], Run | list[Run]]
    """Makes a run, or several, of the records with an id; returns an empty list if no agent made them. Raises NotConverted."""
    records: Callable[[Node], Iterable[Node]] = Node.each
    """Returns the records in a source."""
    run_id: Callable[[Node], str | None] = lambda _: None
    """Returns the id that the records of a run share: None if a record is a run by itself, empty if it continues the run of the
    record before it."""
    starts: Callable[[Node], int] = lambda _: 0
    """Returns the time of a record, which completes every run whose ``ends`` is not later."""
    ends: Callable[[Sequence[Node]], int | None] = lambda _: None
    """Returns the time from which a run with these records is complete; None if that is unknown."""
    waits: Callable[[Sequence[Node], int], int | None] = lambda *_: None
    """Returns the time until which a run waits for records that its records refer to, although ``ends`` has passed by the time
    given; None if the run waits for no record."""
    is_general: bool = False
    """True if sources of other formats may fit, too; such a format is tried last."""
    has_chats: bool = False
    """True if a record may repeat an earlier record and continue it."""
    is_of_one_file: bool = False
    """True if a run is complete at the end of its file."""
    has_ids_of_files: bool = False
    """True if two files may use one id for two runs: records are joined with those of their own file first."""
    continues: Callable[[Sequence[Node], Node], bool] = lambda _, __: False
    """Returns whether a record with an id of its own nevertheless belongs to the run before it, whose records come first."""
    identities: Callable[[Node], Iterable[str]] = lambda _: ()
    """Returns the texts that identify a record. A record with one of the texts of an earlier record is a repetition."""
