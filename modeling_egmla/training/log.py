"""Reads the log of a run."""

import json
from pathlib import Path
from typing import Any


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a `log.jsonl`; without the last one, if the process died while it wrote that."""
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
