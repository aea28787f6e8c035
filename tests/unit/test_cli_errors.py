"""What is wrong is said in one line, with what to do about it."""

import sys

import pytest
from kp_scorer.cli.main import run


def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["kp-scorer", *arguments])
    with pytest.raises(SystemExit) as ended:
        run()
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["sumbit"], "No such command 'sumbit'. Did you mean 'submit'?; see `kp-scorer --help`"),
        (["score"], "Missing argument 'FILE|-'; see `kp-scorer score --help`"),
        (["dead-letter", "show", "--all"], "No such option '--all'; see `kp-scorer dead-letter show --help`"),
        (["schema", "letter"], "Invalid value for '{trace|decision}': 'letter' is not one of 'trace', 'decision'."),
        (["score", "absent.jsonl"], "Invalid value for FILE: absent.jsonl: No such file or directory"),
        (["explain", "absent.jsonl"], "Invalid value for FILE: there is no file absent.jsonl"),
        (
            ["score", "-", "--set", "novelty.maxelements=3"],
            "novelty.maxelements: no setting has this name; is it novelty.max_elements?",
        ),
        (["score", "-", "--set", "x.y=3"], "x: no setting has this name; `kp-scorer reference kp-scorer.toml` lists them all"),
        (["stats", "--redis-url", "redis://127.0.0.1:1/0"], "is Redis running where redis.url says?"),
    ],
)
def test_an_error_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], line: str
) -> None:
    code, err = said(capsys, monkeypatch, *arguments)
    assert code in (2, 3)
    assert err.count("\n") == 1
    assert err.startswith("kp-scorer: ")
    assert line in err


def test_choosing_from_what_is_no_file_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, err = said(capsys, monkeypatch, "explain", "4f", "--id", "4f")
    assert code == 2
    assert "--id chooses from a file, and there is no file 4f; see `kp-scorer explain --help`" in err


def test_help_and_no_arguments_show_what_there_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in ([], ["--help"]):
        monkeypatch.setattr(sys, "argv", ["kp-scorer", *arguments])
        with pytest.raises(SystemExit) as ended:
            run()
        shown = capsys.readouterr()
        assert "explain" in shown.out + shown.err
        assert ended.value.code == (0 if arguments else 2)
