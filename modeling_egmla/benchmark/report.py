"""Tables and figure of what a folder of results holds."""

import io
import statistics
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ..configuration_egmla import EGMLAConfig
from ..console import format_bytes, need, plain_table
from .cells import Cell, Results, read_json
from .floor import Rates, least_work
from .systems import LABELS, Shape, label
from .text import token_ids


# Okabe and Ito's colours, told apart by all.
COLOURS = {
    "mha": "#000000",
    "gqa": "#999999",
    "mla": "#009E73",
    "our-mla": "#56B4E9",
    "egmla": "#E69F00",
    "egmla-a": "#D55E00",
    "egmla-a-fused": "#0072B2",
    "egmla-stock": "#CC79A7",
}
RATIOS = (
    ("egmla-a", "mha"),
    ("egmla-a", "mla"),
    ("our-mla", "mla"),
    ("egmla", "mla"),
    ("egmla-a", "gqa"),
    ("egmla-a-fused", "egmla-a"),
)


def median(result: dict) -> float | None:
    """Seconds of a system in a cell; None where it was not measured."""
    return statistics.median(result["seconds"]) if result.get("seconds") else None


def spread(result: dict) -> float:
    """Half of highest less lowest, in parts of the median."""
    return (max(result["seconds"]) - min(result["seconds"])) / 2 / median(result)


