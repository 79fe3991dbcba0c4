"""
Pretraining and fine-tuning from a recipe: a YAML file that says model, tokenizer, text and schedule (`egmla train`).

Documents are split into training and validation text by a hash of their content, tokenised, joined with end-of-text
between them and cut into blocks. The loop is the library's `Trainer`; what is added here is a parameter group for gate
tables, an exact validation loss, a JSON Lines log and a report of what was done.
"""

import glob
import hashlib
import json
import math
import os
import shlex
import sys
import time
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from datasets import Dataset, load_dataset
from huggingface_hub.dataclasses import as_validated_field, strict
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    EvalPrediction,
    GenerationConfig,
    PreTrainedTokenizerFast,
    SchedulerType,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_utils import get_last_checkpoint

from .configuration_egmla import EGMLAConfig
from .modeling_egmla import EGMLAForCausalLM


END_OF_TEXT = "<|endoftext|>"  # Between documents; also what generation starts and stops with.
PADDING = "<|padding|>"  # Never in training text. Not end-of-text, so that masking padding keeps documents' ends.
FILE_FORMATS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


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
    """Documents from `files` (globs of .txt, one document each, .jsonl or .parquet) or of a Hub `dataset`."""

    files: list[str] | None = None
    dataset: str | None = None
    dataset_split: str = "train"
    text_column: str = "text"
    validation_share: float = share(default=0.05)
    sequence_length: int = positive(default=1024)

    def validate_choice(self):
        if (self.files is None) == (self.dataset is None):
            raise ValueError("`data` needs either `files` or `dataset`.")


@strict
@dataclass
class TrainingRecipe:
    """How to train. `arguments` goes to `TrainingArguments` as it is (bf16, gradient_checkpointing, ...)."""

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


@strict
@dataclass
class GateTablesRecipe:
    """
    The parameter group of the gate tables. `learning_rate` None means that of the rest.

    Weight decay is off by default: AdamW shrinks every row at every step, but only rows whose token occurs get a
    gradient against it, so the gates of rare tokens would fade, and with them those tokens' keys and values.
    """

    learning_rate: float | None = positive(default=None)
    weight_decay: float = 0.0


@strict
@dataclass
class Recipe:
    """A whole recipe. `generation` holds what the saved model's generation_config says beside the special ids."""

    model: ModelRecipe
    tokenizer: TokenizerRecipe
    data: DataRecipe
    training: TrainingRecipe
    gate_tables: GateTablesRecipe = field(default_factory=GateTablesRecipe)
    generation: dict[str, Any] = field(default_factory=dict)

    def validate_generation(self):
        if unknown := set(self.generation) - set(GenerationConfig().to_dict()):
            raise ValueError(f"`generation.{min(unknown)}` is no field of GenerationConfig.")


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


