"""Converts logs of other tools on their way into a command: the options for it, and the notes on converted runs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from types import MappingProxyType
from typing import Any, Final, NamedTuple, get_args

import click
from pydantic import TypeAdapter, ValidationError

from kp_scorer.adapters import FORMATS, ConvertedRun, Converter, Run, SuppliedFields, format_of
from kp_scorer.cli.options import Command, choice_option
from kp_scorer.cli.output import print_note
from kp_scorer.decoding import check_trace
from kp_scorer.errors import FieldsMissing, InvalidTrace, NotConverted, OutputFailed, Problem, UnknownFormat
from kp_scorer.limits import Limits
from kp_scorer.settings import Settings
from kp_scorer.trace import PrivacyLevel, ReasoningTrace, Visibility

_FIELDS: Final = {"id": "id", "success": "success", "confidence": "confidence", "domain": "task_domain", "time": "created_at"}
"""The fields that records may have under other names, by the option that states the name."""
_ASSUMED: Final = {"confidence": 0.5, "task_domain": "default"}
"""The values that are assumed, with a note, if neither the source of a run nor an option states them."""
_SUPPLIED: Final = TypeAdapter(SuppliedFields)
_MOST_LINES: Final = 1 << 40  # No file has this many lines, so a single number can stand for a file and a line in it.
MOST_PLACES: Final = 3  # A report on a file names at most this many of its lines.
UNKNOWN: Final = (
    "neither a trace, as `kp-scorer schema trace` describes, nor anything that `kp-scorer convert` reads: spans, messages with "
    f"roles, or calls with names and arguments, in any list ({', '.join(FORMATS)})"
)
_FAMILIAR: Final = frozenset(  # Names of fields that a report may quote: others may be content.
    "answer args arguments content data event events from id input inputs item items message messages metadata name output "  # noqa: SIM905
    "outputs payload prompt request response result role rows session source spans steps text timestamp tool type value".split()
)
_MOST_FIELDS_NAMED: Final = 12
_FIELD_NAME_CHARS: Final = 80


class Line(NamedTuple):
    """One trace of the input, or its error. ``number`` counts lines, or the items of a list, from 1."""

    number: int
    trace: ReasoningTrace | InvalidTrace
    size_bytes: int = 0
    document: Mapping[str, Any] = MappingProxyType({})  # As it was read, with ignored fields; empty if ``trace`` is an error.
    file: str = ""  # The file of the trace, if the command reads several.
    run: Run | None = None  # The run that was converted, if :class:`Conversion` keeps it.


Batches = Iterable[Sequence[Line]]


def shape_of(value: object) -> str:
    """Return a description of a value's type, without its content."""
    if isinstance(value, list):
        return f"a list of {len(value)}, the first {shape_of(value[0])}" if value else "an empty list"
    if not isinstance(value, dict):
        return "a text" if isinstance(value, str) else "a number or a constant"
    familiar = sorted(_FAMILIAR & value.keys())
    others = [f"{len(value) - len(familiar)} fields of other names"] if len(value) > len(familiar) else []
    return f"an object with {', '.join(familiar + others)}" if value else "an empty object"


