"""Assembles the pages for the site generator: ``python deploy/site/assemble.py FOLDER``, from the root of the repository.

The pages stay where their readers find them in the repository. They are copied with the files that they link to, in the same
folders, so that their links lead to the same files. Notebooks become pages.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

LINKED_TO: Final = ("*.md", "*.ipynb", "config", "deploy", "LICENSE")
SITE: Final = Path(__file__).parent


def page_of(notebook: dict[str, Any]) -> Iterator[str]:
    """Yield the blocks of a notebook as Markdown: texts, code, and the text that each piece of code shows."""
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        yield text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
        for output in cell.get("outputs", ()):
            yield "```text\n" + "".join(output.get("text") or output["data"]["text/plain"]).rstrip() + "\n```"


def assemble(folder: Path) -> None:
    """Replace the folder with what the generator reads."""
    shutil.rmtree(folder, ignore_errors=True)
    tracked = subprocess.run(["git", "ls-files", "-z", *LINKED_TO], capture_output=True, text=True, check=True).stdout  # noqa: S607 - git is found like any command
    for name in filter(None, tracked.split("\0")):
        copy = folder / "pages" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = Path(name).read_text("utf-8") if copy.suffix in (".ipynb", ".md") else None
        if text is None:
            shutil.copy(name, copy)
            continue
        page = "\n\n".join(page_of(json.loads(text))) if copy.suffix == ".ipynb" else text
        copy.with_suffix(".md").write_text(page.replace(".ipynb)", ".md)"), "utf-8")
    shutil.copy(SITE / "zensical.toml", folder)


if __name__ == "__main__":
    assemble(Path(sys.argv[1]))
