"""The documents name only what there is: commands, options, settings, variables, files, targets and benchmarks."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest
from kp_scorer.cli.main import commands
from kp_scorer.decision import Decision
from kp_scorer.settings import Settings, as_environment
from pydantic import BaseModel

from tests.support.documents import DOCUMENTS, Line, anchors_of, blocks, lines_of
from tests.support.node import examples
from tests.support.paths import REPOSITORY

PACKAGE: Final = REPOSITORY / "worker" / "kp_scorer"
SECTIONS: Final = tuple(Settings.model_fields)
SUFFIXES: Final = ("conf", "json", "jsonl", "log", "lua", "md", "py", "toml")

COMMAND: Final = re.compile(r"(?<![\w./-])kp-scorer((?: +[a-z][a-z|-]*)+)")
ENDS_A_COMMAND: Final = re.compile(r" \||;|&&| #|\bkp-scorer ")
OPTION: Final = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
SETTING: Final = re.compile(rf"(?<![\w./-])({'|'.join(SECTIONS)})\.([a-z]\w*)\b(?!\()")
VARIABLE: Final = re.compile(r"\bKP_[A-Z]+_[A-Z0-9_]*[A-Z0-9]\b")
TARGET: Final = re.compile(r"(?<![\w-])make ([a-z][\w-]*)")
BENCHMARK: Final = re.compile(r"\btests\.benchmarks\.(\w+)")
LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
WORDS: Final = range(600, 901)

of_each_document = pytest.mark.parametrize("document", DOCUMENTS)


@of_each_document
def test_commands_and_their_options_exist(document: str) -> None:
    assert [f"{line.place}: {problem}" for line in joined(document) for problem in wrong_commands(line)] == []


@of_each_document
def test_settings_exist(document: str) -> None:
    named = [(line.place, *found) for line in lines_of(document) for span in line.spans for found in SETTING.findall(span)]
    assert [found for found in named if found[2] not in SUFFIXES and not is_field(*found[1:])] == []


@of_each_document
def test_variables_exist(document: str) -> None:
    known = {*as_environment(Settings()), "KP_SECTION_NAME", "KP_BROKER_URL_FILE", "KP_REDIS_URL_FILE"}
    named = [(line.place, name) for line in lines_of(document) for name in VARIABLE.findall(line.text)]
    assert [found for found in named if found[1] not in known] == []


@of_each_document
def test_files_in_backticks_exist(document: str) -> None:
    named = [(line.place, span) for line in lines_of(document) if not line.is_code for span in line.spans if is_path(span)]
    assert [found for found in named if not is_there(document, found[1])] == []


@of_each_document
def test_files_that_links_lead_to_exist(document: str) -> None:
    links = [(line.place, link) for line in lines_of(document) if not line.is_code for link in LINK.findall(line.text)]
    local = [(place, link.partition("#")[0]) for place, link in links if "://" not in link and not link.startswith("mailto:")]
    folder = (REPOSITORY / document).parent
    assert [found for found in local if not (folder / found[1]).exists()] == []


@of_each_document
def test_headings_that_links_lead_to_exist(document: str) -> None:
    links = [(line.place, *link.partition("#")[::2]) for line in lines_of(document) for link in LINK.findall(line.text)]
    folder = (REPOSITORY / document).parent
    files = {
        file: str((folder / file).resolve().relative_to(REPOSITORY)) if file else document
        for _, file, _ in links
        if "://" not in file
    }
    to_headings = [(place, file, heading) for place, file, heading in links if heading and files.get(file, "").endswith(".md")]
    assert [found for found in to_headings if found[2] not in anchors_of(files[found[1]])] == []


@of_each_document
def test_targets_of_make_exist(document: str) -> None:
    known = set(re.findall(r"^([a-z][\w-]*):", (REPOSITORY / "Makefile").read_text("utf-8"), re.MULTILINE))
    spans = [(line.place, without_comment(span)) for line in lines_of(document) for span in line.spans]
    assert [(place, target) for place, span in spans for target in TARGET.findall(span) if target not in known] == []


@of_each_document
def test_benchmarks_exist(document: str) -> None:
    named = [(line.place, name) for line in lines_of(document) for name in BENCHMARK.findall(line.text)]
    assert [found for found in named if not (REPOSITORY / "tests" / "benchmarks" / f"{found[1]}.py").is_file()] == []


@pytest.mark.parametrize("example", examples(), ids=lambda path: path.name)
def test_examples_that_are_run_are_those_that_are_shown(example: Path) -> None:
    assert example.read_text("utf-8") in set(blocks("worker/WIRE.md"))


@pytest.mark.parametrize("floor", ["store", "broker/redis_transport"])
def test_every_script_is_in_the_tables_of_scripts(floor: str) -> None:
    files = (PACKAGE / floor / "lua").glob("*.lua")
    # What several begin with has no keys of its own.
    scripts = {file.stem for file in files if re.search("^-- KEYS", file.read_text("utf-8"), re.MULTILINE)}
    rows = [line for line in lines_of("worker/ARCHITECTURE.md") if line.text.startswith("| `")]
    named = {span for row in rows for span in row._replace(text=row.text.split("|")[1]).spans}
    assert scripts
    assert scripts - named == set()


def test_readme_is_read_in_a_few_minutes() -> None:
    words = [word for line in lines_of("README.md") if not line.is_code for word in line.text.split() if re.search(r"\w", word)]
    assert len(words) in WORDS, f"{len(words)} words"


@pytest.mark.parametrize(
    ("text", "is_code", "problems"),
    [
        ("kp-scorer submit traces.jsonl --wait --timeout 5", True, []),
        ("kp-scorer up --workers 2 & kp-scorer score - --embedder none", True, []),
        ("kp-scorer decisions --follow | jq --raw-output .score  # like --this", True, []),
        ("Run `kp-scorer dead-letter list|show` with `--help`, which kp-scorer understands.", False, []),
        ("kp-scorer sumbit traces.jsonl", True, ["there is no command sumbit in kp-scorer sumbit traces"]),
        ("kp-scorer dead-letter lost", True, ["there is no command lost in kp-scorer dead-letter lost"]),
        ("kp-scorer up --follow", True, ["--follow is no option of up"]),
        ("`kp-scorer up --workers 2` takes `--wait` too", False, ["--wait is no option of up"]),
    ],
)
def test_what_a_line_says_wrongly_of_the_command_line_is_seen(text: str, is_code: bool, problems: list[str]) -> None:
    assert list(wrong_commands(Line("README.md:1", text, is_code))) == problems


@pytest.mark.parametrize(("span", "exists"), [("store/ledger.py", True), ("worker/nothing.py", False), ("common.lua", True)])
def test_a_file_that_is_not_there_is_seen(span: str, exists: bool) -> None:
    assert is_path(span)
    assert is_there("README.md", span) == exists


@pytest.mark.parametrize(("name", "exists"), [("novelty.max_elements", True), ("novelty.maximum", False)])
def test_a_setting_that_is_not_there_is_seen(name: str, exists: bool) -> None:
    ((section, field),) = SETTING.findall(name)
    assert is_field(section, field) == exists


def joined(document: str) -> Iterator[Line]:
    """The lines of a document, those of code that end in a backslash put together with the next."""
    begun: Line | None = None
    for line in lines_of(document):
        whole = Line(begun.place, f"{begun.text} {line.text.strip()}", is_code=True) if begun and line.is_code else line
        if whole.is_code and whole.text.endswith("\\"):
            begun = whole._replace(text=whole.text.rstrip("\\ "))
        else:
            begun = None
            yield whole


def wrong_commands(line: Line) -> Iterator[str]:
    """What a line says of the command line that is not so.

    Options belong to the command before them; outside of code, to the last command that the line names.
    """
    last: list[click.Command] = []
    for span in line.spans:
        if span.startswith("--") and not line.is_code:
            yield from wrong_options(last, span)
            continue
        span = without_comment(span)
        for found in COMMAND.finditer(span):
            last, problem = named_by(found[1])
            if problem:
                yield problem
            rest = span[found.end() :]
            ends = ENDS_A_COMMAND.search(rest)
            yield from wrong_options(last, rest[: ends.start()] if ends else rest)


def named_by(words: str) -> tuple[list[click.Command], str]:
    """The commands that words after `kp-scorer` name, several where they are joined by bars; and what is wrong with them."""
    group: click.Command = commands
    for word in words.split():
        if not isinstance(group, click.Group):
            # Arguments come after a command.
            break
        known = group.commands
        if missing := [name for name in word.split("|") if name not in known]:
            return [], f"there is no command {missing[0]} in kp-scorer{words}"
        if "|" in word:
            return [known[name] for name in word.split("|")], ""
        group = known[word]
    return [group], ""


def wrong_options(named: list[click.Command], text: str) -> Iterator[str]:
    known = {option for each in named for parameter in each.params for option in (*parameter.opts, *parameter.secondary_opts)}
    known.add("--help")
    if named:
        yield from (f"{option} is no option of {named[0].name}" for option in OPTION.findall(text) if option not in known)


def without_comment(code: str) -> str:
    return re.sub(r"(^|\s)#.*", "", code)


def is_field(section: str, name: str) -> bool:
    """Whether this is a setting, or a field of a part of a decision that is called like a section."""
    return any(name in model.model_fields for model in (part(Settings, section), part(Decision, section)) if model)


def part(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    field = model.model_fields.get(name)
    found = field.annotation if field else None
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


def is_path(span: str) -> bool:
    """Whether a span names a file of the repository, as far as one can tell."""
    if not re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?(:\d+)?", span):
        return False
    first, slash, _ = span.partition("/")
    if slash:
        return any((base / first).exists() for base in (REPOSITORY, PACKAGE))
    return span.endswith((".py", ".md", ".lua"))


def is_there(document: str, span: str) -> bool:
    """Whether a path leads somewhere from the repository, the document or the package, or a bare name is that of any file."""
    path = re.sub(r":\d+$", "", span).rstrip("/")
    if "/" not in path:
        return any(any(base.rglob(path)) for base in (PACKAGE, REPOSITORY / "tests")) or any(from_any(document, path))
    return any(from_any(document, path))


def from_any(document: str, path: str) -> Iterator[Path]:
    for base in (REPOSITORY, (REPOSITORY / document).parent, PACKAGE):
        yield from base.glob(path)
