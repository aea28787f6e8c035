"""Labels from a file: which traces were good, as somebody judged who looked at them."""

from typing import Final, NoReturn

import click
from pydantic import BaseModel, ValidationError

from kp_scorer.cli.input import open_input, read_bytes
from kp_scorer.files import read_text

_MOST_BYTES: Final = 2**26


class _Label(BaseModel):
    trace_id: str
    good: bool


def read_labels(name: str, option: str = "--labels") -> dict[str, bool]:
    """Read labels by trace id from a file, ``-`` being standard input, of lines such as ``{"trace_id": …, "good": true}``."""
    labels: dict[str, bool] = {}
    for number, line in enumerate(_text(name, option).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            label = _Label.model_validate_json(line, strict=True)
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            problem = f"{first['loc'][0]}: {first['msg']}" if first["loc"] else "expected a JSON object"
            _refuse(option, f"line {number}: {problem}")
        if labels.setdefault(label.trace_id, label.good) != label.good:
            _refuse(option, f"line {number}: good: this trace has the other label on an earlier line")
    return labels


labels_option = click.option(
    "--labels",
    callback=lambda _, __, name: None if name is None else read_labels(name),
    type=click.Path(allow_dash=True),
    help="File that says which traces were good.",
)


def _text(name: str, option: str) -> str:
    try:
        if name != "-":
            return read_text(name, _MOST_BYTES)
        with open_input(name) as stream:
            return read_bytes(stream.read, _MOST_BYTES).decode("utf-8-sig")
    except OSError as error:
        _refuse(option, f"{name}: {error.strerror}")
    except UnicodeDecodeError:
        _refuse(option, f"{name}: expected UTF-8")


def _refuse(option: str, problem: str) -> NoReturn:
    raise click.BadParameter(problem, param_hint=option)
