"""Registers the formats that are converted. Each module of this package defines the format of its name as ``FORMAT``.

No two formats fit one object, except for general ones, so the order in which the others are tried does not matter.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from kp_scorer.adapters.format import Format
from kp_scorer.adapters.node import objects_in

_NAMES: Final = [module.name for module in iter_modules(__path__)]
_FORMATS: Final = {name.replace("_", "-"): import_module(f"{__name__}.{name}").FORMAT for name in _NAMES}
FORMATS: Final[dict[str, Format]] = dict(sorted(_FORMATS.items(), key=lambda item: item[1].is_general))
"""Every format by its name, in the order in which a source is tried on them."""


def format_of(value: object) -> str:
    """Return the name of the format whose shape a source has; empty if no format fits."""
    items = value if isinstance(value, list) else [value]
    while items and isinstance(items[0], list):
        items = items[0]
    objects = objects_in(items)
    return next(
        (name for name, each in FORMATS.items() if (each.fits(value) if each.is_general else any(map(each.fits, objects)))), ""
    )
