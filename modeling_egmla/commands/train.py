"""`egmla train`: pretrain or fine-tune by a recipe."""

from pathlib import Path
from typing import Annotated

import typer

from .common import console, need


def train(
    recipe: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="YAML recipe, as in configuration/recipes.")
    ],
) -> None:
    """
    Train a model as a recipe says: text, tokenizer, model, schedule.

    The same command continues a run that was stopped, from its last checkpoint.
    """
    need("train", "accelerate", "datasets")
    from .. import training

    report = training.train(recipe)
    console().print(
        f"{report['steps']} steps, {report['tokens_seen']:,} tokens ({report['passes']:.2f} passes), "
        f"{report['seconds'] / 60:.1f} min: validation loss {report['validation_loss']:.4f} nats a token, "
        f"{report['validation_bits_per_byte']:.4f} bits a byte (unigrams: {report['unigram_validation_loss']:.4f})."
    )
