"""The `egmla` command: one module a subcommand. What is slow to import is imported when a command runs."""

import typer

from .bench import bench
from .common import Commands
from .convert import convert
from .demo import demo
from .distill import distill
from .eval import evaluate
from .export import export
from .generate import generate
from .plan import plan
from .plot import plot
from .pull import pull
from .push import push
from .train import train
from .verify import verify


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def egmla() -> None:
    """
    EG-MLA language models: attention on a small cache of latents, gated by token id (arXiv:2509.16686).

    Start with `egmla demo`, or `egmla generate "The state of the Union is"`.

    An error is one sentence; with `EGMLA_DEBUG=1` in the environment, it comes with where it is from.
    """


app.command()(generate)
app.command()(plan)
app.command()(demo)
app.command()(bench)
app.command("eval")(evaluate)
app.command()(train)
app.command()(plot)
app.command()(convert)
app.command()(distill)
app.command()(export)
app.command()(verify)
app.command()(push)
app.command()(pull)


def main() -> None:
    app(prog_name="egmla")
