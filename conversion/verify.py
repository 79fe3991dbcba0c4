"""
What an exported folder promises, and the checks of it: a manifest of hashes, code that is complete, special ids that
agree, nothing private, and a forward pass.

No check runs code from the folder unless `trust_remote_code` asks for it: models are built from the installed
package's classes.
"""

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS, filter_repo_objects
from safetensors import SafetensorError

from ..configuration_egmla import SPECIAL_IDS
from ..loading import misfits, not_floating
from . import fresh_load
from .vocabulary import ids_without_token, load_tokenizer


MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
# Written by Git and the Hub beside an exported folder's files, and read by no loader.
NOT_OURS = [*DEFAULT_IGNORE_PATTERNS, ".gitattributes", MANIFEST]
PLAIN_NAME = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)
# What a machine that has transformers has as well.
IMPORTABLE = sys.stdlib_module_names | {"huggingface_hub", "numpy", "packaging", "torch", "transformers"}
OWN_PACKAGES = {"modeling_egmla", "configuration", "conversion", "model_cards"}
# A name with a slash in one of these is a kernel on the Hub.
KERNEL_FIELDS = [f"{prefix}{kind}_implementation" for prefix in ("", "_") for kind in ("attn", "experts")]
TEXTS = (".json", ".yaml", ".yml", ".md", ".txt", ".jinja", ".py")
HUB_TOKEN = re.compile(rb"\bhf_[A-Za-z0-9]{30,}")
NUM_FORWARD_IDS = 16
# Relative error between the forward pass at export and at verification, ||a - b|| / ||b||, by dtype.
TOLERANCE = {"float32": 1e-4, "float64": 1e-4}
HALF_TOLERANCE = 2e-2


class VerificationError(ValueError):
    """A folder is not what it promises to be; the message lists everything that is wrong."""

    def __init__(self, folder: Path, problems: list[str]):
        self.problems = problems
        super().__init__("\n".join([f"{folder} cannot be used:", *(f"  - {problem}" for problem in problems)]))


@dataclass(frozen=True)
class Verified:
    """What was checked: number of files, their size in bytes, and the code that ran the forward pass."""

    files: int
    bytes: int
    code: str


def verify(folder: str | os.PathLike, trust_remote_code: bool = False) -> Verified:
    """
    Checks an exported folder: every file against the manifest, the completeness of its code, and a forward pass on
    fixed ids, which must give finite values, those of the day of the export.

    Args:
        folder: what [`export`] wrote, here or elsewhere.
        trust_remote_code: also run the forward pass with the folder's own code, in a process of its own.

    Raises:
        VerificationError: something is wrong.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if problems := check_files(folder, manifest) or check_code(folder):
        raise VerificationError(folder, problems)
    problems = check_forward(folder, manifest)
    if trust_remote_code and not problems:
        problems = check_fresh_process(folder, manifest)
    if problems:
        raise VerificationError(folder, problems)
    size = sum(entry["bytes"] for entry in manifest["files"].values())
    return Verified(len(manifest["files"]), size, "its own code" if trust_remote_code else "the installed code")


def read_json(path: Path) -> dict:
    """
    Content of a JSON file that holds an object.

    Raises:
        VerificationError: it is missing, not JSON or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise VerificationError(path.parent, [f"{path.name} is missing."]) from None
    except ValueError as error:
        raise VerificationError(path.parent, [f"{path.name} is not JSON: {error}."]) from error
    if not isinstance(content, dict):
        raise VerificationError(path.parent, [f"{path.name} does not hold a JSON object."])
    return content


