"""Recipes: a YAML file that says model, tokenizer, text and schedule, read so that a wrong key is named."""

import importlib.util
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.dataclasses import as_validated_field, strict
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from transformers import GenerationConfig, SchedulerType, TrainingArguments

from ..configuration_egmla import SPECIAL_IDS, EGMLAConfig


# Arguments of Trainer that a recipe sets by another key's name; those of the same name are in `TrainingRecipe` itself.
RECIPE_KEYS = {
    "per_device_train_batch_size": "sequences_per_device",
    "auto_find_batch_size": "sequences_per_device",
    "gradient_accumulation_steps": "batch_tokens",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "lr_scheduler_type": "schedule",
    "lr_scheduler_kwargs": "schedule_arguments",
    "warmup_ratio": "warmup_steps",
}


REFUSED_ARGUMENTS = {
    "include_num_input_tokens_seen": "all tokens are counted anyway",
    "dataloader_drop_last": "it would drop validation text too, and the loss would be of less than it says",
    "save_only_model": "a run could then not be continued to the same weights",
    "prediction_loss_only": "the validation loss is a mean over tokens, which needs the loss of each",
    "batch_eval_metrics": "the validation loss is a mean over all tokens alike",
    "eval_do_concat_batches": "the validation loss is a mean over all tokens alike",
    "bf16_full_eval": "the teacher of a distillation would be rounded once and for all by its first evaluation",
    "fp16_full_eval": "the teacher of a distillation would be rounded once and for all by its first evaluation",
    "resume_from_checkpoint": "a run goes on from the last checkpoint of its own folder anyway",
    "enable_jit_checkpoint": "it gives a checkpoint its name before it is whole",
    "do_train": "a recipe trains, and nothing reads it",
    "do_predict": "nothing reads it",
    "push_to_hub": "the Hub would get checkpoints and not the model that the run ends with; `egmla export` and `egmla "
    "push` publish that",
    "label_names": "what is predicted is the text itself",
    "hub_token": "a recipe is copied beside the model and published with it; log in with `hf auth login` or HF_TOKEN",
}


class RecipeError(ValueError):
    """A recipe cannot be run; the message names the key."""


@as_validated_field
def positive(value):
    """A number above zero, or None where the field allows it."""
    if value is not None and value <= 0:
        raise ValueError(f"must be above 0, but is {value}")


@as_validated_field
def share(value):
    """A number between zero and one."""
    if not 0 < value < 1:
        raise ValueError(f"must lie between 0 and 1, but is {value}")


def check_stream_length(recipe) -> None:
    """Raises a `ValueError` if a recipe counts passes over a stream."""
    if recipe.data.streaming and recipe.training.epochs is not None:
        raise ValueError("`training.epochs`: a stream has no known length, so give `training.steps`.")


@strict
@dataclass
class ModelRecipe:
    """Which model: a `preset` and/or `config` fields for new weights, or the `path` of trained ones (or a Hub id)."""

    preset: str | None = None
    config: dict[str, Any] | None = None
    path: str | None = None

    def validate_choice(self):
        if (self.path is None) == (self.preset is None and self.config is None):
            raise ValueError("`model` needs either `path`, or `preset` or `config` or both.")
        if unknown := set(self.config or {}) - {f.name for f in fields(EGMLAConfig)}:
            raise ValueError(f"`model.config.{min(unknown)}` is no field of EGMLAConfig.")


@strict
@dataclass
class TokenizerRecipe:
    """A tokenizer's `path` (or Hub id), or the `vocab_size` of one to train on the training documents."""

    path: str | None = None
    vocab_size: int | None = positive(default=None)

    def validate_choice(self):
        if (self.path is None) == (self.vocab_size is None):
            raise ValueError("`tokenizer` needs either `path` or `vocab_size`.")


