"""The `egmla` command."""

import typer


app = typer.Typer(help="EG-MLA models: generate, plan, demonstrate.", no_args_is_help=True)


@app.callback()
def _commands() -> None:
    pass


def main() -> None:
    app()
