"""
The study: what the gate is worth, with seeds (some fifty small models, run by run), and what it costs to bring a real
model over (SmolLM2-135M).

Finished runs are result files and are not repeated; a run that was killed goes on from its last checkpoint.
"""

from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Annotated

import typer
from healing import write_healing_report
from report import compare as difference_of
from report import load_results, write_report
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from runs import EXPERIMENTS, TEXT, all_runs, carry_out, is_done, missing_weights
from smollm2 import carry_out as carry_out_smollm2
from smollm2 import prepare
from speed import measure_speed
from text import fetch_messages, fetch_sections


FOLDER = Path("out/study")
RESULTS = Path("benchmarks/results/study")
SMOLLM2_RESULTS = Path("benchmarks/results/smollm2")
TOKENIZER = "configuration/egmla-sotu"  # trained on the same training messages

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, rich_markup_mode="markdown")
console = Console(highlight=False)


@app.command()
def run(
    only: Annotated[str | None, typer.Option(help=f"One experiment: {', '.join(EXPERIMENTS)}.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, a thread each.")] = 2,
) -> None:
    """Do the runs that are not done. Stop it whenever you like; the same command goes on."""
    if only is not None and only not in EXPERIMENTS:
        raise typer.BadParameter(
            f"{only!r} is no experiment; there are {', '.join(EXPERIMENTS)}.", param_hint="--only"
        )
    fetch_messages(FOLDER / "text")
    fetch_sections(FOLDER / "text")
    runs = all_runs(only)
    left = [run for run in runs if not is_done(run, FOLDER, RESULTS, TOKENIZER)]
    again = [run for run in missing_weights(left, FOLDER) if run not in left]
    console.print(f"{len(runs) - len(left)} of {len(runs)} runs are done; logs are in {FOLDER / 'recipes'}.")
    if again:
        console.print(f"{len(again)} more are made first, whose weights others start from.")
    left = sorted([*again, *left], key=lambda run: run.start is not None)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(jobs) as pool:
        bar = progress.add_task("runs", total=len(left))
        pending = {}
        while left or pending:
            startable = [run for run in left if run.start not in left and run.start not in pending.values()]
            for run in startable[: jobs - len(pending)]:
                left.remove(run)
                pending[pool.submit(carry_out, run, FOLDER, RESULTS, TOKENIZER)] = run
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                finished = pending.pop(future)
                try:
                    future.result()
                except RuntimeError:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
                progress.console.print(f"done: {finished.name}")
                progress.advance(bar)


@app.command()
def speed(
    pairs: Annotated[int, typer.Option(min=5, help="Steps of each variant, between steps of plain MLA.")] = 5,
) -> None:
    """Measure the training time of every variant beside plain MLA's; wants a quiet machine, and takes minutes."""
    measure_speed(RESULTS / "speed.json", pairs)


@app.command()
def smollm2() -> None:
    """Convert SmolLM2-135M-Instruct at two latent widths, measure, and heal; hours, most of them healing."""
    carry_out_smollm2(prepare(FOLDER, SMOLLM2_RESULTS), console)


@app.command()
def compare(
    variant: Annotated[str, typer.Argument(help="A variant with results, such as egmla-kv4.")],
    reference: Annotated[str, typer.Argument(help="The variant that it is compared with, such as mla-kv32.")],
    text: Annotated[str, typer.Option(help=f"What both were trained on: {', '.join(TEXT)}.")] = "sotu",
    tokens: Annotated[
        int | None, typer.Option(help="After so many tokens of training, such as 0; at its end without this.")
    ] = None,
) -> None:
    """Print the validation loss of one variant less another's, seed by seed, with its 95 % interval."""
    try:
        difference = difference_of(load_results(RESULTS), text, variant, reference, tokens)
    except KeyError:
        raise typer.BadParameter(f"No loss was measured after {tokens} tokens.", param_hint="--tokens") from None
    if difference is None:
        raise typer.BadParameter(f"No seed has both {variant!r} and {reference!r} on {text!r} in {RESULTS}.")
    console.print(f"{variant} less {reference}: {difference} nats a token, {difference.seeds} seeds")
    if difference.seeds == 1:
        return
    low, high = difference.mean - difference.half_width, difference.mean + difference.half_width
    console.print(f"95 %: {low:.4f} to {high:.4f} (± {difference.half_width:.4f})")


@app.command()
def report() -> None:
    """Write the tables and figures of docs/study.md and docs/conversion.md from the result files there are."""
    write_report(RESULTS, Path("docs"), console)
    write_healing_report(SMOLLM2_RESULTS, Path("docs"), console)


if __name__ == "__main__":
    app()
