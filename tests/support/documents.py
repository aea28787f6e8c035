"""The documents of the repository, line by line, and the code in them."""

import re
from collections.abc import Iterator
from textwrap import dedent
from typing import Final, NamedTuple

from tests.support.paths import REPOSITORY

DOCUMENTS: Final = (
    "README.md",
    "CONTRIBUTING.md",
    "deploy/INCIDENTS.md",
    "deploy/OPERATIONS.md",
    "deploy/README.md",
    "deploy/SECURITY.md",
    "tests/benchmarks/README.md",
    "worker/API.md",
    "worker/ARCHITECTURE.md",
    "worker/CONCEPTS.md",
    "worker/CONVERT.md",
    "worker/HOWTO.md",
    "worker/SCORING.md",
    "worker/SERVE.md",
    "worker/WIRE.md",
)

_FENCE: Final = re.compile(r"\s*(```|~~~)")
_ITEM: Final = re.compile(r"\s*([-*+]|\d+\.)\s")
_SPAN: Final = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")


class Line(NamedTuple):
    place: str
    """The name of the document and the number of the line."""
    text: str
    is_code: bool
    """True if the line is in a block of code, fenced or indented."""
    fences: int = 0
    """The number of the document's fenced blocks that begin before the line."""

    @property
    def spans(self) -> list[str]:
        """The texts in backticks; for a line of code, the whole line."""
        return [self.text.strip()] if self.is_code else [span.strip() for _, span in _SPAN.findall(self.text)]


def lines_of(document: str) -> Iterator[Line]:
    """Yield the lines of a document, without the fences themselves."""
    fence, fences, was_blank, was_code, in_list = "", 0, True, False, False
    for number, text in enumerate((REPOSITORY / document).read_text("utf-8").splitlines(), start=1):
        mark = _FENCE.match(text)
        if mark and fence in ("", mark[1]):
            fences += not fence
            fence = "" if fence else mark[1]
            continue
        is_blank = not text.strip()
        is_indented = text.startswith("    ") and not in_list and (was_blank or was_code)
        if not (is_blank or text.startswith(" ")):
            in_list = bool(_ITEM.match(text))
        is_code = bool(fence) or (is_indented and not is_blank)
        yield Line(f"{document}:{number}", text, is_code, fences)
        was_blank, was_code = is_blank, is_code


def anchors_of(document: str) -> set[str]:
    """Return the anchors that GitHub makes of the headings, to which links with a # lead."""
    headings = [
        line.text.lstrip("#").strip().lower() for line in lines_of(document) if line.text.startswith("#") and not line.is_code
    ]
    return {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings}


def code_with(words: str) -> str:
    """Return the first block of code in the documents that contains these words."""
    return next(block for document in DOCUMENTS for block in blocks(document) if words in block)


def blocks(document: str) -> Iterator[str]:
    block: list[str] = []
    fences = 0
    for line in [*lines_of(document), Line("", "", is_code=False)]:
        # A block continues after a blank line, but blank lines at its end are stripped.
        goes_on = line.is_code or (line.place and not line.text.strip())
        if block and not (goes_on and line.fences == fences):
            yield dedent("\n".join(block)).rstrip() + "\n"
            block = []
        if line.is_code or (block and goes_on):
            block.append(line.text)
        fences = line.fences