@strict
@dataclass
class DataRecipe:
    """
    Documents from `files` (globs of .txt, one document each, .jsonl or .parquet) or of a Hub `dataset`.

    With `streaming` they are read while training, in an order that `training.seed` draws within a window of
    `shuffle_buffer` documents, and nothing is stored. `validation_documents` limits how many of the held-out ones (a
    `validation_share` of all) are used; a stream needs the limit, since it has no end to wait for.
    """

    files: list[str] | None = None
    dataset: str | None = None
    dataset_config: str | None = None
    dataset_split: str = "train"
    text_column: str = "text"
    streaming: bool = False
    shuffle_buffer: int = positive(default=10_000)
    validation_share: float = share(default=0.05)
    validation_documents: int | None = positive(default=None)
    sequence_length: int = positive(default=1024)

    def validate_choice(self):
        if (self.files is None) == (self.dataset is None):
            raise ValueError("`data` needs either `files` or `dataset`.")
        if self.streaming and self.validation_documents is None:
            raise ValueError("`data.streaming` needs `data.validation_documents`: how many to hold out.")
        if self.sequence_length < 2:
            raise ValueError("`data.sequence_length` must be at least 2: a single token predicts none.")


@strict
@dataclass
class TrainingRecipe:
    """
    How to train. `arguments` goes to `TrainingArguments` as it is (bf16, gradient_checkpointing, ...), but may not say
    what has a key here.
    """

    output_dir: str
    learning_rate: float = positive()
    batch_tokens: int = positive()
    sequences_per_device: int = positive(default=1)
    steps: int | None = positive(default=None)
    epochs: float | None = positive(default=None)
    schedule: str = "cosine"
    schedule_arguments: dict[str, Any] = field(default_factory=dict)
    warmup_steps: int = 0
    weight_decay: float = 0.1
    adam_beta2: float = share(default=0.95)
    max_grad_norm: float = positive(default=1.0)
    seed: int = 0
    eval_steps: int = positive(default=500)
    save_steps: int = positive(default=500)
    logging_steps: int = positive(default=10)
    save_dtype: str = "float32"
    arguments: dict[str, Any] = field(default_factory=dict)

    def validate_choice(self):
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("`training` needs either `steps` or `epochs`.")
        if self.save_dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(
                f"`training.save_dtype` must be float32, bfloat16 or float16, but is {self.save_dtype!r}."
            )
        schedules = [schedule.value for schedule in SchedulerType]
        if self.schedule not in schedules:
            raise ValueError(f"`training.schedule` must be one of {schedules}, but is {self.schedule!r}.")
        if unknown := set(self.arguments) - {f.name for f in fields(TrainingArguments)}:
            raise ValueError(f"`training.arguments.{min(unknown)}` is no field of TrainingArguments.")
        if refused := sorted(set(self.arguments) & set(REFUSED_ARGUMENTS)):
            raise ValueError(f"`training.arguments.{refused[0]}`: {REFUSED_ARGUMENTS[refused[0]]}. Leave it out.")
        for field_ in fields(TrainingArguments):
            if isinstance(value := self.arguments.get(field_.name), str) and field_.type in (float, float | None):
                try:
                    self.arguments[field_.name] = float(value)  # YAML reads 1e-8, without a dot, as a string.
                except ValueError:
                    raise ValueError(
                        f"`training.arguments.{field_.name}` must be a number, but is {value!r}."
                    ) from None
        own = {f.name: f.name for f in fields(self)} | RECIPE_KEYS
        if taken := sorted(set(self.arguments) & set(own)):
            raise ValueError(f"`training.arguments.{taken[0]}`: give `training.{own[taken[0]]}` in its place.")


@strict
@dataclass
class GateTablesRecipe:
    """
    The parameter group of the gate tables. `learning_rate` None means that of the rest. With `parallel`, each of W
    processes holds and trains `kv_gate_dim` / W columns of every table; else it holds all (docs/parallel.md).

    Weight decay is off by default: AdamW shrinks every row at every step, but only rows whose token occurs get a
    gradient against it, so the gates of rare tokens would fade, and with them those tokens' keys and values.
    """

    learning_rate: float | None = positive(default=None)
    weight_decay: float = 0.0
    parallel: bool = False


