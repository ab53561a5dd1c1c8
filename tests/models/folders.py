"""Changes to model folders in Hugging Face form."""

import json
from pathlib import Path
from typing import Any

__all__ = ["changed_config"]


def changed_config(folder: Path, **fields: Any) -> Path:
    """The same folder, its config.json with these fields; those that are Ellipsis are taken away."""
    file = folder / "config.json"
    changed = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: value for key, value in changed.items() if value is not ...}))
    return folder
