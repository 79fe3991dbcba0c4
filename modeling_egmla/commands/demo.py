"""`egmla demo`: everything once, in a minute or two."""

from pathlib import Path
from typing import Annotated

import typer

from ..console import console, is_installed
from .common import load_model
from .plan import DEFAULT_PRESET, draw, plan_notes, plan_table


ROWS = 40


def demo(
    folder: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the plot goes.")] = Path("out"),
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Folder or Hub id; by default the small model of this package.")
    ] = None,
) -> None:
    """
    Generate text, show the cache, plan memory, draw it, and score a small task, on a CPU in a minute or two.

    Steps whose packages are missing are skipped, and say which to install.
    """
    from ..configuration_egmla import EGMLAConfig
    from ..plan import plan
    from .eval import scores_table
    from .generate import generate_and_report

    out = console()
    out.rule("1. Text, and the cache that held it", align="left")
    language_model, tokenizer = load_model(model, device=None, dtype="auto")
    sampling = {"temperature": 0.8, "top_p": 0.95}
    generate_and_report(language_model, tokenizer, "The state of the Union is", 100, sampling, seed=0)

    out.rule("2. Memory of a larger model", align="left")
    config = EGMLAConfig.from_preset(DEFAULT_PRESET)
    result = plan(config)
    out.print(plan_table(DEFAULT_PRESET, result))
    out.print(plan_notes(result), style="dim")
    if is_installed("matplotlib"):
        path = folder / "plan.png"
        draw(DEFAULT_PRESET, lambda context: plan(config, context=context), result, path)
        out.print(f"Memory over context is drawn in {path}")
    else:
        out.print("Plot skipped; for it: pip install 'egmla[plot]'", markup=False)

    out.rule("3. A score", align="left")
    if is_installed("lm_eval", "datasets"):
        from ..evaluation import evaluate

        results = evaluate(language_model, tokenizer, ["sotu_continuation"], limit=ROWS)
        out.print(scores_table(results))
        out.print(f"Which of four continuations is the true one, {ROWS} rows; chance is 0.25. All 200: `egmla eval`")
    else:
        out.print("Score skipped; for it: pip install 'egmla[eval]'", markup=False)
