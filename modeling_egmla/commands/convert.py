"""`egmla convert`: checkpoints of other layouts in, MLA checkpoints out, and EG-MLA models from MLA models."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..console import console, format_bytes, plain_table
from .common import Dtype, MaxShardSize


if TYPE_CHECKING:
    from ..conversion.checking import TextScore
    from ..conversion.converter import ConversionPlan, Report


def convert(
    source: Annotated[str, typer.Argument(help="Folder with the checkpoint, or its id on the Hub.")],
    target: Annotated[Path | None, typer.Argument(help="Folder to make; not needed for --plan.")] = None,
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
    latent: Annotated[
        int | None,
        typer.Option(min=2, help="Width of the latent that a model of the Llama form gets; one channel is constant."),
    ] = None,
    latent_energy: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="In its place, the share of energy of keys and values to keep, e.g. 0.99."),
    ] = None,
    rope_dim: Annotated[
        int | None,
        typer.Option(min=2, help="Rotary channels that such a model keeps; by default half of a head's."),
    ] = None,
    rotary: Annotated[
        Literal["position", "energy", "heads"] | None,
        typer.Option(
            help="Which channels stay rotary: by position, those that lose most without (the default); or the "
            "strongest; heads: as position, not mixed.",
            show_default=False,
        ),
    ] = None,
    gate: Annotated[
        Literal["none", "multiply", "add"],
        typer.Option(help="Start an EG-MLA model from an MLA model, with a gate that changes nothing at first."),
    ] = "none",
    gate_dim: Annotated[
        int | None, typer.Option(help="Width of the gate tables; by default 256.", min=1, show_default=False)
    ] = None,
    gate_norm: Annotated[
        Literal["layer_norm", "none"] | None,
        typer.Option(
            help="LayerNorm behind the gate, which is the default. With none the start is exact; else it may not be.",
            show_default=False,
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="Text to fit latent and LayerNorm on, and to measure loss.", exists=True, dir_okay=False),
    ] = None,
    calibration_tokens: Annotated[
        int | None, typer.Option(help="Tokens of that text to use; by default 16384.", min=512, show_default=False)
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(help="Pattern of source tensors to leave out, e.g. 'model.layers.61.*'. Repeatable."),
    ] = None,
    max_shard_size: MaxShardSize = "5GB",
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
    max_rise: Annotated[
        float | None,
        typer.Option(min=0, help="Largest rise of the loss on held-out text, in nats a token, that passes."),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only say what cache, parameters and tables the result would have.")
    ] = False,
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

    A model of the Llama form (no biases, no norms of queries and keys) becomes MLA, and with --gate EG-MLA, stage by
    stage, with the loss of each; what that will cost, --plan says before:

        egmla convert llama start --latent 128 --rope-dim 32 --calibration text.txt --max-rise 1

        egmla convert llama --latent 128 --gate multiply --plan

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

    from ..conversion.converter import DTYPES, plan_conversion
    from ..conversion.converter import convert as run
    from ..conversion.gating import GateStart
    from ..conversion.stages import LatentStart

    start = None
    if latent is not None and latent_energy is not None:
        raise ValueError("--latent and --latent-energy exclude each other.")
    if latent is not None or latent_energy is not None:
        start = LatentStart(latent, latent_energy, rope_dim, rotary or "position")
    elif rope_dim is not None or rotary is not None:
        raise ValueError("--rope-dim and --rotary go with --latent or --latent-energy, for models of the Llama form.")
    if gate == "none" and (gate_dim is not None or gate_norm is not None):
        raise ValueError("--gate-dim and --gate-norm go with --gate multiply or add.")
    if calibration is None and calibration_tokens is not None:
        raise ValueError("--calibration-tokens goes with --calibration.")
    if threshold is not None and not check:
        raise ValueError("--threshold bounds what --no-check leaves out: give one of them.")
    if reference_logits is not None and not check:
        raise ValueError("--reference-logits is for the check that --no-check leaves out: give one of them.")
    if plan and (target is not None or overwrite):
        raise ValueError("--plan writes nothing: leave TARGET and --overwrite out.")
    if plan and to != "egmla":
        raise ValueError("--plan tells what the EG-MLA result would have: leave --to out.")
    gates = GateStart(gate, gate_dim or 256, gate_norm or "layer_norm")
    if plan:
        planned = plan_conversion(
            source,
            revision=revision,
            layout=layout,
            config_file=config,
            latent=start,
            gates=gates,
        )
        console().print(plan_table(planned, "bfloat16" if dtype == "auto" else dtype))
        return
    if target is None:
        raise ValueError("TARGET, the folder to make, is missing.")
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
            latent=start,
            gate=gate,
            gate_dim=gates.dim,
            gate_norm=gates.norm,
            calibration=calibration,
            calibration_tokens=calibration_tokens or 16384,
            drop=drop or (),
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            check=check,
            threshold=threshold,
            max_rise=max_rise,
            reference_logits=reference_logits,
            staged=lambda stage, score: bar.console.print(score_line(stage, score), highlight=False),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    table = Table(title=f"Wrote {target}", show_header=False, box=None, title_justify="left")
    for name, text in report_rows(report).items():
        table.add_row(name, escape(text))
    console().print(table)


def score_line(stage: str, score: "TextScore") -> str:
    """A stage and how it does on held-out text, nats a token."""
    return (
        f"{stage}: loss {score.loss:.4f}, perplexity {score.perplexity:,.2f}, divergence from the source "
        f"{score.divergence:.2e}"
    )


def plan_table(plan: "ConversionPlan", dtype: str) -> Table:
    """Parameters and cache of a source and of what it would become, in `dtype`."""
    from ..plan import BYTES, TOKEN_ID_BYTES, count_parameters

    config, parameters = plan.config, count_parameters(plan.config)
    tokens = config.max_position_embeddings
    ids = TOKEN_ID_BYTES * tokens

    def share(here: int, there: int) -> str:
        return f"{here / there:.1%}"

    cache = config.cache_elements_per_token
    sizes = [elements * BYTES[dtype] * tokens for elements in (plan.source_cache, cache)]
    table = plain_table("Nothing was written", "", "source", "result", "result / source")
    table.add_row(
        "parameters",
        f"{plan.source_parameters:,}",
        f"{parameters.total:,}",
        share(parameters.total, plan.source_parameters),
    )
    table.add_row("of these gate tables", f"{plan.source_tables:,}", f"{parameters.tables:,}")
    table.add_row("cached elements a token", f"{plan.source_cache:,}", f"{cache:,}", share(cache, plan.source_cache))
    table.add_row(f"cache of {tokens:,} tokens, {dtype}", *map(format_bytes, sizes), share(sizes[1], sizes[0]))
    table.add_row("and their ids", "", format_bytes(ids))
    return table


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
        "held-out text": "\n".join(score_line(stage, score) for stage, score in report.stages.items()),
        "check": str(report.comparison or "logits were not compared (--no-check)"),
    }
    return {name: text for name, text in rows.items() if text}
