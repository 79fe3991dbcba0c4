"""What is shown in a terminal: a console, tables, sizes in words, and what to install for more."""

import importlib.util

from rich import box
from rich.console import Console
from rich.table import Table


def console() -> Console:
    """A console for tables on standard output, made when used: it then knows the terminal, or the file behind it."""
    return Console(highlight=False)


def is_installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


def need(extra: str, *modules: str) -> None:
    """Raises an `ImportError` that says how to install `modules` where they are missing."""
    if not is_installed(*modules):
        raise ImportError(
            f"This needs {' and '.join(modules)}, which the extra {extra!r} installs: pip install 'egmla[{extra}]'"
        )


def format_bytes(size: float) -> str:
    """`1234567` as `1.18 MiB`."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    power = min(max(int(size).bit_length() - 1, 0) // 10, len(units) - 1)
    size /= 1024**power
    return f"{size:,.0f} {units[power]}" if power == 0 or size >= 100 else f"{size:.3g} {units[power]}"


def plain_table(title: str, *columns: str) -> Table:
    """A table with a rule under its head; the first column holds names, the others numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table
