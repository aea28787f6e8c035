"""The documents name only what there is: commands, options, settings, variables, files, targets and benchmarks."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest
from kp_scorer.decision import Decision
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import as_environment

from tests.support.commands import every_command
from tests.support.documents import DOCUMENTS, Line, anchors_of, blocks, lines_of
from tests.support.node import examples
from tests.support.notebook import NOTEBOOKS
from tests.support.paths import REPOSITORY

PACKAGE: Final = REPOSITORY / "worker" / "kp_scorer"
SECTIONS: Final = tuple(Settings.model_fields)
FIELDS: Final = {
    (section, name)
    for model in (Settings, Decision)
    for section, field in model.model_fields.items()
    for name in getattr(field.annotation, "model_fields", ())
}
"""The section and the name of every setting, and of every field in a part of a decision that shares a section's name."""
VARIABLES: Final = {*as_environment(Settings()), "KP_SECTION_NAME", "KP_BROKER_URL_FILE", "KP_REDIS_URL_FILE"}
TARGETS: Final = set(re.findall(r"^([a-z][\w-]*):", (REPOSITORY / "Makefile").read_text("utf-8"), re.MULTILINE))
BENCHMARKS: Final = {path.stem for path in (REPOSITORY / "tests" / "benchmarks").glob("*.py")}
SUFFIXES: Final = ("conf", "json", "jsonl", "log", "lua", "md", "py", "toml")

COMMAND: Final = re.compile(r"(?<![\w./-])kp-scorer((?: +[a-z][a-z|-]*)+)")
ENDS_A_COMMAND: Final = re.compile(r" \||;|&&| #|\bkp-scorer ")
OPTION: Final = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
SETTING: Final = re.compile(rf"(?<![\w./-])({'|'.join(SECTIONS)})\.([a-z]\w*)\b(?!\()")
VARIABLE: Final = re.compile(r"\bKP_[A-Z]+_[A-Z0-9_]*[A-Z0-9]\b")
TARGET: Final = re.compile(r"(?<![\w-])make ([a-z][\w-]*)")
BENCHMARK: Final = re.compile(r"\btests\.benchmarks\.(\w+)")
LINK: Final = re.compile(r"\]\(([^)\s]+)\)")

of_each_document = pytest.mark.parametrize("document", DOCUMENTS)


@of_each_document
def test_commands_and_their_options_exist(document: str) -> None:
    assert [f"{line.place}: {problem}" for line in joined(document) for problem in wrong_commands(line)] == []


@of_each_document
def test_settings_variables_files_targets_and_benchmarks_exist(document: str) -> None:
    assert [f"{line.place}: {name}" for line in lines_of(document) for name in absent_names(document, line)] == []


@of_each_document
def test_files_and_headings_that_links_lead_to_exist(document: str) -> None:
    links = [(line, link) for line in lines_of(document) for link in LINK.findall(line.text) if "://" not in link]
    missing = []
    for line, link in links:
        file, _, heading = link.partition("#")
        target = ((REPOSITORY / document).parent / file if file else REPOSITORY / document).resolve()
        is_page = target.suffix == ".md" and target.is_file()
        # Links must lead to files, because the site has no pages for folders.
        leads_there = line.is_code or link.startswith("mailto:") or target.is_file()
        if not leads_there or (heading and is_page and heading not in anchors_of(str(target.relative_to(REPOSITORY)))):
            missing.append((line.place, link))
    assert missing == []


@pytest.mark.parametrize("example", examples(), ids=lambda path: path.name)
def test_examples_that_are_run_are_those_that_are_shown(example: Path) -> None:
    assert example.read_text("utf-8") in {*blocks("worker/WIRE.md"), *blocks("worker/SERVE.md")}