def load_recipe(path: str | Path) -> Recipe:
    """
    Reads a recipe from a YAML file.

    Raises:
        RecipeError: the file is not YAML, or a key is unknown, missing or wrong; the message names it.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is not YAML: {error}") from error
    return read_section(Recipe, values)


def load_documents(recipe: DataRecipe) -> Dataset:
    """
    Reads all documents into a dataset with the one column `text`.

    Raises:
        RecipeError: no file matches, files of several or of unknown kinds, or no such column.
    """
    if recipe.dataset is not None:
        documents = load_dataset(recipe.dataset, split=recipe.dataset_split)
    else:
        paths = sorted({path for pattern in recipe.files for path in glob.glob(pattern, recursive=True)})
        if not paths:
            raise RecipeError(f"`data.files`: no file matches {recipe.files} in {os.getcwd()}.")
        formats = {FILE_FORMATS.get(Path(path).suffix) for path in paths}
        if len(formats) != 1 or None in formats:
            raise RecipeError(f"`data.files` must all be of one kind of {sorted(FILE_FORMATS)}.")
        options = {"sample_by": "document"} if formats == {"text"} else {}
        documents = load_dataset(formats.pop(), data_files=paths, split="train", **options)
    if recipe.text_column not in documents.column_names:
        raise RecipeError(f"`data.text_column` is {recipe.text_column!r}, but there are {documents.column_names}.")
    documents = documents.select_columns(recipe.text_column)
    return documents if recipe.text_column == "text" else documents.rename_column(recipe.text_column, "text")


def is_validation(text: str, validation_share: float) -> bool:
    """
    Whether a document is validation text: the first 8 bytes of the SHA-256 of its text, as a fraction of 2^64, lie
    below `validation_share`. So a document stays on its side whatever else is in the data, and so do its copies.
    """
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < validation_share * 2**64


def split_documents(documents: Dataset, validation_share: float) -> tuple[Dataset, Dataset]:
    """
    Splits documents into training and validation text by [`is_validation`].

    Raises:
        RecipeError: one side would be empty.
    """
    held_out = [is_validation(text, validation_share) for text in documents["text"]]
    train = documents.select([row for row, is_held_out in enumerate(held_out) if not is_held_out])
    validation = documents.select([row for row, is_held_out in enumerate(held_out) if is_held_out])
    if not len(train) or not len(validation):
        raise RecipeError(
            f"`data.validation_share` {validation_share} leaves {len(train)} documents to train on and "
            f"{len(validation)} to validate with, of {len(documents)}."
        )
    return train, validation


def train_tokenizer(documents: Dataset, vocab_size: int) -> PreTrainedTokenizerFast:
    """
    Trains a byte-level BPE tokenizer, as GPT-2's, on the documents.

    End-of-text is bos and eos; the padding token serves batches of prompts only.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents["text"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def pack_documents(documents: Dataset, tokenizer, length: int, keep_all: bool) -> Dataset:
    """
    Tokenises documents, joins them with end-of-text before, between and after them, and cuts the stream into blocks of
    `length`. A block begins with the last token of the one before it, so every token of the text is predicted once.

    Args:
        keep_all: fill the last block up with end-of-text that is not predicted, where else it would be dropped, once
            for every thousand documents.

    Returns:
        Blocks as `input_ids` and `labels` (-100: not predicted), [length] each.

    Raises:
        RecipeError: the text does not fill a block.
    """

    def pack(batch: dict[str, list]) -> dict[str, list]:
        stream = [tokenizer.eos_token_id]
        for ids in tokenizer(batch["text"], add_special_tokens=False, verbose=False)["input_ids"]:
            stream += [*ids, tokenizer.eos_token_id]
        blocks = [stream[start : start + length] for start in range(0, len(stream) - 1, length - 1)]
        rest = length - len(blocks[-1])
        if rest and not keep_all:
            blocks.pop()
        labels = [list(block) for block in blocks]
        if rest and keep_all:
            labels[-1] += [-100] * rest
            blocks[-1] = blocks[-1] + [tokenizer.eos_token_id] * rest
        return {"input_ids": blocks, "labels": labels}

    blocks = documents.map(pack, batched=True, batch_size=None if keep_all else 1000, remove_columns="text")
    if not len(blocks):
        raise RecipeError(f"`data.sequence_length` {length} is longer than all of the text.")
    return blocks


def unigram_loss(train_blocks: Dataset, validation_blocks: Dataset, vocab_size: int) -> float:
    """Validation loss, in nats a token, of predicting each token by its (add-one) frequency in the training text."""
    counts = np.bincount(np.array(train_blocks["labels"])[:, 1:].ravel(), minlength=vocab_size) + 1.0
    labels = np.array(validation_blocks["labels"])[:, 1:].ravel()
    return float(-np.log(counts / counts.sum())[labels[labels != -100]].mean())


class EGMLATrainer(Trainer):
    """
    The library's Trainer with gate tables in a parameter group of their own.

    Norms and biases are not decayed either, as everywhere in the library: their size is what they are there to set.
    """

    def __init__(self, *args, gate_tables: GateTablesRecipe | None = None, **kwargs):
        self.gate_tables = gate_tables or GateTablesRecipe()
        super().__init__(*args, **kwargs)

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        if self.optimizer is not None:
            return self.optimizer
        model = self.model if model is None else model
        decayed_names = set(self.get_decay_parameter_names(model))
        decayed, plain, tables = [], [], []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                group = tables if "kv_gate_embed" in name else decayed if name in decayed_names else plain
                group.append(parameter)
        groups = [
            {"params": decayed, "weight_decay": self.args.weight_decay},
            {"params": plain, "weight_decay": 0.0},
            {
                "params": tables,
                "weight_decay": self.gate_tables.weight_decay,
                "lr": self.gate_tables.learning_rate or self.args.learning_rate,
            },
        ]
        optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, model)
        self.optimizer = optimizer_class([group for group in groups if group["params"]], **options)
        return self.optimizer


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Losses of all predicted tokens, [B, S - 1], zero where labels are -100; keeps evaluation from storing logits."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    return F.cross_entropy(logits[:, :-1].float().transpose(1, 2), labels[:, 1:], reduction="none")


