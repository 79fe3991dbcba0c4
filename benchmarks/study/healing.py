"""What healing brought and what it would take: tables, the figure, and the fit of docs/conversion.md."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from report import estimate, fill
from rich.console import Console

from modeling_egmla.files import write_whole


PARITY = 0.01  # nats a token above the teacher: one percent of perplexity
DRAWS = 20_000


@dataclass(frozen=True)
class Parity:
    """Tokens until a student is within `PARITY` of its teacher by a fitted law, and the ends of its 95 % interval."""

    tokens: float
    low: float
    high: float
    exponent: float

    def __str__(self) -> str:
        if not math.isfinite(self.tokens):
            return "never, at this rate"
        return f"{count(self.tokens)} ({count(self.low)} to {count(self.high)})"


def count(tokens: float) -> str:
    """A number of tokens with two digits."""
    for limit, unit in ((1e15, None), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= limit:
            return "beyond any" if unit is None else f"{float(f'{tokens / limit:.2g}'):g} {unit}"
    return f"{tokens:.0f}"


def fit_parity(curve: list[list[float]], teacher_loss: float, seed: int = 0) -> Parity | None:
    """
    Fits `gap = a * tokens ** -b` to a healing curve by least squares of logarithms, and solves it for `PARITY`.

    The interval takes the residuals as normal and independent with a variance that is estimated: percentiles 2.5 and
    97.5 of draws of (log a, b) from Student's distribution; a draw whose gap does not fall counts as never. None where
    fewer than four points are there, or one is no worse than the teacher, whose gap has no logarithm.

    Args:
        curve: pairs of tokens seen and validation loss; the start, at zero tokens, is not fitted.
        teacher_loss: on the same text.
        seed: of the draws.
    """
    points = [(tokens, loss - teacher_loss) for tokens, loss in curve if tokens > 0]
    if len(points) < 4 or min(gap for _, gap in points) <= 0:
        return None
    log_tokens, log_gap = np.log(np.array(points)).T
    design = np.stack((np.ones_like(log_tokens), -log_tokens), axis=1)
    solution, _, _, _ = np.linalg.lstsq(design, log_gap, rcond=None)
    residuals = log_gap - design @ solution
    freedom = len(points) - 2
    covariance = residuals @ residuals / freedom * np.linalg.inv(design.T @ design)
    rng = np.random.default_rng(seed)
    spread = np.sqrt(freedom / rng.chisquare(freedom, size=(DRAWS, 1)))
    draws = solution + rng.multivariate_normal(np.zeros(2), covariance, size=DRAWS) * spread

    def tokens(log_a: np.ndarray, b: np.ndarray) -> np.ndarray:
        exponent = np.divide(log_a - math.log(PARITY), b, out=np.full_like(b, np.inf), where=b > 0)
        return np.exp(np.minimum(exponent, 700))

    low, high = np.percentile(tokens(*draws.T), (2.5, 97.5))
    (best,) = tokens(solution[:1], solution[1:])
    return Parity(best if solution[1] > 0 else math.inf, low, high, solution[1])


def load(folder: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def widths(results: dict, kind: str) -> list[int]:
    """Widths that have a result of a kind, the largest first."""
    found = (name.removeprefix(f"{kind}-") for name in results if name.startswith(f"{kind}-"))
    return sorted(map(int, found), reverse=True)


def stages_table(results: dict) -> str:
    """Perplexity and divergence of every stage of conversion, a column for each width."""
    columns = [results[f"convert-{width}"] for width in widths(results, "convert")]
    if not columns:
        return "Not run yet."
    names = dict.fromkeys(general(stage) for column in columns for stage in column["stages"])
    rows = [
        "| stage | " + " | ".join(f"latent {column['width']}" for column in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name in names:
        cells = []
        for column in columns:
            score = next((s for stage, s in column["stages"].items() if general(stage) == name), None)
            cells.append("" if score is None else f"{math.exp(score['loss']):.2f}; {score['divergence']:.4f}")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def general(stage: str) -> str:
    """A stage's name without its width, which heads the column."""
    return "low rank, no norm" if stage.startswith("latent of") else stage


