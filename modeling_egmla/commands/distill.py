"""`egmla distill`: heal a converted model with its source as teacher."""

from pathlib import Path
from typing import Annotated

import typer

from ..console import console, need
from .train import summary


def distill(
    recipe: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="YAML recipe, as configuration/recipes/distill-*.yaml.")
    ],
) -> None:
    """
    Train a converted model to say what its source says: its logits, its hidden states, and the text, as weighted.

    The same command continues a run that was stopped, from its last checkpoint.

    - `egmla convert llama start --latent 128 --gate multiply --calibration text.txt`
    - `egmla distill distill-smollm2.yaml`
    """
    need("train", "accelerate", "datasets")
    from accelerate import PartialState

    from ..training.distill import distill as run

    report = run(recipe)
    if PartialState().is_main_process:  # of several processes one speaks
        console().print(summary(report))
