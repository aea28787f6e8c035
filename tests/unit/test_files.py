"""Wherever a file can be named, all but a regular one of bounded size is refused in one line; no link is written through."""

import grp
import os
import pwd
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Final

import click
import pytest
from kp_scorer.cli.output import open_output
from kp_scorer.cli.training import TrainingFile
from kp_scorer.files import check_writer, is_only_ours

from tests.support.commands import ended
from tests.support.disks import nearly_full_disk
from tests.support.paths import REPOSITORY
from tests.support.processes import PATIENCE_S

SAMPLES: Final = str(REPOSITORY / "worker" / "kp_scorer" / "samples" / "traces.jsonl")
OFFLINE: Final = ("--set", "embedding.embedder=none")
SCORE: Final = ("score", SAMPLES, *OFFLINE)
PLACES: Final = {
    "--config": (*SCORE, "--config"),
    "health --config": ("health", "--config"),
    "--labels": ("calibrate", SAMPLES, *OFFLINE, "--precision", "90%", "--labels"),
    "--thresholds": ("re-decide", SAMPLES, *OFFLINE, "--thresholds"),
    "FILE": ("score", *OFFLINE),
    "KP_CONFIG": SCORE,
    "KP_BROKER_URL_FILE": SCORE,
}
"""The arguments of a command for each place that can name a file. The path follows them, or is the variable's value."""

Refusal = Callable[..., str]


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """Fail a test that waits for the other end of a FIFO, or reads a device without end."""

    def refuse(*_: object) -> None:
        pytest.fail("it waits, or reads without end")

    before = signal.signal(signal.SIGALRM, refuse)
    signal.alarm(int(PATIENCE_S))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refusal:
    """A function that runs a command that must be refused, and returns the one line that says why."""

    def run(*arguments: str, **variables: str) -> str:
        code, _, stderr = ended(capsys, monkeypatch, *arguments, **variables)
        line = stderr.splitlines()[-1]
        assert code == 2
        assert line.startswith("kp-scorer: ")
        assert len(line) < 500
        return line

    return run


def refusal_of(file: str, place: str, refusal: Refusal) -> str:
    """Return the line that refuses a file of this name in this place."""
    return refusal(*PLACES[place], **{place: file}) if place.startswith("KP_") else refusal(*PLACES[place], file)