class Report:
    """
    Shows results.

    Args:
        results: a folder of them.
    """

    def __init__(self, results: Results):
        machine = read_json(results.machine_file, "environment", "rates")
        self.environment, self.rates = machine["environment"], Rates(**machine["rates"])
        self.cells: dict[Cell, dict[str, dict]] = dict(results.cells())
        fields = {**self.environment["shape"], "num_hidden_layers": self.environment["of_layers"]}
        self.shape = Shape.of(EGMLAConfig(**fields), self.environment["layers"])

    def tables(self) -> list[Table]:
        """All tables for which something was measured."""
        tables = [self.machine_table()]
        for phase, unit in (("decode", "a step"), ("prefill", "a prompt")):
            for dtype, allocator in sorted({(c.dtype, c.allocator) for c in self.cells if c.phase == phase}):
                cells = {
                    cell: systems
                    for cell, systems in self.cells.items()
                    if (cell.phase, cell.dtype, cell.allocator) == (phase, dtype, allocator)
                }
                tables += self.timing_tables(cells, f"{phase}, {dtype}, {allocator} allocation", unit)
        for make in (
            self.cache_table,
            self.totals_table,
            self.break_even_table,
            self.memory_table,
            self.groups_table,
            self.skipped_table,
        ):
            table = make()
            if table.row_count:
                tables.append(table)
        return tables

    def machine_table(self) -> Table:
        env = self.environment
        layers = f"{env['layers']} of {env['of_layers']} layers" if env["layers"] != env["of_layers"] else ""
        title = ", ".join(str(v) for v in (env["preset"] or "a shape of its own", layers) if v)
        table = plain_table(title, "Machine", "")
        for field in ("cpu", "instructions", "device", "threads", "torch", "transformers", "egmla", "date"):
            if field in env:
                table.add_row(field, str(env[field]))
        table.add_row("bandwidth", f"{self.rates.bandwidth / 1e9:.1f} GB/s")
        for dtype, rate in self.rates.operations.items():
            table.add_row(f"products of {dtype} matrices", f"{rate / 1e9:,.0f} GFLOP/s")
        return table

    def timing_tables(self, cells: dict[Cell, dict[str, dict]], title: str, unit: str) -> list[Table]:
        """Milliseconds, tokens a second, ratios and distance from the floor, a row for each prompt and batch."""
        names = [name for name in LABELS if any(name in systems for systems in cells.values())]
        heads = [label(name) for name in names]
        times = plain_table(f"Milliseconds {unit}: {title}", "batch x tokens", *heads)
        rates = plain_table(f"Tokens a second, of all sequences together: {title}", "batch x tokens", *heads)
        floors = plain_table(f"Times the floor: {title}", "batch x tokens", *heads)
        pairs = [pair for pair in RATIOS if set(pair) <= set(names)]
        ratios = plain_table(f"Ratios: {title}", "batch x tokens", *(f"{label(a)} / {label(b)}" for a, b in pairs))
        spreads = []
        for cell, systems in cells.items():
            row = f"{cell.batch:,} x {cell.prompt:,}"
            seconds = {name: median(systems.get(name, {})) for name in names}
            spreads += [spread(systems[name]) for name in names if seconds[name]]
            times.add_row(row, *(f"{1e3 * s:,.1f}" if s else "-" for s in seconds.values()))
            tokens = cell.batch * (cell.prompt if cell.phase == "prefill" else 1)
            rates.add_row(
                row, *(f"{tokens / s:,.{0 if tokens >= 100 * s else 1}f}" if s else "-" for s in seconds.values())
            )
            floors.add_row(row, *(f"{s / self.floor(cell, name):.1f}" if s else "-" for name, s in seconds.items()))
            ratios.add_row(row, *(self._ratio(systems, *pair) for pair in pairs))
        if spreads:
            times.caption = (
                f"Medians. Spread, half of highest less lowest: {statistics.median(spreads):.0%} of the median as a "
                f"rule, {max(spreads):.0%} at most."
            )
            floors.caption = "Of each system's own way of computing: least bytes and operations over measured rates."
            ratios.caption = "~: of two runs, since both do not fit into memory together."
            for table in (times, floors, ratios):
                table.caption_justify = "left"
        return [times, rates, ratios, floors] if pairs else [times, rates, floors]

    @staticmethod
    def _ratio(systems: dict[str, dict], name: str, peer: str) -> str:
        ours, theirs = systems.get(name, {}), systems.get(peer, {})
        if not (median(ours) and median(theirs)):
            return "-"
        return f"{'' if ours['run'] == theirs['run'] else '~'}{median(ours) / median(theirs):.2f}"

    def floor(self, cell: Cell, name: str) -> float:
        """Seconds that a system needs at least in a cell."""
        ids = token_ids(cell.batch, cell.prompt, self.shape.config.vocab_size)
        works = least_work(self.shape, name, cell, ids, expands="device" in self.environment)
        return sum(work.seconds(self.rates, cell.dtype) for work in works)

    def cache_table(self) -> Table:
        """What caches hold after the steps of decoding, and what is kept beside them."""
        title = "Cache after decoding, and workspace kept between steps"
        table = plain_table(title, "", "dtype", "bytes a token", "of MHA", "ids", "slack", "workspace", "of the cache")
        largest: dict[tuple[str, str], tuple[Cell, dict]] = {}
        for cell, systems in self.cells.items():
            for name, result in systems.items():
                if cell.phase == "decode" and "cache" in result:
                    largest[cell.dtype, name] = (cell, result)
        order = sorted(largest, key=lambda key: (key[0], list(LABELS).index(key[1])))
        for dtype, name in order:
            cell, result = largest[dtype, name]
            held = result["cache"]
            tokens = cell.batch * (cell.prompt + 2 + len(result.get("seconds", ())))
            each = held["filled"] / tokens
            peer = largest.get((dtype, "mha"))
            whole = None
            if peer is not None:
                whole = peer[1]["cache"]["filled"] / (
                    peer[0].batch * (peer[0].prompt + 2 + len(peer[1].get("seconds", ())))
                )
            table.add_row(
                label(name),
                dtype,
                f"{each:,.0f}",
                f"1/{whole / each:.4g}" if whole else "-",
                format_bytes(held["token_ids"]),
                format_bytes(held["slack"]),
                format_bytes(held["workspace"]),
                f"{held['workspace'] / held['filled']:.1%}",
            )
        return table

    def totals_table(self) -> Table:
        """Bytes that each system keeps between steps: weights, tables, cache and workspace."""
        names = [name for name in LABELS if any(name in systems for systems in self.cells.values())]
        title = "Memory kept between steps: weights, tables, gates, cache and workspace"
        table = plain_table(title, "batch x tokens", "dtype", *(label(name) for name in names))
        for cell, systems in self.cells.items():
            kept = {name: self._kept(systems.get(name, {})) for name in names}
            if cell.phase == "decode" and cell.allocator == "default" and any(kept.values()):
                sizes = (format_bytes(sum(size)) if size else "-" for size in kept.values())
                table.add_row(f"{cell.batch:,} x {cell.prompt:,}", cell.dtype, *sizes)
        return table

    @staticmethod
    def _kept(result: dict) -> tuple[int, int] | None:
        """Bytes kept of a system whatever is cached, and those kept of its cache; slack apart."""
        if "cache" not in result:
            return None
        cache = result["cache"]
        fixed = result["weights"] + result["tables"] + result["precomputed"]
        return fixed, cache["filled"] + cache["token_ids"] + cache["workspace"]

    def break_even_table(self) -> Table:
        """Cached tokens from which EG-MLA keeps fewer bytes than each peer, from the largest cell of both."""
        peers = ("mla", "mha", "gqa")
        heads = (f"than {label(name)}" for name in peers)
        table = plain_table("Cached tokens (batch x context) from which less is kept", "", "dtype", *heads)
        for dtype in sorted({cell.dtype for cell in self.cells if cell.phase == "decode"}):
            for name in ("egmla", "egmla-a"):
                counts = (self._break_even(dtype, name, peer) for peer in peers)
                row = ["-" if n is None else "never" if n == float("inf") else f"{n:,.0f}" for n in counts]
                if any(text != "-" for text in row):
                    table.add_row(label(name), dtype, *row)
        return table

    def _break_even(self, dtype: str, name: str, peer: str) -> float | None:
        lines = {}
        for cell, systems in self.cells.items():
            if cell.phase == "decode" and cell.dtype == dtype:
                tokens = cell.batch * cell.prompt
                for system in {name, peer} & set(systems):
                    kept = self._kept(systems[system])
                    if kept and tokens >= lines.get(system, (0,))[0]:
                        lines[system] = (tokens, *kept)
        if len(lines) < 2:
            return None
        (tokens, fixed, cached), (peer_tokens, peer_fixed, peer_cached) = lines[name], lines[peer]
        saved = peer_cached / peer_tokens - cached / tokens
        return max(0.0, (fixed - peer_fixed) / saved) if saved > 0 else float("inf")

    def memory_table(self) -> Table:
        """Memory of the process of each system, a row for each cell."""
        title, on_device = "Memory, each system in a process of its own", "device" in self.environment
        heads = ("weights", "tables", "gates", "cache", "workspace kept", "transient")
        heads += ("peak" if on_device else "peak of the process",)
        table = plain_table(title, "", "dtype", "batch x tokens", *heads)
        for cell, systems in self.cells.items():
            if cell.phase != "memory":
                continue
            for name in LABELS:
                result = systems.get(name, {})
                if "peak" in result:
                    table.add_row(
                        label(name),
                        cell.dtype,
                        f"{cell.batch:,} x {cell.prompt:,}",
                        format_bytes(result["weights"]),
                        format_bytes(result["tables"]),
                        format_bytes(result["precomputed"]),
                        format_bytes(result["cache"]["filled"] + result["cache"]["token_ids"]),
                        format_bytes(result["cache"]["workspace"]),
                        format_bytes(result["transient"]),
                        format_bytes(result["peak"]),
                    )
            table.add_section()
        table.caption = "Peak and transient while decoding; the peak has what Python and its libraries take."
        if on_device:
            table.caption = "Peak and transient while decoding, of tensors on the device."
        table.caption_justify = "left"
        return table

    def groups_table(self) -> Table:
        """Speed and memory of decoding by layer group size."""
        names = sorted({n for c, s in self.cells.items() if c.phase == "groups" for n in s}, key=lambda n: (len(n), n))
        heads = [f"{label(name)}, {what}" for name in names for what in ("ms", "cache")]
        table = plain_table("Decoding by layer group size, gates precomputed", "batch x tokens", "dtype", *heads)
        for cell, systems in self.cells.items():
            if cell.phase == "groups":
                values = []
                for name in names:
                    seconds = median(systems.get(name, {}))
                    measured = seconds is not None
                    values.append(f"{1e3 * seconds:,.1f}" if measured else "-")
                    values.append(format_bytes(systems[name]["cache"]["filled"]) if measured else "-")
                table.add_row(f"{cell.batch:,} x {cell.prompt:,}", cell.dtype, *values)
        return table

    def skipped_table(self) -> Table:
        """What was not measured, and why."""
        table = Table(title="Not measured", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for head in ("cell", "system", "why"):
            table.add_column(head)
        for cell, systems in self.cells.items():
            for name, result in systems.items():
                if "skipped" in result:
                    table.add_row(str(cell), label(name), result["skipped"])
        return table

    def write_markdown(self, path: Path) -> None:
        """Writes the tables as Markdown."""
        text = io.StringIO()
        console = Console(file=text, width=400, color_system=None)
        for table in self.tables():
            console.print(f"**{table.title}**\n", highlight=False)
            caption, table.title, table.caption, table.box = table.caption, None, None, box.MARKDOWN
            for column in table.columns:
                column.no_wrap = True
            for row in table.rows:
                row.end_section = False
            console.print(table)
            console.print(f"{caption}\n" if caption else "", highlight=False)
        lines = [line.rstrip() for line in text.getvalue().splitlines()]
        path.write_text("\n".join(lines).strip() + "\n", encoding="utf-8")

    def draw(self, path: Path) -> None:
        """
        Draws prefill, decoding and KV cache over prompt length and batch, as the paper's latency figure does.

        Raises:
            ImportError: matplotlib is missing.
        """
        need("plot", "matplotlib")
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, NullFormatter

        preferred = sorted(
            {(c.dtype, c.allocator) for c in self.cells if c.phase in ("decode", "prefill")},
            key=lambda kind: (kind[0] != "bfloat16", kind[1] != "default"),
        )
        if not preferred:
            return
        dtype, allocator = preferred[0]
        figure = Figure(figsize=(15, 5), layout="constrained")
        panels = figure.subplots(1, 3)
        kinds = (("prefill", "Prefill, seconds"), ("decode", "Decode, milliseconds a step"), ("decode", "KV cache"))
        for axes, (phase, what) in zip(panels, kinds):
            cells = {
                cell: systems
                for cell, systems in self.cells.items()
                if (cell.phase, cell.dtype, cell.allocator) == (phase, dtype, allocator)
            }
            starts = {cell.prompt: x for x, cell in reversed(list(enumerate(cells)))}  # a curve for each prompt length
            ticks = [
                f"{c.batch}\n{c.prompt:,}" if starts[c.prompt] == x else f"{c.batch}" for x, c in enumerate(cells)
            ]
            for name, colour in COLOURS.items():
                points = []
                for x, (cell, systems) in enumerate(cells.items()):
                    if starts[cell.prompt] == x:
                        points.append((x, float("nan")))
                    result = systems.get(name, {})
                    if what == "KV cache":
                        y = result["cache"]["filled"] if "cache" in result else None
                    else:
                        y = median(result) and median(result) * (1e3 if phase == "decode" else 1)
                    points.append((x, y if y else float("nan")))
                if points and any(y == y for _, y in points):
                    axes.plot(*zip(*points), color=colour, marker="o", markersize=4, label=label(name))
            axes.set(title=what)
            axes.set_yscale("log", base=2 if what == "KV cache" else 10)  # bytes in powers of two
            axes.set_xticks(range(len(ticks)), ticks, fontsize=7)
            if what == "KV cache":
                axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
            else:
                axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            if phase == "decode":
                axes.yaxis.set_minor_formatter(NullFormatter())
            else:
                axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.grid(color="0.92")
            axes.spines[["top", "right"]].set_visible(False)
        handles, labels = panels[1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        machine = self.environment.get("device") or self.environment.get("cpu")
        figure.suptitle(
            f"{self.environment['preset'] or 'A shape of its own'}, {dtype}, {allocator} allocation, {machine}, "
            f"{self.environment['threads']} threads; below: batch, and prompt where it begins",
            x=0.01,
            ha="left",
        )
        figure.savefig(path, dpi=130)
