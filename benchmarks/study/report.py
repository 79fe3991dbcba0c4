"""Tables and figures of the study from its result files."""

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from rich.console import Console
from runs import EXPERIMENTS, SEEDS, reference_of, text_of

from modeling_egmla.files import write_whole


T_95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t, two-sided 95 %, by number of seeds


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its standard error; NaN from one seed alone."""

    mean: float
    error: float
    seeds: int

    @property
    def half_width(self) -> float:
        """Half of the 95 % interval, by Student's t; NaN from one seed alone."""
        return T_95.get(self.seeds, math.nan) * self.error

    def __str__(self) -> str:
        return f"{self.mean:.4f} ± {self.error:.4f}" if self.seeds > 1 else f"{self.mean:.4f} (one seed)"


def estimate(values: list[float]) -> Estimate:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Estimate(statistics.fmean(values), error, len(values))


def load_results(folder: Path) -> dict[tuple[str, str, int], dict]:
    """Result files by text, variant and seed."""
    results = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*-seed*.json")))
    return {(result["text"], result["variant"], result["seed"]): result for result in results}


def compare(results: dict, text: str, variant: str, reference: str, tokens: int | None = None) -> Estimate | None:
    """
    Loss of a variant less that of the reference, seed by seed: both saw the same text in the same order.

    Args:
        tokens: after so many tokens of training; at its end without them.

    Raises:
        KeyError: no loss was measured after so many tokens.
    """

    def loss(run: dict) -> float:
        return run["validation_loss"] if tokens is None else dict(run["validation_loss_over_tokens"])[tokens]

    differences = [
        loss(results[text, variant, seed]) - loss(results[text, reference, seed])
        for seed in SEEDS
        if (text, variant, seed) in results and (text, reference, seed) in results
    ]
    return estimate(differences) if differences else None


def is_begun(results: dict, experiment: str) -> bool:
    """Whether an experiment has a run of its own: those of plain MLA and EG-MLA on the first text belong to all."""
    shared = set() if experiment in ("ablation", "transfer") else {"mla", "egmla"}
    wanted = set(EXPERIMENTS[experiment][1]) - shared
    return any(text == text_of(experiment) and variant in wanted for text, variant, _ in results)