def list_files(folder: Path) -> list[str]:
    """Paths of a folder's files, relative to it, without what Git and the Hub keep there."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(filter_repo_objects(paths, ignore_patterns=NOT_OURS))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, model) -> None:
    """Writes `folder/manifest.json`: size and hash of every file, and a sample of `model`'s forward pass."""
    from ..version import __version__

    vocab_size = model.config.vocab_size
    input_ids = [(7919 * index + 1) % vocab_size for index in range(NUM_FORWARD_IDS)]
    manifest = {
        "format": MANIFEST_FORMAT,
        "egmla_version": __version__,
        "files": {
            name: {"sha256": _sha256(folder / name), "bytes": (folder / name).stat().st_size}
            for name in list_files(folder)
        },
        "forward": {
            "dtype": str(model.dtype).removeprefix("torch."),
            "input_ids": input_ids,
            "values": fresh_load.forward_sample(model, input_ids),
        },
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict:
    """
    Content of `folder/manifest.json`.

    Raises:
        VerificationError: there is no folder or no manifest, or it is none of ours.
    """
    if not folder.is_dir():
        raise VerificationError(folder, ["there is no such folder."])
    if not (folder / MANIFEST).is_file():
        raise VerificationError(folder, [f"it has no {MANIFEST}: write it with `egmla export`."])
    manifest = read_json(folder / MANIFEST)
    try:
        known = manifest["format"] == MANIFEST_FORMAT
        names = list(manifest["files"])
        entries = manifest["files"].values()
        complete = all(isinstance(entry["sha256"], str) and isinstance(entry["bytes"], int) for entry in entries)
        forward = manifest["forward"]
        complete &= all(isinstance(forward[key], list) for key in ("input_ids", "values"))
    except (KeyError, TypeError, AttributeError):
        known = complete = False
        names = []
    if not known or not complete:
        raise VerificationError(folder, [f"{MANIFEST} is not one that this version of egmla writes."])
    if odd := [name for name in names if not PLAIN_NAME.fullmatch(name) or ".." in PurePosixPath(name).parts]:
        raise VerificationError(folder, [f"{MANIFEST} lists {odd[0]!r}, which is not a plain file name."])
    return manifest


def check_files(folder: Path, manifest: dict) -> list[str]:
    """Files that are missing, changed or not in the manifest."""
    listed, present = manifest["files"], set(list_files(folder))
    problems = [f"{name} is missing." for name in listed if name not in present]
    problems += [
        f"{name} is not in {MANIFEST}: remove it, or export again." for name in sorted(present - listed.keys())
    ]
    for name, entry in listed.items():
        if name not in present:
            continue
        size = (folder / name).stat().st_size
        if size != entry["bytes"]:
            problems.append(f"{name} has {size:,} bytes instead of {entry['bytes']:,}.")
        elif _sha256(folder / name) != entry["sha256"]:
            problems.append(f"{name} has changed: its hash is not the one in {MANIFEST}.")
    return problems


def find_model_class(folder: Path):
    """
    The installed class that a folder's config.json names.

    Raises:
        VerificationError: it names none of ours.
    """
    import modeling_egmla

    config = read_json(folder / "config.json")
    name = (config.get("architectures") or [None])[0]
    model_class = getattr(modeling_egmla, name, None) if name in modeling_egmla.__all__ else None
    if config.get("model_type") != "egmla" or not hasattr(model_class, "from_pretrained"):
        raise VerificationError(
            folder, [f"config.json describes {name} of type {config.get('model_type')!r}, not an EG-MLA model."]
        )
    return model_class


def load_model(folder: Path, dtype: str = "auto"):
    """
    A folder's model, of the installed class, from safetensors only.

    Raises:
        VerificationError: it is none of ours, its config cannot work, or the weights do not fit it.
    """
    model_class = find_model_class(folder)
    if not any(folder.glob("*.safetensors")):
        raise VerificationError(folder, ["it has no weights in *.safetensors. For others, see `egmla convert`."])
    try:
        model, info = model_class.from_pretrained(
            folder,
            use_safetensors=True,
            dtype=dtype,
            attn_implementation="sdpa",  # and not what the config may name
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (ValueError, OSError, RuntimeError, KeyError, SafetensorError, StrictDataclassError) as error:
        raise VerificationError(folder, [f"the model does not load: {error}"]) from error
    if problem := misfits(info):
        raise VerificationError(folder, [f"the weights do not fit config.json: {problem}."])
    if names := not_floating(folder):
        raise VerificationError(folder, [f"{names[0]} holds whole numbers, so its fractions are gone."])
    return model


def check_code(folder: Path) -> list[str]:
    """
    Whether the folder's code is complete: each module that `auto_map` names is there, with every module that it
    imports, and imports nothing that a machine without this package lacks. Nothing is run.
    """
    config = read_json(folder / "config.json")
    if problems := check_kernels(config):
        return problems
    auto_map = config.get("auto_map") or {}
    needed = {"AutoConfig", find_model_class(folder)._auto_class} - auto_map.keys()
    if needed:
        return [f"`auto_map` in config.json lacks {', '.join(sorted(needed))}: export again."]

    problems, modules = [], set()
    for auto_class, reference in auto_map.items():
        if not isinstance(reference, str) or not re.fullmatch(r"\w+\.\w+", reference):
            problems.append(f"`auto_map[{auto_class!r}]` is {reference!r}, which does not name code in this folder.")
        else:
            modules.add(reference.split(".")[0])
    to_read = sorted(modules)
    while to_read:
        module = to_read.pop()
        path = folder / f"{module}.py"
        if not path.is_file():
            problems.append(f"{path.name} is missing, though the code imports it or `auto_map` names it.")
            continue
        found, wrong = _imports(path)
        problems += wrong
        to_read += sorted(found - modules)
        modules |= found
    unused = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")} - {f"{m}.py" for m in modules}
    return problems + [f"{name} is code that nothing here uses: remove it." for name in sorted(unused)]


def check_kernels(config: dict) -> list[str]:
    """Fields of a config.json that name code on the Hub, for which the library asks no `trust_remote_code`."""
    return [
        f"`{field}` in config.json is {config[field]}: the library would fetch that code and run it unasked."
        for field in KERNEL_FIELDS
        if "/" in str(config.get(field))
    ]


def _imports(path: Path) -> tuple[set[str], list[str]]:
    """Sibling modules that a module imports, and what is wrong with its imports."""
    from transformers.dynamic_module_utils import get_imports

    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        return set(), [f"{path.name} is not Python: {error}."]
    siblings, problems = set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            if node.level == 1 and node.module and "." not in node.module:
                siblings.add(node.module)
            else:
                problems.append(
                    f"{path.name}, line {node.lineno}: only `from .module import name` is copied along with a model."
                )
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
            if own := {name.split(".")[0] for name in names} & OWN_PACKAGES:
                problems.append(f"{path.name}, line {node.lineno}: imports {own.pop()}, which is not copied along.")
    # What the loader insists on: imports that neither `try` nor a check like `is_triton_available()` guards.
    unguarded = sorted(set(get_imports(path)) - IMPORTABLE - OWN_PACKAGES)
    problems += [
        f"{path.name} imports {name} unguarded, so it loads only where that is installed." for name in unguarded
    ]
    return siblings, problems


def check_special_ids(folder: Path) -> list[str]:
    """Whether config, generation config and tokenizer agree on special ids and on the size of the vocabulary."""
    from transformers import GenerationConfig

    from ..configuration_egmla import EGMLAConfig

    try:
        config = EGMLAConfig.from_pretrained(folder)  # refuses special ids outside the vocabulary
        tokenizer = load_tokenizer(folder)
    except (ValueError, OSError, StrictDataclassError) as error:
        return [str(error)]
    holders = {"config.json": config}
    if (folder / "generation_config.json").is_file():
        holders["generation_config.json"] = GenerationConfig.from_pretrained(folder)

    problems = []
    for file, holder in holders.items():
        for field in SPECIAL_IDS:
            ids = _as_list(getattr(holder, field))
            problems += [
                f"`{field}` in {file} is {token_id}, outside the vocabulary of {config.vocab_size}."
                for token_id in ids
                if not 0 <= token_id < config.vocab_size
            ]
            token_id = getattr(tokenizer, field, None)
            if token_id is not None and ids and token_id not in ids:
                problems.append(f"`{field}` in {file} is {ids}, but the tokenizer's is {token_id}: make them equal.")
    if tokenizer is None:
        return problems

    generation = holders.get("generation_config.json")
    if generation is not None and tokenizer.eos_token_id is not None and generation.eos_token_id is None:
        problems.append("generation_config.json has no `eos_token_id`, so generation would never stop.")
    ids = set(tokenizer.get_vocab().values())
    if ids and max(ids) >= config.vocab_size:
        problems.append(
            f"The tokenizer has id {max(ids)}, but the model only {config.vocab_size} rows: use the model's own "
            "tokenizer, or `model.resize_token_embeddings(len(tokenizer))`."
        )
    suppressed = getattr(generation, "suppress_tokens", None) or ()
    ends = _as_list(getattr(generation, "eos_token_id", None))
    if never := [token_id for token_id in ends if token_id in suppressed]:
        problems.append(
            f"`suppress_tokens` in generation_config.json has {never[0]}, an `eos_token_id`: no text would end. Take "
            "it out."
        )
    unused = ids_without_token(tokenizer, config.vocab_size)
    if generation is not None and not set(unused) <= set(generation.suppress_tokens or []):
        problems.append(
            f"The vocabulary has {len(unused)} ids without a token, which `suppress_tokens` in generation_config.json "
            "does not keep from being generated: export again."
        )
    return problems


def _as_list(value: int | list[int] | None) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]


def check_privacy(folder: Path) -> list[str]:
    """Fields of JSON files that hold absolute paths, texts that hold a path of this machine, and Hub tokens in any."""
    problems = []
    for name in list_files(folder):
        path = folder / name
        if path.suffix in TEXTS and HUB_TOKEN.search(path.read_bytes()):
            problems.append(f"{name} holds a token of the Hub: remove it, and revoke it on the Hub.")
        if path.suffix == ".json" and path.stem not in ("tokenizer", "vocab"):  # those hold tokens like "/"
            for field, value in _strings(read_json(path)):
                if _is_private_path(value):
                    problems.append(f"`{field}` in {name} is the path {value!r}: remove it.")
        elif path.suffix in TEXTS and path.suffix != ".json":
            text = path.read_text(encoding="utf-8", errors="replace")
            places = {str(Path.home()), str(Path.cwd()), tempfile.gettempdir()} - {"/", "/tmp"}
            found = [place for place in sorted(places) if re.search(re.escape(place) + r"[/\\]", text)]
            problems += [f"{name} mentions {place}, a path of this machine: remove it." for place in found]
    return problems


def _is_private_path(value: str) -> bool:
    return re.search(r"(?<![^\s'\"=])(~|/[\w.+-]+|[A-Za-z]:)[/\\][\w.+-]", value) is not None


def _strings(content, field: str = "") -> Iterator[tuple[str, str]]:
    """All strings in nested JSON, each with the name of its field."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _strings(value, f"{field}.{key}" if field else key)
    elif isinstance(content, list):
        for value in content:
            yield from _strings(value, field)
    elif isinstance(content, str):
        yield field, content


def check_card(folder: Path) -> list[str]:
    """Whether README.md has the metadata that the Hub needs; the Hub itself checks more when it is pushed."""
    from huggingface_hub import ModelCard
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    path = folder / "README.md"
    if not path.is_file():
        return ["README.md, the model card, is missing."]
    try:
        card = ModelCard.load(path)
        data = card.data
    except Exception as error:  # YAML errors of all kinds, and ValueError for a model-index that cannot be read
        return [f"The metadata of README.md cannot be read: {error}"]
    problems = []
    if not isinstance(data.license, str):
        problems.append("README.md gives no `license`: export with `--license apache-2.0`, say, and `--new-card`.")
    elif data.license == "other" and not data.license_name:
        problems.append("README.md says `license: other`, which needs a `license_name`.")
    if data.library_name != "transformers":
        problems.append(f"`library_name` in README.md must be `transformers`, but is {data.library_name!r}.")
    for field in ("base_model", "datasets"):
        values = data.get(field) or []
        for value in [values] if isinstance(values, str) else values:
            try:
                validate_repo_id(value)
            except HFValidationError:
                problems.append(f"`{field}` in README.md is {value!r}, which cannot be the id of a repository.")
    if "[More Information Needed]" in card.text:
        problems.append("README.md still has fields to fill in ([More Information Needed]).")
    return problems


def check_forward(folder: Path, manifest: dict) -> list[str]:
    """Loads the model with the installed classes and compares its forward pass with the manifest's."""
    try:
        model = load_model(folder)
        values = fresh_load.forward_sample(model, manifest["forward"]["input_ids"])
    except VerificationError as error:
        return error.problems
    except (ValueError, IndexError, TypeError, RuntimeError) as error:
        return [f"The model does not run: {error}"]
    return _compare(values, manifest, f"with {type(model).__name__} of the installed package")


def check_fresh_process(folder: Path, manifest: dict) -> list[str]:
    """
    Loads the model with the folder's own code in a fresh process, without network and with this package blocked, and
    compares its forward pass with the manifest's.
    """
    with tempfile.TemporaryDirectory() as scratch:
        # Without the token, so that the code that runs cannot take it.
        environment = {key: value for key, value in os.environ.items() if "TOKEN" not in key or "TOKENIZERS" in key}
        environment |= {"HF_HOME": scratch, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        result = subprocess.run(
            [sys.executable, "-P", fresh_load.__file__, str(folder.resolve()), find_model_class(folder)._auto_class],
            input=json.dumps(manifest["forward"]["input_ids"]),
            capture_output=True,
            text=True,
            env=environment,
            cwd=scratch,
        )
    if result.returncode:
        reason = (result.stderr.strip() or f"exit code {result.returncode}").splitlines()[-1]
        return [f"The folder does not load where the package is not installed: {reason}"]
    return _compare(json.loads(result.stdout.splitlines()[-1]), manifest, "with the folder's own code")


def _compare(values: list[float], manifest: dict, how: str) -> list[str]:
    expected = manifest["forward"]["values"]
    if len(values) != len(expected):
        return [f"The forward pass {how} gives another number of values than at export."]
    difference = sum((a - b) ** 2 for a, b in zip(values, expected)) ** 0.5
    norm = sum(b * b for b in expected) ** 0.5
    tolerance = TOLERANCE.get(manifest["forward"].get("dtype"), HALF_TOLERANCE)
    if not difference <= tolerance * norm:
        return [
            f"The forward pass {how} is not the one of the export: it differs by {difference / norm:.1e} of its size, "
            f"where {tolerance:.0e} is allowed. The versions of egmla may compute differently."
        ]
    return []
