"""`egmla eval`: scores from lm-evaluation-harness, the paper's suite, and the perplexity of texts."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..console import console, is_installed, need, plain_table
from .common import Device, Dtype, TrustRemoteCode, load_model


if TYPE_CHECKING:
    from rich.table import Table


def evaluate(
    model: Annotated[str | None, typer.Argument(help="Folder or Hub id; by default this package's own model.")] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", "-t", help="Tasks of the harness, with commas between; by default sotu.")
    ] = None,
    suite: Annotated[
        Literal["paper"] | None, typer.Option(help="The paper's twelve tasks and three perplexities.")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, metavar="FILE", help="Perplexity of a text file; may be repeated."),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens by which --text's windows move on; by default half a context."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Score the first so many rows of each task only.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Solved examples in front of each row.")] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Rows at once.")] = 8,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Write results as JSON; --suite continues from this file."),
    ] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """
    Score a model with lm-evaluation-harness, or the perplexity of text files.

    `sotu` needs no network: it is `sotu_continuation` (which of four continuations is the true one; chance is 25 %)
    and `sotu_perplexity`, on messages that this package's own model was not trained on. All other tasks of the harness
    load their rows from the Hub.

    `--suite paper` runs the tasks and perplexities of arXiv:2509.16686 and sets them beside its figures. Results are
    kept after each task, and the same command goes on with what is missing.

    Examples:

    - `egmla eval`
    - `egmla eval path/to/my-model --tasks sotu_continuation --limit 50`
    - `egmla eval me/my-egmla --tasks arc_easy,hellaswag --output scores.json`
    - `egmla eval me/my-egmla --suite paper --output paper.json`
    - `egmla eval me/my-egmla --text book.txt --stride 256`
    """
    need("eval", "lm_eval", "datasets")
    from ..loading import check_finite

    if sum(option is not None and option != [] for option in (tasks, suite, text)) > 1:
        raise ValueError("Give one of --tasks, --suite and --text.")
    if limit is not None and text:
        raise ValueError("--limit counts rows of tasks; texts are scored whole.")
    if num_fewshot is not None and (suite or text):
        raise ValueError("--num-fewshot goes with --tasks: a suite says its own, and texts have none.")
    if suite is not None and output is not None and output.suffix in (".md", ".png"):
        raise ValueError(f"--output {output}: the table and the plot get that name. Give the results one in .json.")
    if stride is not None and not text:
        raise ValueError("--stride goes with --text.")
    names = [name.strip() for name in ("sotu" if tasks is None else tasks).split(",") if name.strip()]
    if not names:
        raise ValueError("--tasks names no task: give one or more, e.g. sotu_continuation.")
    language_model, tokenizer = load_model(model, device, dtype, trust_remote_code)
    check_finite(language_model)
    if suite is not None:
        _paper_suite(language_model, tokenizer, model, output, limit, batch_size)
    elif text:
        _texts(language_model, tokenizer, text, stride, batch_size, output)
    else:
        from ..evaluation import evaluate as run_tasks

        results = run_tasks(language_model, tokenizer, names, limit, num_fewshot, batch_size)
        console().print(scores_table(results))
        _write(output, results)


def _write(output: Path | None, results: dict[str, Any]) -> None:
    from ..files import write_whole

    if output is not None:
        write_whole(output, json.dumps(results, indent=2, default=str) + "\n")
        console().print(f"Results: {output}")


def _texts(model, tokenizer, paths: list[Path], stride: int | None, batch_size: int, output: Path | None) -> None:
    """Shows the perplexity of each file, and of all together."""
    from ..evaluation.perplexity import text_perplexity
    from ..evaluation.suite import perplexity_entry

    texts = {}
    for path in paths:
        try:
            texts[str(path)] = path.read_text(encoding="utf-8-sig")  # a byte-order mark is no text
        except UnicodeDecodeError as error:
            raise ValueError(f"--text {path} is not UTF-8 text: {error}") from error
        if not texts[str(path)]:
            raise ValueError(f"--text {path} is empty.")
    results = {
        name: text_perplexity(model, tokenizer, [content], stride=stride, batch_size=batch_size)
        for name, content in texts.items()
    }
    columns = ("tokens", "words", "bytes", "PPL a token", "a word", "a byte", "bits a byte")
    total = sum(result.nats for result in results.values())
    table = plain_table("", "Text", *columns)
    for name, result in results.items():
        counts = (f"{result.tokens:,}", f"{result.words:,}", f"{result.bytes:,}")
        a_word = "-" if result.word_perplexity is None else f"{result.word_perplexity:,.2f}"
        perplexities = (f"{result.token_perplexity:,.3f}", a_word)
        table.add_row(name, *counts, *perplexities, f"{result.byte_perplexity:.4f}", f"{result.bits_per_byte:.4f}")
    console().print(table)
    any_result = next(iter(results.values()))
    console().print(f"Context {any_result.context:,} tokens, stride {any_result.stride:,}; {total:,.1f} nats in all.")
    _write(output, {name: perplexity_entry(result) for name, result in results.items()})


def _paper_suite(model, tokenizer, name: str | None, output: Path | None, limit: int | None, batch_size: int) -> None:
    """Runs the paper's suite; leaves a table and a plot beside the results."""
    from ..evaluation.report import mean_name, paper_table, plot_results, task_table
    from ..evaluation.suite import run_paper_suite
    from ..files import write_whole

    name = Path(name).name if name is not None else "egmla-sotu"
    output = output or Path(f"paper-{name}.json")
    results = run_paper_suite(model, tokenizer, output, limit, batch_size, report=console().print)
    markdown = []
    beside = f"Mean accuracy and perplexities beside the paper's; here: {mean_name(results)}"
    for title, (columns, rows) in (("Tasks", task_table(results)), (beside, paper_table(results, name))):
        table = plain_table(title, *columns)
        for row in rows:
            table.add_row(*row)
        console().print(table)
        lines = [columns, ["---"] * len(columns), *rows]
        markdown += [f"## {title}", "", *("| " + " | ".join(line) + " |" for line in lines), ""]
    for task, reason in results["unavailable"].items():
        console().print(f"[red]LEFT OUT: {task}[/red]: {reason}")
        markdown.append(f"Left out: {task}: {reason}")
    write_whole(output.with_suffix(".md"), "\n".join(markdown) + "\n")
    if is_installed("matplotlib"):
        plot_results(results, name, output.with_suffix(".png"))
    else:
        console().print("No plot was drawn, since matplotlib is not installed: pip install 'egmla[plot]'")
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
        metric = score.metric if score.filter == "none" else f"{score.metric} ({score.filter})"
        table.add_row(name, metric, f"{score.value:,.4f}", stderr, rows if name else "", shots if name else "")
    return table
