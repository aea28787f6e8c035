"""The embedded Redis keeps to itself: its data directory and the note of its password are this user's alone."""

import os
from pathlib import Path

import pytest
import redis
from kp_scorer.errors import SettingsError
from kp_scorer.store.local_redis import advertised, embedded_redis, running_url

ANOTHER_USER = 12_345


def test_a_directory_that_exists_is_made_private_and_used_again(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    with embedded_redis(data) as url, redis.Redis.from_url(url) as client:
        assert data.stat().st_mode & 0o777 == 0o700
        client.set("kept", "1")
    # As an earlier version left it.
    data.chmod(0o755)
    with embedded_redis(data) as url, redis.Redis.from_url(url) as client:
        assert data.stat().st_mode & 0o777 == 0o700
        assert client.get("kept") == b"1"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    os.chown(data, ANOTHER_USER, ANOTHER_USER)
    with pytest.raises(SettingsError, match=f"--data-dir: {data} belongs to another user"), embedded_redis(data):
        pass
    assert list(data.iterdir()) == []


def test_a_directory_with_other_things_in_it_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    tmp_path.chmod(0o755)
    with pytest.raises(SettingsError, match=f"--data-dir: {tmp_path} is not empty"), embedded_redis(tmp_path):
        pass
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_the_note_of_the_password_is_private_whatever_was_there(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    note = tmp_path / "kp-scorer" / "embedded.json"
    note.parent.mkdir()
    note.touch(mode=0o666)
    note.chmod(0o666)
    with advertised(redis_url):
        assert note.stat().st_mode & 0o777 == 0o600
        assert running_url() == redis_url
    assert not note.exists()
