"""Files of JSON, changed in place."""

import json
from pathlib import Path
from typing import Any


def change_json(file: Path, **changed: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    content = json.loads(file.read_text("utf-8")) if file.exists() else {}
    file.write_text(json.dumps(content | changed), "utf-8")
