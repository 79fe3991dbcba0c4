"""`egmla verify`: check an exported folder."""

from pathlib import Path
from typing import Annotated

import typer


def verify(
    folder: Annotated[Path, typer.Argument(help="Folder that `egmla export` or `egmla pull` wrote.")],
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Also run the model with the folder's own code.")
    ] = False,
) -> None:
    """
    Check a folder: hashes of all files, completeness of its code, and a forward pass on fixed ids.

    Every file must be the one of the manifest, and none may be added. The forward pass must give finite logits, those
    of the day of the export. It runs with the installed package; the folder's own code is read, and run only with
    --trust-remote-code, in a process of its own. Exits with 1 and the list of what is wrong.
    """
    from ..conversion.verify import verify as verify_folder

    verified = verify_folder(folder, trust_remote_code)
    typer.echo(
        f"{folder}: {verified.files} files, {verified.bytes:,} bytes, all as exported; runs with {verified.code}."
    )
