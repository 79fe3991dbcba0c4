"""What the subcommands share: errors as one sentence, models and configurations by name, sizes in words."""

import errno
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..configuration_egmla import EGMLAConfig


DEBUG = "EGMLA_DEBUG"

Device = Annotated[str | None, typer.Option(help="Where to run: cpu, cuda, ...; by default CUDA where there is any.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="Type of the weights; auto is as they are stored."),
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]


class Commands(TyperGroup):
    """Shows errors that a user can do something about as their message; `EGMLA_DEBUG=1` shows where they are from."""

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError, ImportError) as error:
            if os.environ.get(DEBUG) or getattr(error, "errno", None) == errno.EPIPE:
                raise
            is_list = hasattr(error, "problems")  # a VerificationError, a line for each thing that is wrong
            typer.secho(f"Error: {error if is_list else ' '.join(str(error).split())}", fg="red", err=True)
            raise typer.Exit(1) from error


def console() -> Console:
    """A console for tables on standard output, made when used: it then knows the terminal, or the file behind it."""
    return Console(highlight=False)


def is_installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


def need(extra: str, *modules: str) -> None:
    """Raises an `ImportError` that says how to install `modules` where they are missing."""
    if not is_installed(*modules):
        raise ImportError(
            f"This needs {' and '.join(modules)}, which the extra {extra!r} installs: pip install 'egmla[{extra}]'"
        )


def load_config(name: str, trust_remote_code: bool = False) -> "EGMLAConfig":
    """
    Loads a configuration by the name of a preset, from a folder, or from the Hub.

    Raises:
        ValueError: the model is none of ours.
    """
    from transformers import AutoConfig

    from ..configuration_egmla import EGMLAConfig

    _be_quiet()
    if not Path(name).is_dir():
        try:
            return EGMLAConfig.from_preset(name)
        except ValueError:
            pass  # not a preset
    config = _load(AutoConfig.from_pretrained, name, trust_remote_code)
    if config.model_type != EGMLAConfig.model_type:
        raise ValueError(f"{name} is a model of type {config.model_type}, but this command is for EG-MLA models.")
    return config


def load_model(
    name: str | None,
    device: str | None,
    dtype: str,
    trust_remote_code: bool = False,
    kv_gates: dict | None = None,
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """
    Loads a model and its tokenizer from a folder or from the Hub; by default the one that comes with this package.

    Args:
        kv_gates: where its gate tables go, the arguments of `place_kv_gates`; they are never on the device then.

    Raises:
        ValueError: nothing can be loaded by this name; the message says what to do.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..configuration import preset_path

    _be_quiet()
    if name is None:
        name = preset_path()
    elif not Path(name).is_dir():
        name = _preset_with_weights(name)
    placed = {}
    if kv_gates is not None:
        load_config(name, trust_remote_code)  # other models than ours know no such argument
        placed = {"kv_gates": kv_gates}
    model = _load(AutoModelForCausalLM.from_pretrained, name, trust_remote_code, dtype=dtype, **placed)
    tokenizer = _load(AutoTokenizer.from_pretrained, name, trust_remote_code)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "meta":
        raise ValueError("--device meta holds no values: name cpu, cuda or another device that computes.")
    try:
        return model.to(device).eval(), tokenizer
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"The model cannot be moved to --device {device}: {error}") from error


def _preset_with_weights(name: str) -> str:
    """The folder of the preset `name`, or `name` where there is no such preset."""
    from ..configuration import preset_path

    try:
        folder = preset_path(name)
    except ValueError:
        return name
    if not any(Path(folder).glob("*.safetensors")):
        raise ValueError(
            f"{name} is a preset without weights: `egmla plan {name}` plans it, `egmla train` trains one."
        )
    return folder


def _be_quiet() -> None:
    """Leaves the terminal to what the command itself has to say."""
    import huggingface_hub.utils
    import transformers.utils

    for logging in (huggingface_hub.utils.logging, transformers.utils.logging):
        logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _load(from_pretrained: Callable, name: str, trust_remote_code: bool, **kwargs):
    """Calls `from_pretrained`, with the errors that beginners meet in one sentence each."""
    try:
        return from_pretrained(name, trust_remote_code=trust_remote_code, **kwargs)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{name} comes with code of its own, which runs only with --trust-remote-code: read it first."
        ) from error
    except OSError as error:
        if Path(name).is_dir():
            raise
        raise ValueError(
            f"There is no model {name}: it is no folder here, no preset with weights (`egmla plan --list` shows "
            "presets), and could not be loaded from the Hub, which needs network and, for private models, `hf auth "
            "login`."
        ) from error


def format_bytes(size: float) -> str:
    """`1234567` as `1.18 MiB`."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    power = min(max(int(size).bit_length() - 1, 0) // 10, len(units) - 1)
    size /= 1024**power
    return f"{size:,.0f} {units[power]}" if power == 0 or size >= 100 else f"{size:.3g} {units[power]}"


def plain_table(title: str, *columns: str) -> Table:
    """A table with a rule under its head; the first column holds names, the others numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table