def mean_token_loss(prediction: EvalPrediction) -> dict[str, float]:
    """The validation loss over all tokens alike, which replaces Trainer's mean over batches, and their number."""
    tokens = int((prediction.label_ids[:, 1:] != -100).sum())
    return {"loss": float(prediction.predictions.sum(dtype=np.float64)) / tokens, "tokens": tokens}


class JSONLinesLog(TrainerCallback):
    """
    Appends what Trainer logs to a file, a JSON object a line, with the seconds since training began. A resumed run
    drops the lines of steps that it will do again, and counts its seconds on.
    """

    def __init__(self, path: Path):
        self.path = path
        self.seconds_before = 0.0
        self.started = time.perf_counter()

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.started

    def on_train_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter()
        if self.path.exists():
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if json.loads(line)["step"] <= state.global_step]
            self.seconds_before = json.loads(kept[-1])["seconds"] if kept else 0.0
            if state.is_world_process_zero:
                self.path.write_text("".join(kept), encoding="utf-8")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, "seconds": round(self.seconds, 1), **logs}) + "\n")


def build_model(recipe: ModelRecipe, tokenizer, seed: int) -> EGMLAForCausalLM:
    """
    Loads the recipe's model, or makes one with the tokenizer's special ids and, unless the recipe says, its size.

    Raises:
        RecipeError: the tokenizer has more tokens than the model.
    """
    special_ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if recipe.path is not None:
        model = EGMLAForCausalLM.from_pretrained(recipe.path, dtype=torch.float32)
    else:
        preset = EGMLAConfig.from_preset(recipe.preset).to_diff_dict() if recipe.preset else {}
        fields_given = {"vocab_size": len(tokenizer), **preset, **(recipe.config or {}), **special_ids}
        config = EGMLAConfig.from_dict(fields_given)
        torch.manual_seed(seed)
        model = EGMLAForCausalLM(config)
    if len(tokenizer) > model.config.vocab_size:
        raise RecipeError(
            f"`model.config.vocab_size` is {model.config.vocab_size}, but the tokenizer has {len(tokenizer)} tokens."
        )
    return model


