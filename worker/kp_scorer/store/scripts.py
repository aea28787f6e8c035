"""Calls the package's Lua scripts with typed keys, arguments and replies, which each script declares by name.

Redis runs a script as one step, so that no process sees another's work half done. A script is declared as a function without a
body, and its file, ``lua/NAME.lua``, begins with the same names in the same order::

    @script(rows(_record))                              -- Uses   ledger
    def _acquire(                                       -- KEYS   pending, workers, record_prefix
        *, keys: Keys, lease: _Lease,                   -- ARGV   worker, lease_ms, identities... (trace_id, digest)
        identities: Sequence[Identity],                 -- Reply  (state, digest) for each trace
    ) -> None: ...

If the names differ, the import fails; mypy checks each call. Keys that are no parameters are attributes of ``keys``. If a key
has another type, the script fails at once: ``expect`` looks at each key, except at those behind ``Checks``, which the script
itself uses by ``call`` or ``use_reserve`` before it writes anything. A NamedTuple is an argument for each of its fields. The
names are locals of the script: numbers where the function has int, booleans where it has bool, tables of strings or of rows
with these fields where a name ends with dots, otherwise strings. An array is the string of its bytes.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib import resources
from typing import Any, Final, Generic, NamedTuple, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from redis.exceptions import NoScriptError

from kp_scorer.store.keys import Key

P = ParamSpec("P")
R = TypeVar("R")

VECTOR: Final = np.dtype("<f4")  # The type in which scripts get an array.
_HEADER: Final = re.compile(r"^-- (Uses|KEYS|Checks|ARGV) +(.*(?:\n--    +.*)*)", re.MULTILINE)

_NOW: Final = re.compile(r"^(?!\s*--).*\bnow\b", re.MULTILINE)  # Code that uses the local, not a comment with the word.


def row(kind: Callable[..., R]) -> Callable[[Any], R]:
    """Return a converter for a reply of several parts, which are the arguments of ``kind``."""
    return lambda reply: kind(*reply)


def rows(kind: Callable[..., R]) -> Callable[[Any], list[R]]:
    """Return a converter for a reply of any number of rows, whose parts are the arguments of ``kind``."""
    return lambda reply: [kind(*parts) for parts in reply]


def nothing(_: Any) -> None:
    """Return None, for a script whose reply says nothing."""


class Script(Generic[P, R]):
    """A script, which is called with a client and the keywords of its function. Threads and clients may share it."""

    def __init__(self, function: Callable[P, None], reply: Callable[[Any], R]) -> None:
        """Read the script with the name of ``function``, without its leading underscore."""
        self.name = function.__name__.lstrip("_")
        self.parse = reply
        labelled = _HEADER.findall(_text(self.name))
        header = {label: " ".join(names.replace("\n--", " ").split()) for label, names in labelled}
        # The texts of the libraries come after the script's locals, because they may refer to these.
        self._texts = [*filter(None, header.get("Uses", "").split(", ")), self.name]
        hints = get_type_hints(function)
        own = vars(hints.pop("keys", object))
        parameters = [_parameter(name, hint) for name, hint in hints.items() if name != "return"]
        listed = header["KEYS"].split(", ")
        self._keys = [each for each in parameters if str(each) in listed]
        self._arguments = [each for each in parameters if str(each) not in listed]
        self._checked = header.get("Checks", "").split(", ")
        self._own = {name: key.kind for name in listed if isinstance(key := own.get(name), Key)}
        declared = [*self._own, *map(str, self._keys)], ", ".join(map(str, self._arguments))
        if declared != (listed, header.get("ARGV", "")):
            raise TypeError(f"{self.name}.lua has {header}, its function has {declared}")
        self.compile()

    def compile(self) -> None:
        """Set :attr:`source`, the text that Redis runs, and :attr:`sha`, the SHA-1 by which Redis knows it."""
        keys = [_Parameter(name, {name: str}, is_list=False) for name in self._own]
        lines = [*_locals("KEYS", [*keys, *self._keys]), *_locals("ARGV", self._arguments)]
        texts = [_text(name) for name in self._texts]
        if any(_NOW.search(text) for text in texts):
            lines.append("local now = now_ms()")
        lines += [f"expect('{kind}', {name})" for name, kind in self._own.items() if kind and name not in self._checked]
        self.source = "\n".join([_text("common"), *lines, *texts])
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()

    def command(self, *_: P.args, **values: P.kwargs) -> tuple[Any, ...]:
        """Return the command that calls the script, for callers that read the reply and convert it by :attr:`parse`."""
        keys = [getattr(values["keys"], name) for name in self._own]
        keys += _flat(values[each.name] for each in self._keys)
        return "EVALSHA", self.sha, len(keys), *keys, *_flat(values[each.name] for each in self._arguments)

    def __call__(self, client: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the script with these keys and arguments, and return its converted reply."""
        return self.run(client, self.command(*args, **kwargs))

    def run(self, client: Any, command: tuple[Any, ...]) -> R:
        """Run the script's command. If Redis does not have the script, as after a restart or a failover, load it first."""
        try:
            reply = client.execute_command(*command)
        except NoScriptError:
            self.load(client)
            reply = client.execute_command(*command)
        return self.parse(reply)

    def load(self, client: Any) -> None:
        """Load the script into Redis, where it stays until a restart; users who may not load scripts can then run it, too."""
        client.execute_command("SCRIPT LOAD", self.source)


def script(reply: Callable[[Any], R]) -> Callable[[Callable[P, None]], Script[P, R]]:
    """Return a decorator that makes a :class:`Script` of a function without a body; ``reply`` converts the script's reply."""
    return lambda function: Script(function, reply)


class _Parameter(NamedTuple):
    name: str
    fields: dict[str, Any]  # The names and types of the parts; a type without parts counts as one part.
    is_list: bool

    def __str__(self) -> str:
        names = ", ".join(self.fields)
        return names if not self.is_list else f"{self.name}..." if names == self.name else f"{self.name}... ({names})"


def _parameter(name: str, hint: Any) -> _Parameter:
    is_list = get_origin(hint) is Sequence
    return _Parameter(name, _fields(name, get_args(hint)[0] if is_list else hint), is_list)


def _fields(name: str, kind: Any) -> dict[str, Any]:
    if not hasattr(kind, "_fields"):
        return {name: kind}
    return {field: of for part, hint in get_type_hints(kind).items() for field, of in _fields(part, hint).items()}


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        elif isinstance(value, np.ndarray):
            yield value.astype(VECTOR).tobytes()
        else:
            # redis-py refuses booleans.
            yield int(value) if isinstance(value, bool) else value


def _locals(table: str, parameters: Sequence[_Parameter]) -> Iterator[str]:
    """Yield the lines of Lua that give the keys or the arguments their names."""
    number = 1
    for name, fields, is_list in parameters:
        place = "i" if is_list else str(number)
        parts = {field: _converted(kind, f"{table}[{place} + {at}]") for at, (field, kind) in enumerate(fields.items())}
        if is_list:
            of_row = parts.get(name) or "{" + ", ".join(f"{field} = {part}" for field, part in parts.items()) + "}"
            yield f"local {name} = {{}}"
            yield f"for i = {number}, #{table}, {len(parts)} do {name}[#{name} + 1] = {of_row} end"
        else:
            yield from (f"local {field} = {part}" for field, part in parts.items())
        number += len(parts)


def _converted(kind: Any, place: str) -> str:
    return f"tonumber({place})" if kind is int else f"{place} == '1'" if kind is bool else place


@cache
def _text(name: str) -> str:
    return resources.files(__package__).joinpath("lua", f"{name}.lua").read_text("utf-8")