@strict
@dataclass
class Recipe:
    """
    A whole recipe. `lora` holds fields of PEFT's `LoraConfig`: adapters are then trained and the rest stays as it is.
    `generation` holds what the saved model's generation_config says beside the special ids.
    """

    model: ModelRecipe
    tokenizer: TokenizerRecipe
    data: DataRecipe
    training: TrainingRecipe
    gate_tables: GateTablesRecipe = field(default_factory=GateTablesRecipe)
    lora: dict[str, Any] | None = None
    generation: dict[str, Any] = field(default_factory=dict)

    def validate_lora(self):
        if self.lora is None:
            return
        if self.model.path is None:
            raise ValueError("`lora` adapts a trained model: `model.path` must say which.")
        if self.gate_tables.parallel:
            raise ValueError(
                "`gate_tables.parallel` cuts tables that are trained; with `lora` they are not: leave it out."
            )
        if importlib.util.find_spec("peft") is None:
            raise ValueError("`lora` needs peft, which the extra 'train' installs: pip install 'egmla[train]'")
        from peft import LoraConfig

        if unknown := set(self.lora) - {f.name for f in fields(LoraConfig)}:
            raise ValueError(f"`lora.{min(unknown)}` is no field of PEFT's LoraConfig.")
        if self.lora.get("inference_mode"):
            raise ValueError("`lora.inference_mode`: an adapter that does not learn would be trained. Leave it out.")

    def validate_stream(self):
        check_stream_length(self)
        if self.data.streaming and self.tokenizer.path is None:
            raise ValueError("`tokenizer.vocab_size`: a tokenizer is not trained on a stream; give `tokenizer.path`.")

    def validate_generation(self):
        if unknown := set(self.generation) - set(GenerationConfig().to_dict()):
            raise ValueError(f"`generation.{min(unknown)}` is no field of GenerationConfig.")
        if special := sorted(set(self.generation) & set(SPECIAL_IDS)):
            raise ValueError(f"`generation.{special[0]}`: special ids are those of the tokenizer. Leave it out.")
        if not isinstance(self.generation.get("suppress_tokens", []), list):
            raise ValueError("`generation.suppress_tokens` must be a list of ids.")
        try:
            GenerationConfig(**self.generation).validate(strict=True)  # as when it is saved, after all the training
        except (TypeError, ValueError) as error:
            raise ValueError(f"`generation`: {error}") from error


def read_section(section_class: type, values: Any, name: str = "") -> Any:
    """
    Builds a recipe section from a mapping, sections inside it included.

    Raises:
        RecipeError: a key is unknown, missing or of the wrong type; the message names it with its path in the recipe.
    """
    if not isinstance(values, dict):
        raise RecipeError(f"`{name or 'recipe'}` must be a mapping of keys to values, but is {values!r}.")
    prefix = f"{name}." if name else ""
    known = {f.name: f for f in fields(section_class)}
    for key in values:
        if key not in known:
            raise RecipeError(f"Unknown key `{prefix}{key}`. Keys here: {', '.join(known)}.")
    for key in known:
        if key not in values and known[key].default is MISSING and known[key].default_factory is MISSING:
            raise RecipeError(f"The recipe lacks the key `{prefix}{key}`.")
    values = dict(values)
    for key, value in values.items():
        if is_dataclass(known[key].type):
            values[key] = read_section(known[key].type, value, prefix + key)
        elif known[key].type in (float, float | None) and isinstance(value, str | int) and not isinstance(value, bool):
            try:
                values[key] = float(value)  # YAML reads 1 as an integer and 3e-4, without a dot, as a string.
            except ValueError:
                raise RecipeError(f"`{prefix}{key}` must be a number, but is {value!r}.") from None
    try:
        return section_class(**values)
    except StrictDataclassClassValidationError as error:
        raise RecipeError(str(error.__cause__)) from None
    except StrictDataclassFieldValidationError as error:
        raise RecipeError(f"In `{name or 'recipe'}`: {error}") from None


def load_recipe(path: str | Path, recipe_class: type = Recipe) -> Any:
    """
    Reads a recipe, of training or of another class, from a YAML file.

    Raises:
        RecipeError: the file is not YAML, or a key is unknown, missing or wrong; the message names it.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is not YAML: {error}") from error
    return read_section(recipe_class, values)
