"""OpenVINO, kept from reporting to its makers. What needs OpenVINO imports it from here.

Importing it looks up an analytics host, sends a message there, and leaves files in the home directory, unless the package that
does so is missing: then OpenVINO goes by a stand-in that does nothing. So that package is missing while OpenVINO is imported,
and only then: neither the environment of the process nor anyone's consent is touched.
"""

import sys
from typing import Any, Final

_REPORTER: Final = "openvino_telemetry"

_modules: dict[str, Any] = sys.modules
_imported_before = _modules.get(_REPORTER)
# Python's way to say that there is no such module.
_modules[_REPORTER] = None
try:
    import openvino  # noqa: TID251  # the one place
finally:
    del _modules[_REPORTER]
    if _imported_before is not None:
        _modules[_REPORTER] = _imported_before

__all__ = ["openvino"]
