"""The permissions of each user according to the security page, for tests that try them on a server."""

from itertools import takewhile
from typing import Final

from tests.support.documents import lines_of

PAGE: Final = "deploy/SECURITY.md"


def documented(server: str) -> dict[str, list[str]]:
    """Return the verbs that the page's table for a server allows each user."""
    lines = lines_of(PAGE)
    _, *users = _cells(next(line.text for line in lines if line.text.startswith(f"| on {server} |")))
    next(lines)
    rows = [_cells(line.text) for line in takewhile(lambda line: line.text.startswith("|"), lines)]
    assert {cell for _, *cells in rows for cell in cells} == {"", "yes"}
    return {user.strip("`"): [row[0] for row in rows if row[column] == "yes"] for column, user in enumerate(users, 1)}


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]
