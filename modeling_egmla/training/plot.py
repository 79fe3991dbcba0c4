"""Loss curves of runs of `egmla train`, and the difference between two of them."""

from collections.abc import Sequence
from pathlib import Path

from .log import read_log


COLOURS = ("#0b6e4f", "#c8553d")


def read_losses(folder: str | Path, key: str) -> dict[int, float]:
    """
    Losses by step, in nats a token, from the log of a run.

    Args:
        folder: `training.output_dir` of the run.
        key: `"loss"` (training, means since the last logged step) or `"eval_loss"` (validation).

    Raises:
        ValueError: there is no log.
    """
    path = Path(folder) / "log.jsonl"
    if not path.is_file():
        raise ValueError(f"{folder} has no log.jsonl: name the output folder of a run of `egmla train`.")
    return {line["step"]: line[key] for line in read_log(path) if key in line}


def loss_differences(first: str | Path, second: str | Path) -> dict[int, float]:
    """
    Validation loss of the first run minus that of the second, by step, in nats a token.

    Raises:
        ValueError: a run has no log, or the two were never evaluated at the same step.
    """
    losses, others = read_losses(first, "eval_loss"), read_losses(second, "eval_loss")
    if not (common := sorted(losses.keys() & others.keys())):
        raise ValueError(
            f"{first} and {second} have no evaluation at the same step: give both recipes one `training.eval_steps`."
        )
    return {step: losses[step] - others[step] for step in common}


def plot_runs(folders: Sequence[str | Path], path: str | Path) -> None:
    """
    Draws training and validation loss of one run, or of two with the difference of their validation losses below.

    Raises:
        ValueError: a run has no log; two have no evaluation at the same step; matplotlib writes no such kind of file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5 if len(folders) == 1 else 7), layout="constrained")
    if len(folders) == 1:
        axes, below = figure.subplots(), None
    else:
        axes, below = figure.subplots(2, sharex=True, height_ratios=[3, 2])
    for folder, colour in zip(folders, COLOURS):
        training, validation = read_losses(folder, "loss"), read_losses(folder, "eval_loss")
        name = Path(folder).resolve().name
        axes.plot(training.keys(), training.values(), color=colour, alpha=0.35, label=f"{name}, training")
        axes.plot(validation.keys(), validation.values(), "o-", color=colour, label=f"{name}, validation")
    axes.set_ylabel("loss, nats a token")
    axes.legend(frameon=False)
    if below is not None:
        differences = loss_differences(*folders)
        below.axhline(0, color="0.6", linewidth=1)
        below.plot(differences.keys(), differences.values(), "o-", color="0.2")
        first, second = (Path(folder).resolve().name for folder in folders)
        below.set_ylabel(f"{first} minus\n{second}, validation")
    for each in figure.axes:
        each.grid(color="0.92")
        each.spines[["top", "right"]].set_visible(False)
    figure.axes[-1].set_xlabel("step")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
