"""`egmla train`: pretrain or fine-tune by a recipe."""

import importlib.resources
from pathlib import Path
from typing import Annotated

import typer

from ..console import console, is_installed, need


def train(
    recipe: Annotated[str, typer.Argument(help="YAML recipe, or the name of one that comes with this package.")],
) -> None:
    """
    Train a model as a recipe says: text, tokenizer, model, schedule.

    The same command continues a run that was stopped, from its last checkpoint. `egmla plot` draws its loss, or the
    difference of two runs.

    Examples:

    - `egmla train my-recipe.yaml`
    - `egmla train egmla-base-kv64-emb256` (as `configuration/recipes/egmla-base-kv64-emb256.yaml`)
    """
    need("train", "accelerate", "datasets")
    path = find_recipe(recipe)
    from accelerate import PartialState
    from transformers.utils import logging

    from .. import training

    logging.disable_progress_bar()  # that of loading weights; training keeps its own

    report = training.train(path)
    if not PartialState().is_main_process:
        return  # of several processes one speaks
    console().print(summary(report))
    if not is_installed("matplotlib"):
        console().print("No loss.png was drawn, since matplotlib is not installed: pip install 'egmla[plot]'")


def summary(report: dict) -> str:
    """What a run's training.json says, in a sentence."""
    details = [f"{report['validation_bits_per_byte']:.4f} bits a byte"]
    others = {"before": "initial", "teacher": "teacher", "unigrams": "unigram"}
    losses = {said: report.get(f"{name}_validation_loss") for said, name in others.items()}
    details += [f"{said}: {loss:.4f}" for said, loss in losses.items() if loss is not None]
    passes = f" ({report['passes']:.2f} passes)" if "passes" in report else ""
    return (
        f"{report['steps']} steps, {report['tokens_seen']:,} tokens{passes}, {report['seconds'] / 60:.1f} min: "
        f"validation loss {report['validation_loss']:.4f} nats a token ({'; '.join(details)})."
    )


def find_recipe(name: str) -> Path:
    """
    The recipe of that path, or else of that name in the package.

    Raises:
        ValueError: there is neither.
    """
    if Path(name).is_file():
        return Path(name)
    if name.startswith("distill-"):
        raise ValueError(f"{name} is a recipe of `egmla distill`, which wants its path.")
    folder = Path(str(importlib.resources.files("modeling_egmla.configuration").joinpath("recipes")))
    recipes = {path.stem: path for path in sorted(folder.glob("*.yaml")) if "distill" not in path.stem}
    if name in recipes:
        return recipes[name]
    names = ", ".join(recipes)
    raise ValueError(f"There is no recipe {name}. Those that come with this package: {names}.")
