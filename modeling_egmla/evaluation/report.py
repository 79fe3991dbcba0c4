"""Results of the paper's suite as tables, beside the paper's figures, and as a picture."""

from pathlib import Path
from typing import Any

from .suite import paper_results, paper_tasks


Rows = tuple[list[str], list[list[str]]]


def _percent(metric: dict[str, float | None] | None) -> str:
    if metric is None:
        return ""
    error = "" if metric["stderr"] is None else f" ± {100 * metric['stderr']:.2f}"
    return f"{100 * metric['value']:.2f}{error}"


def mean_name(results: dict[str, Any]) -> str:
    """What the mean is over, so that one over fewer tasks, or over fewer rows, is not taken for the paper's."""
    summary = results["summary"]
    complete = f"mean of {summary['tasks_in_mean']}"
    if summary["tasks_missing"]:
        complete += f", NOT of 12 (without {', '.join(summary['tasks_missing'])})"
    if results["identity"]["limit"] is not None:
        complete += f", first {results['identity']['limit']} rows only"
    return complete


def task_table(results: dict[str, Any]) -> Rows:
    """Columns and rows: each task's acc and acc_norm in percent with standard errors, rows, shots and version."""
    rows = []
    for name in paper_tasks():
        task = results["tasks"].get(name)
        if task is None:
            rows.append([name, "LEFT OUT", "", "", "", ""])
            continue
        metrics = task["metrics"]
        accuracies = [_percent(metrics.get("acc")), _percent(metrics.get("acc_norm"))]
        rows.append([name, *accuracies, f"{task['rows']:,}", str(task["num_fewshot"]), str(task["version"])])
    summary = results["summary"]
    if summary["mean_acc"] is not None:
        means = [f"{100 * summary[key]:.2f}" for key in ("mean_acc", "mean_acc_norm_or_acc")]
        rows.append([mean_name(results), *means, "", "", ""])
    return ["task", "acc %", "acc_norm %", "rows", "shots", "version"], rows


def paper_table(results: dict[str, Any], name: str) -> Rows:
    """Columns and rows: mean accuracy in percent and perplexities, of the model first, then of the paper's models."""

    def row(label: str, figures: dict[str, float | None]) -> list[str]:
        keys = ("accuracy", "climbmix", "wikitext", "lambada", "mean_perplexity")
        return [label, *("" if figures.get(key) is None else f"{figures[key]:.2f}" for key in keys)]

    summary = results["summary"]
    accuracy = None if summary["mean_acc"] is None else 100 * summary["mean_acc"]
    own = {"accuracy": accuracy, "mean_perplexity": summary["mean_perplexity"], **summary["perplexity"]}
    paper = [row(model, figures) for model, figures in paper_results()["models"].items()]
    return ["model", "acc %", "ClimbMix", "Wiki", "LAMBADA", "mean"], [row(f"{name} (here)", own), *paper]


def plot_results(results: dict[str, Any], name: str, path: str | Path) -> None:
    """Draws the tasks' accuracies with standard errors, and the mean beside those of the paper's models."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    tasks = [task for task in reversed(paper_tasks()) if task in results["tasks"]]
    for metric, marker, colour in (("acc", "o", "#0b6e4f"), ("acc_norm", "s", "#c8553d")):
        points = [
            (place, results["tasks"][task]["metrics"][metric])
            for place, task in enumerate(tasks)
            if metric in results["tasks"][task]["metrics"]
        ]
        if points:
            values = [100 * score["value"] for _, score in points]
            errors = [100 * (score["stderr"] or 0) for _, score in points]
            places = [place for place, _ in points]
            left.errorbar(values, places, xerr=errors, fmt=marker, color=colour, label=metric, capsize=2)
    left.set_yticks(range(len(tasks)), tasks)
    left.set_xlabel("%, ± one standard error")
    if tasks:
        left.legend(frameon=False)
    means = {model: figures["accuracy"] for model, figures in paper_results()["models"].items()}
    right.plot(means.values(), means.keys(), "o", color="0.6")
    if results["summary"]["mean_acc"] is not None:
        right.plot(100 * results["summary"]["mean_acc"], name, "o", color="#0b6e4f")
    right.invert_yaxis()
    right.set_xlabel(f"mean accuracy, %: paper (grey), {name} ({mean_name(results)})", wrap=True)
    for axes in (left, right):
        axes.grid(color="0.92", axis="x")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