@pytest.fixture
def special(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The path of a file that is not regular, cannot be read, or has no end."""
    path = tmp_path / "named"
    if request.param == "directory":
        path.mkdir()
    elif request.param == "FIFO":
        os.mkfifo(path)
    elif request.param == "endless":
        with path.open("wb") as file:
            file.truncate(2**40)
    return {"device": "/dev/zero", "unreadable": "/proc/self/mem"}.get(request.param, str(path))


# Traces and labels may come through a FIFO, as a shell's <(…) does, and traces from a folder.
ALLOWED: Final = {("FILE", "FIFO"), ("--labels", "FIFO"), ("FILE", "directory")}
REFUSED: Final = set(product(PLACES, ["absent", "directory", "FIFO", "device", "endless", "unreadable"])) - ALLOWED


@pytest.mark.parametrize(("place", "special"), sorted(REFUSED), indirect=["special"])
def test_special_files_are_refused_in_one_line(place: str, special: str, refusal: Refusal) -> None:
    line = refusal_of(special, place, refusal)
    assert any(name in line for name in (special, place, place.removesuffix("_FILE"), "--config"))


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("kind", ["link", "dangling link", "FIFO", "device", "directory"])
def test_output_goes_to_a_regular_file_alone(is_new: bool, kind: str, tmp_path: Path) -> None:
    target, named = tmp_path / "target", tmp_path / "named"
    if kind == "link":
        target.write_text("precious")
    if "link" in kind:
        named.symlink_to(target)
    elif kind == "FIFO":
        os.mkfifo(named)
    elif kind == "directory":
        named.mkdir()
    with (
        pytest.raises(click.BadParameter) as refused,
        open_output("/dev/null" if kind == "device" else str(named), is_new=is_new) as write,
    ):
        write("something else")
    assert refused.value.param_hint == "--output"
    assert not target.exists() or target.read_text() == "precious"


def test_output_replaces_an_existing_file_and_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "named"
    for text in ("a long text", "short"):
        with open_output(str(file)) as write:
            write(text)
        assert file.read_text() == text
        file.chmod(0o600)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_output_is_refused_while_another_command_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "named"
    with open_output(str(file)) as write:
        write("the first")
        with (
            pytest.raises(click.BadParameter, match="named: another command is writing it"),
            open_output(str(file)) as write_too,
        ):
            write_too("the second")
        write(" alone")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["the first alone"]


@pytest.mark.parametrize("is_new", [False, True])
def test_a_full_disk_leaves_the_earlier_output_or_none(is_new: bool, tmp_path: Path) -> None:
    file = tmp_path / "named"
    if not is_new:
        file.write_text("kept before")
    with (
        pytest.raises(click.BadParameter, match="named: File too large") as refused,
        nearly_full_disk(),
        open_output(str(file), "--why", is_new=is_new) as write,
    ):
        write("x" * 100_000)
    assert refused.value.param_hint == "--why"
    assert [path.read_text() for path in tmp_path.iterdir()] == ([] if is_new else ["kept before"])


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
def test_a_full_disk_leaves_the_earlier_training_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text("kept before")
    row = {"domain": "code", "task": "x" * 100_000, "success": True}
    with pytest.raises(click.BadParameter, match=f"{name}: File too large"), nearly_full_disk():
        TrainingFile(str(file), "keep").write([row])
    assert [path.read_text() for path in tmp_path.iterdir()] == ["kept before"]


def test_output_outlives_a_command_that_fails_before_it_writes(tmp_path: Path) -> None:
    file = tmp_path / "named"
    file.write_text("kept before")
    with pytest.raises(ValueError, match="usage"), open_output(str(file)):
        raise ValueError("usage")
    assert file.read_text() == "kept before"
    with open_output(str(file)):
        pass
    assert file.read_text() == ""


DEEP: Final = "[" * 100_000
LONG: Final = "1" * 5_000
SETTINGS: Final = (f"x = {DEEP}", f"x = {LONG}", f"novelty.max_elements = {LONG}", "x = '\xff'", "metrics = 3")
LABELS: Final = (DEEP, '{"trace_id": ' + DEEP, '{"trace_id": ' + LONG + ', "good": true}', "\xff")


@pytest.mark.parametrize(
    ("place", "content"),
    [*product(("--config", "health --config", "--thresholds", "KP_CONFIG"), SETTINGS), *product(["--labels"], LABELS)],
    ids=lambda part: part[:30],
)
def test_files_that_cannot_be_parsed_are_refused_in_one_line(
    place: str, content: str, tmp_path: Path, refusal: Refusal
) -> None:
    (file := tmp_path / "named").write_bytes(content.encode("latin-1"))
    line = refusal_of(str(file), place, refusal)
    assert place != "--labels" or "--labels" in line


@pytest.mark.parametrize("value", ['{"x": ' + DEEP, '{"x": ' + LONG + "}", "[]"])
@pytest.mark.parametrize("way", ["--set", "variable"])
def test_tables_that_cannot_be_parsed_are_refused_in_one_line(way: str, value: str, refusal: Refusal) -> None:
    if way == "--set":
        line = refusal(*SCORE, "--set", f"scoring.thresholds={value}")
    else:
        line = refusal(*SCORE, KP_SCORING_THRESHOLDS=value)
    assert "scoring" in line.lower()


GROUPS: Final = {
    "the user's own": (("me", []), True),
    "the user's own, which lists it": (("me", ["me"]), True),
    "the user's own, with a member": (("me", ["other"]), False),
    "the primary one of two users": (("me", []), False),
    "of another name": (("staff", []), False),
    "unknown": (None, False),
}


@pytest.mark.parametrize("case", GROUPS)
def test_only_a_users_private_group_may_write_to_a_file(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group, is_accepted = GROUPS[case]
    (file := tmp_path / "tokens").touch()
    file.chmod(0o664)
    status = file.stat()
    users = [pwd.struct_passwd(("me", "x", status.st_uid, status.st_gid, "", "/", "/bin/sh"))]
    if "two" in case:
        users.append(pwd.struct_passwd(("other", "x", status.st_uid + 1, status.st_gid, "", "/", "/bin/sh")))

    def group_named(group_id: int) -> grp.struct_group:
        if not group:
            raise KeyError(group_id)
        return grp.struct_group((group[0], "x", group_id, group[1]))

    monkeypatch.setattr(grp, "getgrgid", group_named)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: users[0])
    monkeypatch.setattr(pwd, "getpwall", lambda: users)
    assert is_only_ours(status) is is_accepted
    with nullcontext() if is_accepted else pytest.raises(OSError, match="others can write"):
        check_writer(file)
    file.chmod(0o666)
    assert not is_only_ours(file.stat())
