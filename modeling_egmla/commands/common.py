"""What the subcommands share: options, errors as one sentence, models and configurations by name."""

import errno
import os
import re
from collections.abc import Callable
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from typer.core import TyperGroup


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..configuration_egmla import EGMLAConfig


DEBUG = "EGMLA_DEBUG"

Device = Annotated[str | None, typer.Option(help="Where to run: cpu, cuda, ...; by default CUDA where there is any.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="Type of the weights; auto: what config.json says (in convert: as they are stored)."),
]
Gates = Annotated[
    Literal["projected", "precomputed"],
    typer.Option(help="Project gates from narrow rows, or look up those of all ids (EG-MLA-A): faster, and larger."),
]
Placed = Annotated[
    Literal["device", "host", "mmap"],
    typer.Option(help="Where gate tables are: on the device, in the host's memory, or left in their file."),
]
PoolRows = Annotated[
    int | None,
    typer.Option(min=1, help="Rows a layer that stay on the device when tables are elsewhere; by default 4096."),
]


def check_size(size: str) -> int | str:
    """`size` as the library takes it, a number for one of bytes; raises a usage error if it is none above 0."""
    size = size.strip()
    if not re.fullmatch(r"(?=.*[1-9])(\d+|\d+(\.\d+)?\s*[KMGT]B)", size, re.IGNORECASE):
        raise typer.BadParameter(f"{size!r} is no size: write bytes, or e.g. 500MB or 5GB.")
    return int(size) if size.isdecimal() else size


MaxShardSize = Annotated[str, typer.Option(help="Largest weight file.", callback=check_size)]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]


class Commands(TyperGroup):
    """Shows errors that a user can do something about as their message; `EGMLA_DEBUG=1` shows where they are from."""

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError, ImportError, SafetensorError, StrictDataclassError) as error:
            if os.environ.get(DEBUG) or getattr(error, "errno", None) == errno.EPIPE:
                raise
            is_list = hasattr(error, "problems")  # a VerificationError, a line for each thing that is wrong
            typer.secho(f"Error: {error if is_list else ' '.join(str(error).split())}", fg="red", err=True)
            raise typer.Exit(1) from error


def check_pool_rows(pool_rows: int | None, placement: str) -> None:
    """Raises a `ValueError` if tables that are on the device would get a pool."""
    if pool_rows is not None and placement == "device":
        raise ValueError("--pool-rows goes with --placement host or mmap: tables on the device need no pool.")


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
        ValueError: nothing can be loaded by this name, or its weights are not those of its configuration; the message
            says what to do.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..configuration import preset_path
    from ..configuration_egmla import EGMLAConfig
    from ..loading import misfits, not_floating

    _be_quiet()
    name = preset_path() if name is None else _find_weights(name)
    placed = {}
    if kv_gates is not None:
        load_config(name, trust_remote_code)  # other models than ours know no such argument
        placed = {"kv_gates": kv_gates}
    found = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, info = _load(AutoModelForCausalLM.from_pretrained, name, trust_remote_code, dtype=dtype, **found, **placed)
    is_ours = model.config.model_type == EGMLAConfig.model_type
    if problem := misfits(info, may_leave_out=not is_ours):
        raise ValueError(f"Of {name} {problem}: save or download the model anew.")
    if is_ours and Path(name).is_dir() and (names := not_floating(Path(name))):
        raise ValueError(f"{names[0]} of {name} holds whole numbers, so its fractions are gone: save the model anew.")
    tokenizer = _load(AutoTokenizer.from_pretrained, name, trust_remote_code)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "meta":
        raise ValueError("--device meta holds no values: name cpu, cuda or another device that computes.")
    try:
        return model.to(device).eval(), tokenizer
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"The model cannot be moved to --device {device}: {error}") from error


def _find_weights(name: str) -> str:
    """The folder of the preset `name`, or `name` where there is no such preset."""
    from ..configuration import find_model

    folder = find_model(name)
    if folder != name and not any(Path(folder).glob("*.safetensors")):
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
        if isinstance(error, JSONDecodeError):
            raise ValueError(f"A file of {name} is not JSON: {error}") from error
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
    except (AttributeError, KeyError, TypeError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise ValueError(f"{name} cannot be loaded ({type(error).__name__}): {error}") from error
