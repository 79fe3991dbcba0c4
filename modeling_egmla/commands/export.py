"""`egmla export`: write a model as a folder that is complete."""

from pathlib import Path
from typing import Annotated

import typer

from .common import Dtype, MaxShardSize


def export(
    source: Annotated[Path, typer.Argument(help="Folder of a saved, trained or converted model; or egmla-sotu.")],
    folder: Annotated[Path, typer.Argument(help="Where to write; its name becomes the title of a new card.")],
    license: Annotated[
        str | None, typer.Option(help="Licence of the weights for a new card, e.g. apache-2.0; the Hub needs one.")
    ] = None,
    evaluation: Annotated[
        Path | None, typer.Option(help="Results file of lm-evaluation-harness, for the card.", exists=True)
    ] = None,
    new_card: Annotated[bool, typer.Option("--new-card", help="Write the card anew, even if there is one.")] = False,
    dtype: Dtype = "auto",
    max_shard_size: MaxShardSize = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder that egmla wrote before.")] = False,
) -> None:
    """
    Write a complete folder: weights, config, code, tokenizer, generation config, card, and a manifest of hashes.

    The folder loads with `trust_remote_code=True` where egmla is not installed, and with `import modeling_egmla` where
    it is. It appears under its name only when it is complete; an interrupted export leaves what was there before.

    The card is made from files beside the weights: config.json, training.json and recipe.yaml (of `egmla train`),
    evaluation.json, and about.yaml for what no file can tell (license, language, summary, training_data, limits). To
    change a card by hand, edit README.md and export the folder onto itself with --overwrite, so that the manifest
    knows.

    - `egmla export out/my-run my-model --license apache-2.0`
    - `egmla verify my-model`
    - `egmla push my-model me/my-model`
    """
    from ..conversion.export import export as export_folder
    from ..conversion.verify import read_manifest

    about = {"license": license} if license else {}
    export_folder(
        source,
        folder,
        dtype=dtype,
        max_shard_size=max_shard_size,
        evaluation=evaluation,
        new_card=new_card,
        overwrite=overwrite,
        **about,
    )
    listed = read_manifest(folder)["files"]
    typer.echo(f"{folder}: {len(listed)} files, {sum(entry['bytes'] for entry in listed.values()):,} bytes.")
    if "tokenizer_config.json" not in listed:
        typer.echo("The source has no tokenizer, so the folder has none.")