class Conversion:
    """Converts the records in the files of a command, and counts them."""

    def __init__(self, supplied: SuppliedFields, limits: Limits, name: str = "") -> None:
        """Convert sources of the format of this ``name``; without one, detect the format of each source by its shape."""
        self._files = [""]
        self._times: list[str | None] = [None]  # The time when each file was written.
        defaults: dict[str, Any] = {name: lambda _, value=value: value for name, value in _ASSUMED.items()}
        defaults["created_at"] = lambda line: self._times[line // _MOST_LINES]
        self._converter = Converter(supplied._replace(defaults=defaults), limits, name)
        self._limits, self._name = limits, name
        self.runs = 0  # The number of runs that were converted or refused.
        self.keeps_runs = False  # True if lines keep their runs, which take more memory than traces.
        self._unknown = 0  # The number of sources in the current file that have no known format.
        self._unknown_lines: list[int] = []
        self._unknown_shape = ""
        self._missing: dict[str, None] = {}  # The options that runs lack, in order.
        self._lacking: dict[tuple[Problem, ...], list[int]] = {}  # The places of these runs, until another run is converted.

    def begin_file(self, name: str, written_at: str | None = None) -> None:
        """Start a file, whose lines are counted from 1 again."""
        self._files.append(name)
        self._times.append(written_at)

    def feed(self, line: int, value: object) -> Iterator[Line]:
        """Convert the runs that a source completes."""
        place = (len(self._files) - 1) * _MOST_LINES + line
        if self._converter.has_records(place, value) if self._name else format_of(value):
            yield from self._counted(self._converter.feed(place, value))
        elif not self._converter.skip_unrecognized(place, value):
            self._unknown_shape = self._unknown_shape or shape_of(value)
            self._unknown_lines += [line] if len(self._unknown_lines) < MOST_PLACES else []
            self._unknown += 1

    def end_file(self) -> Iterator[Line]:
        """Convert the runs that no later file can continue; report values without a format, unless the file is a session."""
        if self._unknown and not self._converter.in_session:
            expected = f"expected the format {self._name}" if self._name else UNKNOWN
            problem = Problem("$", f"{expected}; it is {self._unknown_shape}")
            error = UnknownFormat([problem], self._unknown_lines, self._unknown)
            yield Line(self._unknown_lines[0], error, file=self._files[-1])
        self._unknown, self._unknown_lines, self._unknown_shape = 0, [], ""
        yield from self._counted(self._converter.end_file())

    def end(self) -> Iterator[Line]:
        """Convert the remaining runs; raise UsageError if none could be converted because options are missing."""
        yield from self._counted(self._converter.end())
        if self._lacking:
            paths = "or, where each record has one of these, --success-field PATH and the like"
            raise click.UsageError(f"to convert this, expected {', '.join(self._missing)}; {paths}")

    def print_summary(self) -> None:
        """Print the numbers of converted runs, steps and errors, and the fields of the sources that were not read."""
        counts = self._converter.counts
        if not self.runs and not counts["left_out"]:
            return
        parts = f"{counts['steps']} steps, {counts['calls']} tool calls, {counts['errors']} errors"
        without = f"; 0 tools in {counts['toolless']} of {counts['traces']} runs" if counts["toolless"] else ""
        notes = {
            "continued": "chats go on in another",
            "repeated": "records repeat others",
            "skipped": "values that are not understood left out",
            "left_out": "traces without an agent left out",
            "mute": "more runs without messages",
            "mended": "runs cut to the limits, or mended",
            "bare": "calls without arguments",
            "rated": "runs have a success of more than 1, and 0.5 is enough for one",
            "renumbered": "runs got a number behind an id of --id-field that others have",
        }
        more = "".join(f"; {counts[name]} {note}" for name, note in notes.items() if counts[name])
        runs = f"{counts['traces']} of {self.runs} runs"
        print_note(f"converted {runs}: {parts}, {counts['recoveries']} error recoveries{without}{more}")
        words = {"confidence": "confidence 0.5 (--confidence)", "task_domain": "domain default (--domain)"}
        words["created_at"] = "the time of the file (--created-at)"
        if assumed := [f"{text} in {counts[name]} runs" for name, text in words.items() if counts[name]]:
            print_note(f"assumed, as nothing says it: {', '.join(assumed)}")
        if unread := self._converter.unread.most_common():
            names = [f"{name[:_FIELD_NAME_CHARS]} ({runs})" for name, runs in unread[:_MOST_FIELDS_NAMED]]
            more = f" and {len(unread) - _MOST_FIELDS_NAMED} more" if len(unread) > _MOST_FIELDS_NAMED else ""
            print_note(f"fields not read, and in how many runs: {', '.join(names)}{more}")

    def _counted(self, results: Iterable[ConvertedRun | NotConverted]) -> Iterator[Line]:
        for result in results:
            if isinstance(result, FieldsMissing) and not self._converter.counts["traces"]:
                # Wait with the error: if no run can be converted, one error asks for all options at once.
                self._missing |= dict.fromkeys(result.options)
                self._lacking.setdefault(tuple(result.problems), []).append(result.line)
            elif isinstance(result, NotConverted):
                yield self._line(result.line, InvalidTrace(result.problems))
            else:
                for problems, places in self._lacking.items():
                    yield from (self._line(place, InvalidTrace(problems)) for place in places)
                self._lacking.clear()
                size_bytes = sum(len(step["content"]) for step in result.trace["steps"])
                line = self._line(result.run.node.line, check_trace(result.trace, self._limits))
                run = result.run if self.keeps_runs else None
                yield line._replace(size_bytes=size_bytes, document=result.trace, run=run)

    def _line(self, place: int, trace: ReasoningTrace | InvalidTrace) -> Line:
        self.runs += 1
        file, number = divmod(place, _MOST_LINES)
        return Line(number, trace, file=self._files[file])


_OPTIONS: Final[Sequence[Callable[[Command], Command]]] = (
    choice_option("--from", "format_name", choices=FORMATS, help="Format of FILE; by default it is detected for each record."),
    click.option(
        "--confidence",
        metavar="FRACTION",
        help="How certain the outcomes of runs are, from 0 to 1; by default 0.5, with a note.",
    ),
    click.option(
        "--domain", "task_domain", metavar="NAME", help="Domain of the tasks; by default the domain default, with a note."
    ),
    choice_option("--visibility", choices=get_args(Visibility), default="private", help="Who may see the traces."),
    choice_option("--privacy-level", choices=get_args(PrivacyLevel), default="private", help="How the traces may be shared."),
    click.option("--success/--failed", default=None, help="Success of the runs whose source does not state it."),
    click.option(
        "--created-at",
        metavar="TIME",
        help="Time (ISO 8601) of the runs whose source does not state it; by default the file's time, with a note.",
    ),
    *(click.option(f"--{name}-field", metavar="PATH", help=f"Dotted path to the {name} in each record.") for name in _FIELDS),
)
CONVERTING: Final = ("format_name", *SuppliedFields._fields, *(f"{name}_field" for name in _FIELDS))
"""The names of these options as parameters."""


def converting_options(command: Command) -> Command:
    """Add the options for converting to a command, and pass it the ``conversion``, whose summary is printed at the end."""

    @wraps(command)
    def with_conversion(settings: Settings, format_name: str | None, **kwargs: Any) -> int | None:
        paths = {field: path for name, field in _FIELDS.items() if (path := kwargs.pop(f"{name}_field"))}
        fields = {key: kwargs.pop(key) for key in SuppliedFields._fields if key in kwargs}
        try:
            supplied = _SUPPLIED.validate_python(fields | {"paths": paths})
        except ValidationError as error:
            problem = error.errors()[0]
            own = next(each for each in click.get_current_context().command.params if each.name == problem["loc"][0])
            raise click.BadParameter(problem["msg"], param=own) from None
        conversion = Conversion(supplied, settings.limits, format_name or "")
        is_read = True
        try:
            return command(settings=settings, conversion=conversion, **kwargs)
        except OutputFailed:
            is_read = False
            raise
        finally:
            if is_read:
                conversion.print_summary()

    decorated: Command = with_conversion
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated
