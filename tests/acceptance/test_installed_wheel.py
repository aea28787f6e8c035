"""The package as somebody gets it: built, installed without the checkout, and used in a folder full of other people's files."""

import shutil
import signal
import subprocess
import zipfile
from pathlib import Path
from typing import Final

import psutil
import pytest
from kp_scorer import Decision

from tests.support.environments import build_wheel, install_wheel
from tests.support.paths import REPOSITORY
from tests.support.processes import PATIENCE_S, opened, wait_until

SOURCE: Final = REPOSITORY / "worker" / "kp_scorer"
STRANGERS: Final = ("worker.py", "worker/__init__.py", "redis.py", "celery.py", "numpy.py")

PROGRAM: Final = REPOSITORY / "tests" / "support" / "program.py"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_embedder")]


@pytest.fixture
def without_embedder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run everything without an embedder, which is faster: nothing here is about embedding."""
    monkeypatch.setenv("KP_EMBEDDING_EMBEDDER", "none")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the checkout, so that the build leaves no files there and packs no stale ones."""
    directory = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "node_modules")
    shutil.copytree(REPOSITORY, directory / "checkout", symlinks=True, ignore=ignored)
    return build_wheel(directory / "checkout", directory)


@pytest.fixture(scope="module")
def binaries(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the commands of an environment that has the wheel and takes its dependencies from this environment."""
    return install_wheel(wheel, tmp_path_factory.mktemp("environment"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of modules named like ours, or like modules that we use. None of them may ever run."""
    folder = tmp_path / "folder"
    for name in STRANGERS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('raise RuntimeError("a stranger\'s file ran")\n')
    return folder


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command, which must succeed, and return its output."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_holds_the_package_with_all_its_files_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    assert {name.partition("/")[0].partition("-")[0] for name in contents} == {"kp_scorer"}
    assert contents["kp_scorer/reference/kp-scorer.toml"] == (REPOSITORY / "config" / "kp-scorer.toml").read_bytes()
    assert contents["kp_scorer/reference/redis.conf"] == (REPOSITORY / "deploy" / "redis.conf").read_bytes()
    ours = [path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.name for path in ours} >= {"py.typed", "common.lua", "traces.jsonl"}
    files = {path.relative_to(SOURCE.parent).as_posix(): path.read_bytes() for path in ours}
    assert {name: content for name, content in contents.items() if not name.startswith("kp_scorer-")} == files


def test_up_decides_submissions_of_a_program_until_ctrl_c(binaries: Path, folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    command: list[str | Path] = [binaries / "kp-scorer", "up", "--workers", "1"]
    with log.open("wb") as output, opened(*command, cwd=folder, stdout=output, stderr=output) as up:
        try:
            wait_until(lambda: "worker_ready" in log.read_text("utf-8") or up.poll() is not None)
            assert up.poll() is None, log.read_text("utf-8")
            package = run(binaries / "python", "-P", "-c", "import kp_scorer; print(kp_scorer.__file__)", cwd=folder)
            assert Path(package).is_relative_to(binaries.parent)
            decision = Decision.model_validate_json(run(binaries / "python", "-P", PROGRAM, cwd=folder))
            assert decision.novelty.source == "no_embedder"
            started = psutil.Process(up.pid).children(recursive=True)
        finally:
            up.send_signal(signal.SIGINT)
            assert up.wait(PATIENCE_S) == 0
    assert "stranger" not in log.read_text("utf-8")
    assert [each for each in started if each.is_running()] == []
