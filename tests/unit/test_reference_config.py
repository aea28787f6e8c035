"""``config/kp-scorer.toml`` is what an operator copies: it must say what the defaults are, all that TOML can say."""

import tomllib

from kp_scorer.settings import Settings, load_settings

from tests.support.paths import REPOSITORY

REFERENCE = REPOSITORY / "config" / "kp-scorer.toml"


def test_the_reference_file_holds_every_setting_with_its_default() -> None:
    assert tomllib.loads(REFERENCE.read_text("utf-8")) == Settings().model_dump(exclude_none=True)


def test_the_reference_file_loads_as_the_defaults() -> None:
    assert load_settings(config=REFERENCE).model_dump() == Settings().model_dump()
