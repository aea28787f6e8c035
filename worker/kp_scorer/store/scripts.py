"""The Lua scripts of the package: Redis runs each as one step, so that no process sees another's work half done."""

from functools import cache
from importlib import resources


def lua_source(package: str, *names: str) -> str:
    """The script made of ``names`` in the folder ``lua`` of ``package``, behind what all share, or all that are the store's."""
    preludes = ("common", "ledger") if package == __package__ else ("common",)
    return "".join([*(_text(__package__, prelude) for prelude in preludes), *(_text(package, name) for name in names)])


@cache
def _text(package: str, name: str) -> str:
    return resources.files(package).joinpath("lua", f"{name}.lua").read_text("utf-8")
