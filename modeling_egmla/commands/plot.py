"""`egmla plot`: the losses of one run, or of two with their difference."""

from pathlib import Path
from typing import Annotated

import typer

from ..console import console, need, plain_table


def plot(
    run: Annotated[Path, typer.Argument(help="Output folder of a run of `egmla train`.")],
    other: Annotated[Path | None, typer.Argument(help="Another run, whose losses are subtracted.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Picture to write.")] = Path(
        "loss.png"
    ),
) -> None:
    """
    Draw the loss of a run of `egmla train`, or of two runs and the difference of their validation losses.

    Example:

    - `egmla plot out/egmla-sotu out/mla-sotu`
    """
    need("plot", "matplotlib")
    need("train", "datasets")
    from ..training.plot import loss_differences, plot_runs, read_losses

    runs = [run] if other is None else [run, other]
    plot_runs(runs, output)
    if other is not None:
        table = plain_table("Validation loss, nats a token", "Step", run.name, other.name, "difference")
        losses, others = read_losses(run, "eval_loss"), read_losses(other, "eval_loss")
        for step, difference in loss_differences(run, other).items():
            table.add_row(f"{step:,}", f"{losses[step]:.4f}", f"{others[step]:.4f}", f"{difference:+.4f}")
        console().print(table)
    console().print(f"Picture: {output}")
