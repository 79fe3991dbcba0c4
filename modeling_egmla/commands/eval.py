"""`egmla eval`: scores from lm-evaluation-harness."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import Device, Dtype, TrustRemoteCode, console, load_model, need, plain_table


if TYPE_CHECKING:
    from rich.table import Table


def evaluate(
    model: Annotated[str | None, typer.Argument(help="Folder or Hub id; by default this package's own model.")] = None,
    tasks: Annotated[str, typer.Option("--tasks", "-t", help="Tasks of the harness, with commas between.")] = "sotu",
    limit: Annotated[int | None, typer.Option(min=1, help="Score the first so many rows of each task only.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Solved examples in front of each row.")] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Rows at once.")] = 8,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write the harness's results as JSON.")
    ] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """
    Score a model with lm-evaluation-harness.

    `sotu` needs no network: it is `sotu_continuation` (which of four continuations is the true one; chance is 25 %)
    and `sotu_perplexity`, on messages that this package's own model was not trained on. All other tasks of the harness
    load their rows from the Hub.

    Examples:

    - `egmla eval`
    - `egmla eval path/to/my-model --tasks sotu_continuation --limit 50`
    - `egmla eval me/my-egmla --tasks arc_easy,hellaswag --output scores.json`
    """
    need("eval", "lm_eval", "datasets")
    from ..evaluation import evaluate as run_tasks

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise ValueError("--tasks names no task: give one or more, e.g. sotu_continuation.")
    language_model, tokenizer = load_model(model, device, dtype, trust_remote_code)
    results = run_tasks(language_model, tokenizer, names, limit, num_fewshot, batch_size)
    console().print(scores_table(results))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, indent=2, default=str) + "\n", encoding="utf-8")
        console().print(f"Results: {output}")


def scores_table(results: dict) -> "Table":
    """The metrics of each task, with the rows that were scored."""
    from ..evaluation import scores

    table = plain_table("", "Task", "metric", "value", "± stderr", "rows", "shots")
    previous = None
    for score in scores(results):
        stderr = "" if score.stderr is None else f"{score.stderr:.4f}"
        name, previous = ("" if score.task == previous else score.task), score.task
        rows = "" if score.rows is None else f"{score.rows:,}"  # a group of tasks has none of its own
        shots = "" if score.num_fewshot is None else str(score.num_fewshot)
        table.add_row(name, score.metric, f"{score.value:,.4f}", stderr, rows if name else "", shots if name else "")
    return table
