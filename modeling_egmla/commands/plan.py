"""`egmla plan`: what a model needs in memory, beside other attention at its shape."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..console import console, format_bytes, need, plain_table
from .common import Gates, Placed, PoolRows, TrustRemoteCode, check_pool_rows, load_config


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

    from ..plan import Plan


DEFAULT_PRESET = "egmla-base-kv64-emb256"
COLOURS = ["#D55E00", "#56B4E9", "#0072B2", "#009E73", "#999999", "#000000"]  # Okabe and Ito's, told apart by all
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
FloatType = Literal["float32", "bfloat16", "float16"]


def plan(
    model: Annotated[str, typer.Argument(help="A preset (see --list), a folder or a Hub id.")] = DEFAULT_PRESET,
    batch: Annotated[int, typer.Option("--batch", "-b", min=1, help="Sequences at once.")] = 1,
    context: Annotated[
        int | None,
        typer.Option("--context", "-c", min=1, help="Cached tokens of each; by default the model's context."),
    ] = None,
    dtype: Annotated[FloatType, typer.Option(help="Type of the weights, and of what follows.")] = "bfloat16",
    tables_dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "int8"] | None, typer.Option(help="Type of the gate tables.")
    ] = None,
    cache_dtype: Annotated[FloatType | None, typer.Option(help="Type of the cache.")] = None,
    gates: Gates = "projected",
    placement: Placed = "device",
    pool_rows: PoolRows = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers, in bytes, as JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw memory over context to a .png, .svg or .pdf.")
    ] = None,
    list_presets: Annotated[bool, typer.Option("--list", help="List the presets with their sizes.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """
    Plan memory by arithmetic: weights, gate tables, cache, workspace, and when the tables pay off.

    Examples:

    - `egmla plan --list`
    - `egmla plan egmla-base-kv64-emb256 --batch 32 --context 4096`
    - `egmla plan egmla-large-kv128-emb512 --placement host --tables-dtype int8`
    - `egmla plan --gates precomputed --plot memory.png`
    - `egmla plan path/to/my-model --json`
    """
    if list_presets:
        console().print(presets_table())
        return

    from ..plan import POOL_ROWS
    from ..plan import plan as make_plan

    check_pool_rows(pool_rows, placement)
    config = load_config(model, trust_remote_code)

    def planned(context: int | None) -> "Plan":
        return make_plan(
            config, batch, context, dtype, tables_dtype, cache_dtype, gates, placement, pool_rows or POOL_ROWS
        )

    result = planned(context)
    if as_json:
        typer.echo(json.dumps({"preset": model, **result.to_dict()}, indent=2))
    else:
        console().print(plan_table(model, result))
        console().print(plan_notes(result), style="dim")
    if plot is not None:
        plot = plot if plot.suffix else plot.with_suffix(".png")
        draw(model, planned, result, plot)
        if not as_json:
            console().print(f"Plot: {plot}")


def presets_table() -> "Table":
    """Names and sizes of all presets."""
    from ..configuration.presets import PRESETS
    from ..configuration_egmla import EGMLAConfig
    from ..plan import count_parameters

    table = plain_table("Presets; parameters in millions", "", "activated", "tables", "total", "cache/token")
    for name in PRESETS:
        config = EGMLAConfig.from_preset(name)
        parameters = count_parameters(config)
        millions = (f"{n / 1e6:,.1f}" for n in (parameters.activated, parameters.tables, parameters.total))
        table.add_row(name, *millions, f"{config.cache_elements_per_token:,}")
    table.caption = "cache/token: elements cached for one token in all layers"
    table.caption_justify = "left"
    return table


def plan_table(name: str, result: "Plan") -> "Table":
    """Memory by part, one column for the model and one for each alternative."""
    columns = [result.model, *result.alternatives]
    largest = max(c.device for c in columns)
    unit, size = next((unit, size) for unit, size in UNITS.items() if largest >= 10 * size or unit == "KiB")
    dtypes = dict.fromkeys(result.dtypes.values())
    title = f"{name}, {result.batch:,} x {result.context:,} cached tokens, {' / '.join(dtypes)}"
    table = plain_table(title, unit, *(column.name for column in columns))

    def add(label: str, values: list[int], always: bool = True, style: str | None = None) -> None:
        if always or any(values):
            table.add_row(
                label, *(f"{v / size:,.{0 if v >= 1000 * size else 1}f}" if v else "-" for v in values), style=style
            )

    table.add_row("Parameters, M", *(f"{c.parameters.total / 1e6:,.1f}" for c in columns))
    table.add_row("Elements/token", *(f"{c.cache_elements_per_token:,}" for c in columns))
    table.add_section()
    add("Weights", [c.weights for c in columns])
    on_device = result.placement == "device"
    add("Gate tables", [c.tables * on_device for c in columns], always=on_device)
    add("  made from", [c.source_tables * on_device for c in columns], always=False)
    add("Gate rows", [c.gate_rows for c in columns], always=False)
    add("Cache", [c.cache for c in columns])
    add("Token ids", [c.token_ids for c in columns])
    add("Workspace, kept", [c.workspace for c in columns])
    add("  in a step", [c.transient for c in columns])
    add("On the device", [c.device for c in columns], style="bold")
    add("On the host", [c.host for c in columns], always=False)
    add("In the file", [c.disk for c in columns], always=False)
    add("Prefill, more", [c.prefill for c in columns])
    table.add_section()
    never = {None: "never", 0: "at once"}
    break_even = (c.break_even_tokens for c in result.alternatives)
    table.add_row("Break-even", "", *(never.get(n) or f"{n:,}" for n in break_even))
    return table


def plan_notes(result: "Plan") -> str:
    """What the table's lines mean, for this plan."""
    model = result.model
    notes = [
        f"Break-even: cached tokens (batch x context) from which {model.name} needs no more device memory than the "
        "other, workspace and ids apart."
    ]
    if model.tables and result.tables_break_even_tokens is not None:
        notes.append(
            f"The tables alone equal the cache saved against {result.tables_against} at "
            f"{result.tables_break_even_tokens:,} tokens."
        )
    notes.append(
        "Workspace is that of decoding by groups of equal ids, on English text. Prefill: what a prompt of the whole "
        "context needs for a moment beside, when its keys and values are expanded; on an accelerator every step does "
        "so, unless model.set_kv_decoding says otherwise."
    )
    if model.traffic_per_token:
        notes.append(
            f"A new id brings {format_bytes(model.traffic_per_token)} of gate rows to the device; English text has "
            f"some {model.expected_rows:,} distinct ids in these tokens, and the pool room for {result.pool_rows:,}"
            + (
                f", so that each step brings about {format_bytes(model.reread_per_step)} again: raise --pool-rows."
                if model.reread_per_step
                else "."
            )
        )
    return " ".join(notes)