def test_the_menu_of_the_site_has_every_page() -> None:
    menu = tomllib.loads((REPOSITORY / "deploy" / "site" / "zensical.toml").read_text("utf-8"))["project"]["nav"]
    in_menu = [page for item in menu for pages in item.values() for page in ([pages] if isinstance(pages, str) else pages)]
    notebooks = [str(path.relative_to(REPOSITORY).with_suffix(".md")) for path in NOTEBOOKS]
    assert sorted(in_menu) == sorted([*DOCUMENTS, *notebooks, "CHANGELOG.md"])


def absent_names(document: str, line: Line) -> Iterator[str]:
    for span in line.spans:
        settings = (match for match in SETTING.findall(span) if match[1] not in SUFFIXES and match not in FIELDS)
        yield from map(".".join, settings)
        yield from set(TARGET.findall(without_comment(span))) - TARGETS
        if not line.is_code and is_path(span) and not is_there(document, span):
            yield span
    yield from set(VARIABLE.findall(line.text)) - VARIABLES
    yield from set(BENCHMARK.findall(line.text)) - BENCHMARKS


def joined(document: str) -> Iterator[Line]:
    """Yield the lines of a document, joining a line of code that ends in a backslash with the next."""
    continued: Line | None = None
    for line in lines_of(document):
        full_line = (
            Line(continued.place, f"{continued.text} {line.text.strip()}", is_code=True) if continued and line.is_code else line
        )
        if full_line.is_code and full_line.text.endswith("\\"):
            continued = full_line._replace(text=full_line.text.rstrip("\\ "))
        else:
            continued = None
            yield full_line


def wrong_commands(line: Line) -> Iterator[str]:
    """Yield each false statement that a line makes about the command line.

    An option belongs to the command before it; outside of code, to the last command that the line names.
    """
    last: list[click.Command] = []
    for span in line.spans:
        if span.startswith("--") and not line.is_code:
            yield from wrong_options(last, span)
            continue
        span = without_comment(span)
        for match in COMMAND.finditer(span):
            last, problem = named_by(match[1])
            if problem:
                yield problem
            after_command = span[match.end() :]
            ends = ENDS_A_COMMAND.search(after_command)
            yield from wrong_options(last, after_command[: ends.start()] if ends else after_command)


def named_by(words: str) -> tuple[list[click.Command], str]:
    """Return the commands that the words after `kp-scorer` name, several if bars join them, and any error in the words."""
    before, named = "", list[click.Command]()
    for word in words.split():
        if named and not isinstance(named[0], click.Group):
            # Arguments come after a command.
            break
        if missing := [name for name in word.split("|") if f"{before}{name}" not in every_command()]:
            return [], f"there is no command {missing[0]} in kp-scorer{words}"
        named, before = [every_command()[f"{before}{name}"] for name in word.split("|")], f"{word} "
    return named, ""


def wrong_options(named: list[click.Command], text: str) -> Iterator[str]:
    options = {option for each in named for parameter in each.params for option in (*parameter.opts, *parameter.secondary_opts)}
    options.add("--help")
    if named:
        yield from (f"{option} is no option of {named[0].name}" for option in OPTION.findall(text) if option not in options)


def without_comment(code: str) -> str:
    return re.sub(r"(^|\s)#.*", "", code)


def is_path(span: str) -> bool:
    """Return whether a span looks like the name of a file in the repository."""
    if not re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?(:\d+)?", span):
        return False
    first, slash, _ = span.partition("/")
    if slash:
        # Files below ``build`` exist only after make has built them, so they do not count as paths.
        return first != "build" and any((base / first).exists() for base in (REPOSITORY, PACKAGE))
    return span.endswith((".py", ".md", ".lua"))


def is_there(document: str, span: str) -> bool:
    """Return whether a path exists below the repository, the document's folder or the package, or some file has a bare name."""
    path = re.sub(r":\d+$", "", span).rstrip("/")
    if any(any(base.glob(path)) for base in (REPOSITORY, (REPOSITORY / document).parent, PACKAGE)):
        return True
    return "/" not in path and any(any(base.rglob(path)) for base in (PACKAGE, REPOSITORY / "tests"))
