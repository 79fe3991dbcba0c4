"""`egmla push`: publish an exported folder on the Hub."""

from pathlib import Path
from typing import Annotated

import typer

from ..console import console, format_bytes, plain_table


def push(
    folder: Annotated[Path, typer.Argument(help="Folder that `egmla export` wrote.")],
    repo_id: Annotated[str, typer.Argument(help="owner/name on the Hub, or a name under your own.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, list files and sizes, and send nothing.")] = False,
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository public, or publish to one that is.")
    ] = False,
    branch: Annotated[
        str | None, typer.Option(help="Branch to commit to (made if there is none), or refs/pr/N.")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="Name for the commit.")] = None,
    pull_request: Annotated[
        bool, typer.Option("--pull-request", help="Propose the commit to a repository instead of making it.")
    ] = False,
    message: Annotated[str, typer.Option(help="Message of the commit.")] = "Upload EG-MLA model",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the folder's code for the check, even if it is not ours.")
    ] = False,
) -> None:
    """
    Publish an exported folder on the Hub, in one commit.

    Before a byte is sent, everything is checked: hashes, card, special ids, code, private paths, and a load in a fresh
    process without egmla. New repositories are private unless --public. If the connection breaks, run the command
    again: what was sent is not sent again. At the end the Hub's hashes are compared with the folder's.

    Log in once with `hf auth login`, or set HF_TOKEN; egmla neither shows nor keeps tokens.

    - `egmla push my-model me/my-model --dry-run`
    - `egmla push my-model me/my-model --tag v1`
    """
    from ..conversion.hub import check_arguments, validate
    from ..conversion.hub import push as push_folder

    check_arguments(repo_id, tag, pull_request)
    typer.echo(f"Checking {folder}, which takes as long as loading it twice ...", err=True)
    if dry_run:
        sizes = validate(folder, trust_remote_code)
        table = plain_table(f"{len(sizes)} files for {repo_id}; nothing was sent", "file", "size")
        for name, size in sorted(sizes.items()):
            table.add_row(name, format_bytes(size))
        table.add_section()
        table.add_row("total", format_bytes(sum(sizes.values())))
        console().print(table)
        return
    pushed = push_folder(
        folder,
        repo_id,
        branch=branch,
        tag=tag,
        pull_request=pull_request,
        public=public,
        message=message,
        trust_remote_code=trust_remote_code,
    )
    visibility = "private" if pushed.private else "public"
    state = "is complete" if pushed.changed else "already held this folder"
    typer.echo(f"{pushed.repo_id} ({visibility}) {state}: {pushed.url}")