def build_arguments(recipe: TrainingRecipe, sequence_length: int) -> TrainingArguments:
    """
    The recipe in the terms of Trainer.

    Raises:
        RecipeError: `batch_tokens` is not a whole number of forward passes of all processes.
    """
    pass_tokens = recipe.sequences_per_device * sequence_length * int(os.environ.get("WORLD_SIZE", "1"))
    if recipe.batch_tokens % pass_tokens:
        raise RecipeError(
            f"`training.batch_tokens` is {recipe.batch_tokens}, but must be a multiple of {pass_tokens}: "
            "sequences_per_device times sequence_length times the number of processes."
        )
    values = {
        "output_dir": recipe.output_dir,
        "learning_rate": recipe.learning_rate,
        "per_device_train_batch_size": recipe.sequences_per_device,
        "per_device_eval_batch_size": recipe.sequences_per_device,
        "gradient_accumulation_steps": recipe.batch_tokens // pass_tokens,
        "max_steps": recipe.steps or -1,
        "num_train_epochs": recipe.epochs or 1.0,
        "lr_scheduler_type": recipe.schedule,
        "lr_scheduler_kwargs": recipe.schedule_arguments,
        "warmup_steps": recipe.warmup_steps,
        "weight_decay": recipe.weight_decay,
        "adam_beta2": recipe.adam_beta2,
        "max_grad_norm": recipe.max_grad_norm,
        "seed": recipe.seed,
        "eval_strategy": "steps",
        "eval_steps": recipe.eval_steps,
        "save_steps": recipe.save_steps,
        "save_total_limit": 2,
        "logging_steps": recipe.logging_steps,
        "report_to": "none",
        # Without it, several processes on a CPU would each train a copy of their own.
        "use_cpu": not torch.accelerator.is_available(),
    }
    return TrainingArguments(**{**values, **recipe.arguments})


