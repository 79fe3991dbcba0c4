"""`egmla pull`: fetch a model from the Hub and verify it."""

from pathlib import Path
from typing import Annotated

import typer


def pull(
    repo_id: Annotated[str, typer.Argument(help="owner/name on the Hub.")],
    folder: Annotated[Path | None, typer.Argument(help="Where to write; by default the repository's name.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit; by default main.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder that egmla wrote before.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Also run the model with the repository's code.")
    ] = False,
) -> None:
    """
    Fetch a model that was published with `egmla push`, and verify it as `egmla verify` does.

    The folder appears only when every file is there and right. If the connection breaks, run the command again: it
    continues where it stopped. No code of the repository is run, unless --trust-remote-code asks for it.

    - `egmla pull me/my-model --revision v1`
    """
    from ..conversion.hub import pull as pull_folder

    folder = folder or Path(repo_id.rsplit("/", 1)[-1])
    commit, verified = pull_folder(
        repo_id, folder, revision=revision, trust_remote_code=trust_remote_code, overwrite=overwrite
    )
    typer.echo(
        f"{folder}: {repo_id} at {commit[:12]}, {verified.files} files, {verified.bytes:,} bytes, as published; runs "
        f"with {verified.code}."
    )
