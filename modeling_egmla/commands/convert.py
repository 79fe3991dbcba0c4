"""`egmla convert`: checkpoints of other layouts in, MLA checkpoints out, and EG-MLA models from MLA models."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .common import Dtype, console


if TYPE_CHECKING:
    from ..conversion.converter import Report


def convert(
    source: Annotated[str, typer.Argument(help="Folder with the checkpoint, or its id on the Hub.")],
    target: Annotated[Path, typer.Argument(help="Folder to make.")],
    to: Annotated[
        str,
        typer.Option(
            help="Layout to write: egmla, deepseek_v3, deepseek_v2, deepseek (DeepSeek's own code), or a .yaml file."
        ),
    ] = "egmla",
    layout: Annotated[
        str | None,
        typer.Option(
            help="Layout of the source; by default its config.json tells. Also minicpm3, or a .yaml file with names.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="config.json of the source, if it lies elsewhere.", exists=True, dir_okay=False),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub; by default main.")] = None,
    dtype: Dtype = "auto",
    rope: Annotated[
        Literal["keep", "halves", "pairs"],
        typer.Option(help="Rotary channels in halves (as in Llama) or in pairs (as in DeepSeek)."),
    ] = "keep",
    gate: Annotated[
        Literal["none", "multiply", "add"],
        typer.Option(help="Start an EG-MLA model from an MLA model, with a gate that changes nothing at first."),
    ] = "none",
    gate_dim: Annotated[int, typer.Option(help="Width of the gate tables.", min=1)] = 256,
    gate_norm: Annotated[
        Literal["layer_norm", "none"],
        typer.Option(help="LayerNorm behind the gate. With none the start is exact; with layer_norm it may not be."),
    ] = "layer_norm",
    calibration: Annotated[
        Path | None,
        typer.Option(help="Text to fit the gate's LayerNorm on, and to measure loss.", exists=True, dir_okay=False),
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(help="Tokens of that text to use.", min=512)] = 16384,
    drop: Annotated[
        list[str] | None,
        typer.Option(help="Pattern of source tensors to leave out, e.g. 'model.layers.61.*'. Repeatable."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file.")] = "5GB",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace TARGET if it exists, once the new one is done.")
    ] = False,
    check: Annotated[bool, typer.Option(help="Run both models on the same tokens and compare logits.")] = True,
    threshold: Annotated[
        float | None,
        typer.Option(
            help="Largest relative difference of logits. By default 1e-4, or 2e-2 where 16-bit tensors are computed "
            "and rounded; none for a start with a LayerNorm.",
            show_default=False,
        ),
    ] = None,
    reference_logits: Annotated[
        Path | None,
        typer.Option(
            help="safetensors file with input_ids and logits of the source, for a source that nothing here can run.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
) -> None:
    """
    Convert a checkpoint, and check that the result computes the same.

    An MLA checkpoint (DeepSeek-V2 and V3 with dense layers, MiniCPM3, DeepSeek's own layout) becomes an EG-MLA folder:

        egmla convert openbmb/MiniCPM3-4B minicpm3-egmla

    An MLA model becomes the start of a gated one, exactly, or with the paper's LayerNorm, nearly so:

        egmla convert minicpm3-egmla start --gate multiply --gate-norm none

        egmla convert minicpm3-egmla start --gate multiply --calibration text.txt

    A model without gates goes back to the library's DeepSeek-V3:

        egmla convert model back --to deepseek_v3

    From the Hub come safetensors, or .bin files where there are none, and never code. A checkpoint with other names
    needs a table of them: see docs/conversion.md.

    8-bit weights become bfloat16, or what --dtype says. Tensors pass one at a time, so memory stays near the largest;
    the check holds one whole model at a time in float32, calibration two. TARGET appears when everything is written
    and checked, and not before. The exit status is 1 if something is missing, unexpected or different.
    """
    from rich.progress import Progress
    from transformers.utils import logging

    from ..conversion.converter import DTYPES
    from ..conversion.converter import convert as run

    logging.disable_progress_bar()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tensors", total=None)
        report = run(
            source,
            target,
            revision=revision,
            layout=layout,
            to=to,
            config_file=config,
            rope_layout=rope,
            dtype=DTYPES.get(dtype),
            gate=gate,
            gate_dim=gate_dim,
            gate_norm=gate_norm,
            calibration=calibration,
            calibration_tokens=calibration_tokens,
            drop=drop or (),
            max_shard_size=max_shard_size,
            force=overwrite,
            check=check,
            threshold=threshold,
            reference_logits=reference_logits,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    table = Table(title=f"Wrote {target}", show_header=False, box=None, title_justify="left")
    for name, text in report_rows(report).items():
        table.add_row(name, escape(text))
    console().print(table)


def report_rows(report: "Report") -> dict[str, str]:
    """What a conversion did, by topic."""
    inventory = report.inventory
    rows = {
        "layout": f"{report.source_layout} to {report.target_layout}",
        "tensors": f"{report.tensors} in {', '.join(report.dtypes)}",
        "new": ", ".join(report.new),
        "with a factor": ", ".join(inventory.scaled),
        "dequantised": f"{len(inventory.dequantised)} of 8 bits" if inventory.dequantised else "",
        "dropped as asked": ", ".join(inventory.dropped),
        "recomputed, left out": ", ".join(inventory.derived),
        "tied, left out": ", ".join(inventory.duplicates),
        "files taken over": ", ".join(report.carried) or "none",
        "files left behind": ", ".join(report.left),
        "note": "\n".join(report.notes),
        "held-out text": "\n".join(
            f"loss {score.loss:.4f}, divergence from the source {score.divergence:.2e} nats a token: {stage}"
            for stage, score in report.stages.items()
        ),
        "check": str(report.comparison or "logits were not compared (--no-check)"),
    }
    return {name: text for name, text in rows.items() if text}