def table(results: dict, experiment: str, speed: dict[str, list[float]]) -> str:
    """
    An experiment as a Markdown table and its figure; variants without a finished run are named below the table.

    Args:
        speed: for each variant the quartiles of its training time, of plain MLA's.
    """
    text, (_, variants) = text_of(experiment), EXPERIMENTS[experiment]
    of_each = {variant: reference_of(experiment, variant) for variant in variants}
    against = f"`{variants[0]}`" if len(set(of_each.values())) == 1 else "MLA's at that latent"
    rows = [
        "| | parameters, M | of these in tables | cache elements a token | training time, of `mla` | seeds "
        f"| validation loss | less {against} | 95 % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    missing = []
    for variant in variants:
        runs = [results[text, variant, seed] for seed in SEEDS if (text, variant, seed) in results]
        if not runs:
            missing.append(f"`{variant}`")
            continue
        difference = None if variant == of_each[variant] else compare(results, text, variant, of_each[variant])
        half_width = difference.half_width if difference else math.nan
        rows.append(
            f"| `{variant}` | {runs[0]['parameters'] / 1e6:.2f} | {runs[0]['gate_table_parameters'] / 1e6:.2f} "
            f"| {runs[0]['cache_elements']} | {tell_time(speed, variant)} "
            f"| {len(runs)} | {estimate([run['validation_loss'] for run in runs])} "
            f"| {difference if difference else '-'} | {'-' if math.isnan(half_width) else f'± {half_width:.4f}'} |"
        )
    left = [f"Not run yet: {', '.join(missing)}."] if missing else []
    if not is_begun(results, experiment):
        return left[0]
    figures = [f"![Validation loss over tokens](study/{experiment}.png)"]
    if experiment == "latents":
        figures.append("![Validation loss over cache elements](study/latents-cache.png)")
    return "\n".join([*rows, "", *left, *[""] * bool(left), *figures])


def tell_time(speed: dict[str, list[float]], variant: str) -> str:
    """The median of a variant's training time, of plain MLA's, and its quartiles."""
    if variant == "mla":
        return "1"
    low, median, high = speed.get(variant, (None, None, None))
    return "-" if median is None else f"{median:.2f} ({low:.2f} to {high:.2f})"


def draw(results: dict, experiment: str, path: Path) -> None:
    """Validation loss over tokens: the mean of the seeds, and the range between them."""
    text, (title, variants) = text_of(experiment), EXPERIMENTS[experiment]
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for variant in variants:
        curves = [
            dict(results[text, variant, seed]["validation_loss_over_tokens"])
            for seed in SEEDS
            if (text, variant, seed) in results
        ]
        if curves:
            measured = sorted(set.intersection(*map(set, curves)))
            tokens = [count / 1e6 for count in measured]
            losses = [[curve[count] for curve in curves] for count in measured]
            means = [statistics.fmean(values) for values in losses]
            (line,) = axes.plot(tokens, means, label=f"{variant} ({len(curves)})")
            lows, highs = [min(values) for values in losses], [max(values) for values in losses]
            axes.fill_between(tokens, lows, highs, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="training tokens, M", ylabel="validation loss, nats a token", title=title)
    axes.legend(title="variant (seeds)")
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_cache(results: dict, path: Path) -> None:
    """Validation loss over cache elements a token, of MLA and of EG-MLA: the means of seeds with standard errors."""
    text, (title, variants) = text_of("latents"), EXPERIMENTS["latents"]
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for kind in ("mla", "egmla"):
        points = []
        for variant in variants:
            runs = [results[text, variant, seed] for seed in SEEDS if (text, variant, seed) in results]
            if runs and variant.split("-")[0] == kind:
                points.append((runs[0]["cache_elements"], estimate([run["validation_loss"] for run in runs])))
        if not points:
            continue
        cache, losses = zip(*sorted(points, key=lambda point: point[0]), strict=True)
        errors = [0 if math.isnan(loss.error) else loss.error for loss in losses]
        axes.errorbar(cache, [loss.mean for loss in losses], errors, marker="o", capsize=4, label=kind)
    axes.set_xscale("log", base=2)
    ticks = sorted({run["cache_elements"] for (_, variant, _), run in results.items() if variant in variants})
    axes.set_xticks(ticks, [str(count) for count in ticks])
    axes.set(xlabel="cache elements a token", ylabel="validation loss, nats a token", title=title)
    axes.legend(title="mean and standard error")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def write_report(folder: Path, docs: Path, console: Console) -> None:
    """Puts the tables between their marks in docs/study.md, and the figures beside it."""
    results = load_results(folder)
    speed_file = folder / "speed.json"
    speed = json.loads(speed_file.read_text(encoding="utf-8"))["time_of_mla"] if speed_file.exists() else {}
    document = docs / "study.md"
    text = document.read_text(encoding="utf-8")
    for experiment in EXPERIMENTS:
        text = fill(text, experiment, table(results, experiment, speed))
        if is_begun(results, experiment):
            draw(results, experiment, docs / "study" / f"{experiment}.png")
            if experiment == "latents":
                draw_cache(results, docs / "study" / "latents-cache.png")
    write_whole(document, text)
    console.print(f"{len(results)} results: tables in {document}, figures in {docs / 'study'}.")


def fill(document: str, name: str, content: str) -> str:
    """
    Replaces what stands between `<!-- NAME -->` and `<!-- end NAME -->`.

    Raises:
        ValueError: the document lacks one of the marks.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end {name} -->"
    if begin not in document or end not in document:
        raise ValueError(f"The document lacks {begin} or {end}.")
    head, rest = document.split(begin, 1)
    return f"{head}{begin}\n{content}\n{end}{rest.split(end, 1)[1]}"
