"""`egmla distill`: heal a converted model with its source as teacher."""

from pathlib import Path
from typing import Annotated

import typer

from ..console import console, need
from .train import summary


def distill(
    recipe: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            help="YAML recipe; copy configuration/recipes/distill-smollm2.yaml.",
        ),
    ],
) -> None:
    """
    Train a converted model to say what its source says: its logits and its hidden states, and, where the recipe gives
    it a weight, the text itself.

    The same command continues a run that was stopped, from its last checkpoint.

    - `egmla convert llama start --latent 128 --gate multiply --calibration text.txt`
    - `egmla distill my-distill.yaml`, whose `models` are `start` and `llama`
    """
    need("train", "accelerate", "datasets")
    from accelerate import PartialState

    from ..training.distill import distill as run

    report = run(recipe)
    if PartialState().is_main_process:  # of several processes one speaks
        console().print(summary(report))
