"""HTML made of elements; every text in them is escaped, wherever it is from."""

from html import escape

from kp_scorer.characters import escaped_lines


class Html(str):
    """HTML, to be taken as it is. Any other text is escaped as it is put into an element."""

    __slots__ = ()


_VOID = frozenset({"meta", "br"})


def element(name: str, /, *children: str, **attributes: str) -> Html:
    """An element. An attribute that Python would not have is written with an underscore at its end or for its hyphen."""
    shown = "".join(f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{shown}>" if name in _VOID else f"<{name}{shown}>{joined(*children)}</{name}>")


def joined(*children: str) -> Html:
    """One after the other."""
    return Html("".join(map(text, children)))


def text(content: str) -> Html:
    """A text with all that HTML, or a terminal that shows its source, would act on escaped; HTML as it is."""
    return content if isinstance(content, Html) else Html(escape(escaped_lines(content)))
