"""The JavaScript that draws charts: Vega, with all it needs, from the package that brings it."""

import base64
import hashlib
from importlib import resources
from importlib.util import find_spec

from kp_scorer.errors import SettingsError


def check_installed() -> None:
    """Raise SettingsError if the package that brings Vega is not installed."""
    if find_spec("vl_convert") is None:
        raise SettingsError("report: the page's charts need vl-convert-python: install kp-scorer[report], or take --text")


def drawing_script() -> str:
    """A script that draws the page's charts, to stand in a page as it is. It takes seconds to put together.

    Raises:
        SettingsError: the package that brings Vega is not installed.
    """
    check_installed()
    # Imported here, because the package must work without it.
    import vl_convert

    bundle = vl_convert.javascript_bundle(resources.files(__package__).joinpath("page.js").read_text("utf-8"))
    # What would end the script, or make a comment of its rest, can stand in strings alone.
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--").replace("\r", "")


def fingerprint(content: str) -> str:
    """What a Content-Security-Policy calls a script or a style with this content."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