def variants_table(results: dict) -> str:
    """Perplexity and divergence of other choices of what stays rotary, a column for the cache of each width."""
    if "variants" not in results:
        return "Not run yet."
    rows = results["variants"]["variants"]
    columns = sorted({row["of_width"] for row in rows}, reverse=True)
    sizes = {row["of_width"]: row["latent"] + row["rope_dim"] for row in rows}
    lines = [
        "| rotary channels, which | " + " | ".join(f"{sizes[width]} elements a layer" for width in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for rotary, rope_dim in dict.fromkeys((row["rotary"], row["rope_dim"]) for row in rows):
        cells = [
            f"{math.exp(row['loss']):.2f}; {row['divergence']:.4f}"
            for width in columns
            for row in rows
            if (row["rotary"], row["rope_dim"], row["of_width"]) == (rotary, rope_dim, width)
        ]
        lines.append(f"| {rope_dim}, by `{rotary}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def healing_table(results: dict) -> str:
    """Losses before and after healing, and what parity would take."""
    rows = [
        "| latent | tokens | teacher | student before | after | gap closed | nats a million tokens, second half "
        "| tokens to parity (95 %) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    found = widths(results, "heal")
    for width in found:
        result = results[f"heal-{width}"]
        curve, teacher = result["validation_loss_over_tokens"], result["teacher_validation_loss"]
        before, after = result["initial_validation_loss"], result["validation_loss"]
        middle = min(curve, key=lambda point: abs(point[0] - curve[-1][0] / 2))
        rate = (middle[1] - after) / (curve[-1][0] - middle[0]) * 1e6
        rows.append(
            f"| {width} | {count(result['tokens_seen'])} | {teacher:.4f} | {before:.4f} | {after:.4f} "
            f"| {(before - after) / (before - teacher):.0%} | {rate:.3f} | {fit_parity(curve, teacher) or 'no fit'} |"
        )
    if not found:
        return "Not run yet."
    return "\n".join([*rows, "", "![Validation loss over healing tokens](study/healing.png)"])


def caches_table(results: dict) -> str:
    """The same text read from every cache: bytes a token, loss, and difference from the source's by windows."""
    if "source" not in results:
        return "Not run yet."
    rows = [
        "| cache | bytes a token, bfloat16 | of the source's | loss | less the source's |",
        "|---|---|---|---|---|",
    ]
    entries = {f"source, {name}": row for name, row in results["source"]["caches"].items()}
    for stage, said in (("start", "not healed"), ("healed", "healed")):
        entries |= {f"EG-MLA, latent {w}, {said}": results[f"{stage}-{w}"] for w in widths(results, stage)}
    reference = results["source"]["caches"]["keys and values"]
    for name, row in entries.items():
        differences = [loss - other for loss, other in zip(row["losses"], reference["losses"])]
        rows.append(
            f"| {name} | {row['bytes_per_token']:,.0f} | {row['bytes_per_token'] / reference['bytes_per_token']:.1%} "
            f"| {estimate(row['losses']).mean:.4f} | {'-' if row is reference else estimate(differences)} |"
        )
    return "\n".join(rows)


def texts(results: dict) -> str:
    """What each model says, as it says it."""
    said = {"source": results.get("source")}
    for stage in ("start", "healed"):
        said |= {f"latent {width}, {stage}": results[f"{stage}-{width}"] for width in widths(results, stage)}
    quotes = [f"* {name}:\n  > {' '.join(row['text'].split())}" for name, row in said.items() if row]
    return "\n".join(quotes) or "Not run yet."


def draw(results: dict, path: Path) -> None:
    """Validation loss over tokens of healing, with the teacher's."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for width in widths(results, "heal"):
        result = results[f"heal-{width}"]
        tokens, losses = zip(*result["validation_loss_over_tokens"])
        axes.plot([t / 1e6 for t in tokens], losses, marker="o", markersize=3, label=f"latent {width}")
        axes.axhline(result["teacher_validation_loss"], color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="healing tokens, M", ylabel="validation loss, nats a token", title="Healing (dashed: teacher)")
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


TABLES = {
    "stages": stages_table,
    "variants": variants_table,
    "healing": healing_table,
    "caches": caches_table,
    "texts": texts,
}


def write_healing_report(folder: Path, docs: Path, console: Console) -> None:
    """Puts the tables between their marks in docs/conversion.md, and the figure beside it."""
    results = load(folder)
    document = docs / "conversion.md"
    text = document.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        text = fill(text, f"smollm2 {name}", table(results))
    if widths(results, "heal"):
        draw(results, docs / "study" / "healing.png")
    write_whole(document, text)
    console.print(f"{len(results)} results of SmolLM2: tables in {document}.")
