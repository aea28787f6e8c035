"""Parses values that Python and pydantic print, in one pass: Python's parser takes a thousand bytes for each character.

``{'a': (1, None)}`` and ``Message(role='user', content=[])`` become the JSON that they stand for. A message may be printed as
its fields alone, without commas between them. Values that JSON lacks become null; a member of an enumeration becomes its value.
"""

import re
from collections.abc import Iterator
from keyword import iskeyword
from typing import Any, Final

_TOKEN: Final = re.compile(
    r"""\s*+(?:
        (?P<text> b?+(?: '(?:[^'\\\n]|\\.)*+' | "(?:[^"\\\n]|\\.)*+" ) )
      | <[\w.]++:[ ](?P<member> '[^'\n]*+' )>
      | (?P<number> [-+]?+(?:0|[1-9][0-9]*+)(?:\.[0-9]*+)?+(?:e[-+]?+[0-9]++)?+ (?![\w.]) )
      | _?+(?P<field> [^\W\d]\w*+ )=
      | (?P<word> [-+]?+[^\W\d]\w*+(?:\.[^\W\d]\w*+)*+ | <[^<>]*+> | \.\.\. )
      | (?P<sign> [\[\](){},:] )
    )""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|(.))", re.DOTALL)
_ESCAPED: Final = dict(zip("abfnrtv\\'\"\n", [*"\a\b\f\n\r\t\v\\'\"", ""], strict=True))
_CLOSING: Final = {"[": "]", "(": ")", "{": "}"}
_MOST_VALUES: Final = 50_000  # By default, a trace may have only 20,000. More than these would take seconds to read.


def shown_by_python(text: str, most_depth: int) -> Any:
    """Return the value that a text is the ``repr`` of, or the fields of the message that it shows.

    Raises ValueError for other texts, and for values nested more deeply than ``most_depth``.
    """
    values, fields, _ = _Reader(text, most_depth).items("")
    if len(values) + bool(fields) != 1:
        raise ValueError
    return fields or values[0]


class _Reader:
    """Parses the tokens of a text, always one ahead. The last token is empty."""

    def __init__(self, text: str, most_depth: int) -> None:
        self._tokens = _tokens(text)
        self._depth_left = most_depth
        self._values_left = _MOST_VALUES
        self._kind, self._text = next(self._tokens)

    def items(self, closing: str) -> tuple[list[Any], dict[str, Any], bool]:
        """Read the values, pairs and fields up to a bracket; return values, the other two, and True if a comma came last.

        Only ``}`` has pairs before it, and only other brackets have fields, which need no commas.
        """
        values: list[Any] = []
        fields: dict[str, Any] = {}
        has_comma = False
        while not self._is_at(closing):
            is_field = self._kind == "field" and closing != "}"
            if (values or fields) and not has_comma and not is_field:
                raise ValueError
            item = self._take() if is_field else self._value()
            # Refuse an object as a key: its text could double in length at each level of nesting.
            if closing == "}" and self._is_at(":") and not isinstance(item, dict | list):
                self._take()
                is_field = True
            if is_field:
                fields[str(item)] = self._value()
            elif fields:
                raise ValueError
            else:
                values.append(item)
            if has_comma := self._is_at(","):
                self._take()
        self._take()
        return values, fields, has_comma

    def _is_at(self, sign: str) -> bool:
        return self._kind == "sign" and self._text == sign

    def _take(self) -> str:
        taken = self._text
        self._kind, self._text = next(self._tokens, ("sign", ""))
        return taken

    def _value(self) -> Any:
        self._values_left -= 1
        if self._values_left < 0:
            raise ValueError
        match self._kind:
            case "text":
                return self._texts()
            case "member":
                return self._take()[1:-1]
            case "number":
                return int(number) if (number := self._take()).lstrip("+-").isdigit() else float(number)
            case "word":
                return self._word()
        return self._within(self._take())

    def _texts(self) -> str | None:
        # Python may print a long text in parts.
        parts = [self._take()]
        while self._kind == "text":
            parts.append(self._take())
        return None if parts[0].startswith("b") else "".join(map(_unquoted, parts))

    def _word(self) -> Any:
        """Read a constant, or an object that is printed as the call of its constructor; return the fields of such an object."""
        word = self._take()
        value: Any = {"True": True, "False": False}.get(word)
        if iskeyword(word) and value is None and word != "None":
            raise ValueError
        while self._is_at("(") or self._is_at("["):
            # A type may have parameters: ``Message[str](content='…')``.
            value = self._within(self._take(), is_call=True)
        return value

    def _within(self, opening: str, *, is_call: bool = False) -> Any:
        """Read the value that begins with this bracket."""
        self._depth_left -= 1
        if self._depth_left < 0 or opening not in _CLOSING:
            raise ValueError
        values, fields, has_comma = self.items(_CLOSING[opening])
        if fields and (values if opening == "{" else opening == "[" or not is_call):
            raise ValueError
        if opening == "{":
            # JSON lacks sets.
            value: Any = None if values else fields
        elif is_call:
            value = fields or None
        else:
            value = values if opening == "[" or has_comma or len(values) != 1 else values[0]
        self._depth_left += 1
        return value


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    place, end = 0, len(text.rstrip())
    while place < end:
        match = _TOKEN.match(text, place, end)
        if not match:
            raise ValueError
        kind = match.lastgroup or "word"
        yield kind, match[kind]
        place = match.end()
    yield "sign", ""


def _unquoted(shown: str) -> str:
    return _ESCAPE.sub(_unescaped, shown[1:-1]) if "\\" in shown else shown[1:-1]


def _unescaped(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2] or escape[3]
    return chr(int(code, 16)) if code else _ESCAPED.get(escape[4], escape[0])