def save_final(trainer: Trainer, tokenizer, recipe: Recipe, folder: Path) -> None:
    """
    Saves model, tokenizer and generation_config. Weights are stored in `training.save_dtype`; config.json keeps the
    dtype that was computed in, and loading returns to it. Ids that no token has are never sampled.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    settings = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if len(tokenizer) < model.config.vocab_size:
        settings["suppress_tokens"] = list(range(len(tokenizer), model.config.vocab_size))
    model.generation_config = GenerationConfig(**{**recipe.generation, **settings})
    dtype = getattr(torch, recipe.training.save_dtype)
    stored = {}  # One tensor for weights that are tied, which are then saved once.
    state_dict = {
        name: stored.setdefault(weight.data_ptr(), weight.to(dtype))
        for name, weight in trainer.accelerator.get_state_dict(trainer.model).items()
    }
    model.save_pretrained(folder, state_dict=state_dict)
    tokenizer.save_pretrained(folder)


def check_same_run(earlier: Recipe, recipe: Recipe) -> None:
    """Raises a `RecipeError` if the recipes differ in more than how long to train: a run may be made longer."""
    free = {"steps": None, "epochs": None}
    earlier, recipe = asdict(earlier), asdict(recipe)
    for section in recipe:
        ignored = free if section == "training" else {}
        if {**earlier[section], **ignored} != {**recipe[section], **ignored}:
            folder = recipe["training"]["output_dir"]
            raise RecipeError(
                f"`training.output_dir`: {folder} holds a run whose recipe differs in `{section}`. Name another "
                "folder, or empty this one."
            )


def is_finished(checkpoint: str, recipe: TrainingRecipe) -> bool:
    """Whether a checkpoint is as far as the recipe goes."""
    state = TrainerState.load_from_json(os.path.join(checkpoint, "trainer_state.json"))
    return state.global_step >= recipe.steps if recipe.steps is not None else state.epoch >= recipe.epochs


def train(recipe_path: str | Path) -> dict[str, Any]:
    """
    Runs a recipe. The output folder gets checkpoints, `log.jsonl`, a copy of the recipe, and at the end the model, its
    tokenizer and `training.json`. A run whose folder has a checkpoint continues from it, to the same weights.

    Returns:
        What `training.json` says: losses in nats a token (of the saved weights, reloaded; of unigrams), bits a byte of
        the validation text, tokens, passes over the text, seconds of training with its evaluations, and the command.

    Raises:
        RecipeError: the recipe is wrong, or the output folder belongs to another one.
    """
    recipe = load_recipe(recipe_path)
    arguments = build_arguments(recipe.training, recipe.data.sequence_length)
    folder = Path(recipe.training.output_dir)
    kept_recipe = folder / "recipe.yaml"
    if kept_recipe.exists():
        check_same_run(load_recipe(kept_recipe), recipe)

    with arguments.main_process_first():
        train_text, validation_text = split_documents(load_documents(recipe.data), recipe.data.validation_share)
        if recipe.tokenizer.path is not None:
            tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer.path)
        else:
            tokenizer = train_tokenizer(train_text, recipe.tokenizer.vocab_size)
        length = recipe.data.sequence_length
        train_blocks = pack_documents(train_text, tokenizer, length, keep_all=False)
        validation_blocks = pack_documents(validation_text, tokenizer, length, keep_all=True)
    model = build_model(recipe.model, tokenizer, recipe.training.seed)
    if length > model.config.max_position_embeddings:
        raise RecipeError(
            f"`data.sequence_length` is {length}, but `max_position_embeddings` of the model is "
            f"{model.config.max_position_embeddings}."
        )

    use_cache = model.config.use_cache  # Trainer turns it off.
    log = JSONLinesLog(folder / "log.jsonl")
    trainer = EGMLATrainer(
        model=model,
        args=arguments,
        train_dataset=train_blocks,
        eval_dataset=validation_blocks,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=mean_token_loss,
        preprocess_logits_for_metrics=token_losses,
        callbacks=[log],
        gate_tables=recipe.gate_tables,
    )
    if trainer.is_world_process_zero():
        folder.mkdir(parents=True, exist_ok=True)
        kept_recipe.write_text(yaml.safe_dump(asdict(recipe), sort_keys=False), encoding="utf-8")
    checkpoint = get_last_checkpoint(folder)
    if checkpoint is not None and is_finished(checkpoint, recipe.training):
        # Trainer would take one more step.
        trainer.state = TrainerState.load_from_json(os.path.join(checkpoint, "trainer_state.json"))
        trainer.model.load_state_dict(EGMLAForCausalLM.from_pretrained(checkpoint).state_dict())
        log.on_train_begin(arguments, trainer.state, trainer.control)
    else:
        trainer.train(resume_from_checkpoint=checkpoint)
    seconds = log.seconds
    trainer.model.config.use_cache = use_cache
    save_final(trainer, tokenizer, recipe, folder)

    # The loss that counts is that of the weights as they were stored.
    trainer.model.load_state_dict(EGMLAForCausalLM.from_pretrained(folder).state_dict())
    metrics = trainer.evaluate()
    tokens = trainer.state.global_step * recipe.training.batch_tokens
    report = {
        "validation_loss": metrics["eval_loss"],
        "validation_bits_per_byte": bits_per_byte(metrics["eval_loss"], metrics["eval_tokens"], validation_text),
        "unigram_validation_loss": unigram_loss(train_blocks, validation_blocks, model.config.vocab_size),
        "validation_documents": len(validation_text),
        "validation_tokens": metrics["eval_tokens"],
        "training_documents": len(train_text),
        "training_text_tokens": len(train_blocks) * (length - 1),
        "steps": trainer.state.global_step,
        "tokens_seen": tokens,
        "passes": tokens / (len(train_blocks) * length),
        "parameters": model.num_parameters(),
        "gate_table_parameters": sum(p.numel() for n, p in model.named_parameters() if "kv_gate_embed" in n),
        "seed": recipe.training.seed,
        "seconds": seconds,
        "command": shlex.join(["egmla", *sys.argv[1:]]),
    }
    if trainer.is_world_process_zero():
        (folder / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def bits_per_byte(loss: float, tokens: int, documents: Dataset) -> float:
    """Loss in bits a byte of UTF-8 text, from nats a token; each document's end counts with its text."""
    return loss * tokens / math.log(2) / sum(len(text.encode()) for text in documents["text"])
