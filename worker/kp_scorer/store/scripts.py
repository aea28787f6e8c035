"""The Lua scripts of the package: Redis runs each as one step, so that no process sees another's work half done."""

from functools import cache
from importlib import resources


def lua_source(package: str, name: str) -> str:
    """The text of the script ``name`` in the folder ``lua`` of ``package``, which may call what ``clock.lua`` defines."""
    return _text(__package__, "clock") + _text(package, name)


@cache
def _text(package: str, name: str) -> str:
    return resources.files(package).joinpath("lua", f"{name}.lua").read_text("utf-8")