def draw(name: str, planned: Callable[[int], "Plan"], result: "Plan", path: Path) -> None:
    """
    Draws device memory over cached tokens for the model and its alternatives, with each break-even marked.

    Args:
        name: the model's, for the title.
        planned: makes the plan for a context.
        result: the plan that the table shows; its batch and context are marked.
        path: file to write; its suffix says which kind.

    Raises:
        ValueError: matplotlib writes no such kind of file.
    """
    need("plot", "matplotlib")
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    here = result.batch * result.context
    columns = [result.model, *result.alternatives]
    last = 4 * max(here, *(column.break_even_tokens or 0 for column in columns))
    contexts = _spread(max(1, 256 // result.batch), last // result.batch)
    plans = [planned(context) for context in contexts]
    tokens = [result.batch * context for context in contexts]

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xscale="log", yscale="log", xlabel="Cached tokens (batch x context)", ylabel="Device memory")
    ends, labelled = {}, []
    for index, (column, colour) in enumerate(zip(columns, COLOURS)):
        sizes = [[plan.model, *plan.alternatives][index].compared for plan in plans]
        ends[column.name] = sizes[-1]
        axes.plot(tokens, sizes, color=colour, linewidth=1.5 if index else 3, zorder=2 if index else 3)
        if crossing := column.break_even_tokens:
            point = (crossing, planned(max(1, crossing // result.batch)).model.compared)
            axes.plot(*point, "o", color="white", markeredgecolor=colour, markeredgewidth=1.5, markersize=7, zorder=4)
            # Crossings that lie close together have their numbers on either side.
            is_crowded = any(1 / 2 < crossing / other < 2 for other in labelled)
            labelled.append(crossing)
            axes.annotate(
                f"{crossing:,}",
                point,
                xytext=(6, -16) if is_crowded else (-6, 9),
                textcoords="offset points",
                ha="left" if is_crowded else "right",
                color=colour,
                bbox={"color": "white", "alpha": 0.8, "pad": 1},
                zorder=5,
            )
    axes.axvline(here, color="0.6", linewidth=1, linestyle=":", zorder=1)
    axes.annotate(
        f" {result.batch:,} x {result.context:,}",
        (here, 0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 6),
        textcoords="offset points",
        fontsize=9,
        color="0.4",
    )

    axes.set_xlim(tokens[0], tokens[-1])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_locator(LogLocator(base=2))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    _label_ends(axes, ends)
    placed = {"device": "tables", "host": "rows of tables on the host", "mmap": "rows of tables in a file"}
    title = f"{name}: weights, {placed[result.placement]} and cache"
    axes.set_title(title, loc="left", fontweight="bold")
    note = "Circles: cached tokens from which the model needs no more than the other; workspace and ids apart."
    figure.supxlabel(note, fontsize=9, color="0.4")

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _spread(low: int, high: int, points: int = 120) -> list[int]:
    """Whole numbers from `low` to `high`, in equal ratios."""
    ratio = (high / low) ** (1 / (points - 1))
    return sorted({round(low * ratio**i) for i in range(points)})


def _label_ends(axes: "Axes", ends: dict[str, float]) -> None:
    """Writes each curve's name behind its end, apart from one another."""
    gap, previous = 0.045, -1.0
    to_axes = axes.transData + axes.transAxes.inverted()
    for name, size in sorted(ends.items(), key=lambda end: end[1]):
        height = max(to_axes.transform((axes.get_xlim()[1], size))[1], previous + gap)
        colour = COLOURS[list(ends).index(name)]
        axes.text(1.01, height, name, transform=axes.transAxes, color=colour, va="center", fontweight="bold")
        previous = height
