"""Cells of the benchmark and their files: one JSON file each, whole or not there, and refused where it is neither."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..files import write_whole


PHASES = ("decode", "prefill", "memory", "groups")
ALLOCATORS = ("default", "retained")
# Read by glibc when a process starts: freed memory is kept, and large blocks come from it.
RETAINED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 26)}


@dataclass(frozen=True)
class Cell:
    """
    One measurement of several systems.

    Attributes:
        phase: `"decode"`, `"prefill"`, `"memory"` (each system in a process of its own) or `"groups"` (decoding by
            layer group size).
        prompt: tokens of a sequence that are cached, or prefilled.
        batch: sequences.
        dtype: of weights and cache.
        allocator: `"default"`, or `"retained"`: glibc keeps freed memory.
    """

    phase: str
    prompt: int
    batch: int
    dtype: str
    allocator: str

    @property
    def name(self) -> str:
        return f"{self.phase}-{self.dtype}-b{self.batch}-t{self.prompt}-{self.allocator}"

    def __str__(self) -> str:
        return f"{self.phase}, {self.batch:,} x {self.prompt:,}, {self.dtype}, {self.allocator} allocation"


class BrokenCellError(ValueError):
    """A file that is no finished cell."""


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a file that holds all of `content` or, after a crash, what it held before."""
    write_whole(path, json.dumps(content, indent=1) + "\n")


def read_json(path: Path, *fields: str) -> dict[str, Any]:
    """
    Reads a file that must have these fields.

    Raises:
        BrokenCellError: it is not whole.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise BrokenCellError(f"{path} is no JSON ({error}).") from error
    missing = [field for field in fields if not isinstance(content, dict) or field not in content]
    if missing:
        raise BrokenCellError(f"{path} lacks {', '.join(missing)}.")
    return content


def is_settled(result: dict, seconds: float) -> bool:
    """
    Whether a system need not be measured again: it was measured, or left out for taking too long, and may not take
    longer now. For what was left out for want of memory, there may be more.
    """
    return "skipped" not in result or ("needs" not in result and result.get("limit", math.inf) >= seconds)


class Results:
    """
    What a folder holds of a benchmark.

    Args:
        folder: where the files are, or will be.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.machine_file = folder / "machine.json"

    def path(self, cell: Cell) -> Path:
        return self.folder / f"{cell.name}.json"

    def read(self, cell: Cell) -> dict[str, dict]:
        """
        What was measured of the systems of a cell; nothing where there is no file.

        Raises:
            BrokenCellError: the file is not whole, or of another cell.
        """
        path = self.path(cell)
        if not path.exists():
            return {}
        content = read_json(path, "cell", "systems")
        if content["cell"] != asdict(cell):
            raise BrokenCellError(f"{path} is of another cell, {content['cell']}.")
        for name, result in content["systems"].items():
            if "skipped" not in result and not result.get("seconds") and "peak" not in result:
                raise BrokenCellError(f"{path} has nothing measured of {name}.")
        return content["systems"]

    def add(self, cell: Cell, environment: dict, systems: dict[str, dict]) -> None:
        """Adds what was measured to the file of a cell."""
        systems = {**self.read(cell), **systems}
        write_json(self.path(cell), {"cell": asdict(cell), "environment": environment, "systems": systems})

    def too_slow(self, cell: Cell, name: str, seconds: float) -> Cell | None:
        """A cell that is no larger than this one, and in which the system would take more than `seconds`."""
        for other, systems in self.cells():
            same = (other.phase, other.dtype, other.allocator) == (cell.phase, cell.dtype, cell.allocator)
            is_smaller = other.prompt <= cell.prompt and other.batch <= cell.batch and other != cell
            result = systems.get(name, {})
            if same and is_smaller and "first" in result and "skipped" in result and is_settled(result, seconds):
                return other
        return None

    def cells(self) -> Iterator[tuple[Cell, dict[str, dict]]]:
        """All cells, in the order of their phases and sizes."""
        found = []
        for path in self.folder.glob("*-*-b*-t*-*.json"):
            try:
                cell = Cell(**read_json(path, "cell", "systems")["cell"])
            except TypeError as error:
                raise BrokenCellError(f"{path} does not say which cell it is.") from error
            if self.path(cell) != path:
                raise BrokenCellError(f"{path} is of another cell, {cell}.")
            found.append(cell)
        for cell in sorted(found, key=lambda c: (PHASES.index(c.phase), c.dtype, c.allocator, c.prompt, c.batch)):
            yield cell, self.read(cell)
