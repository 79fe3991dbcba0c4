"""A recipe from beginning to end: model, training or its continuation, the saved model and the report."""

import hashlib
import importlib.util
import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from datasets import Dataset, IterableDataset
from huggingface_hub.errors import StrictDataclassError
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerState,
    default_data_collator,
)
from transformers.trainer_utils import align_special_tokens, get_last_checkpoint

from ..configuration import find_model
from ..configuration_egmla import SPECIAL_IDS, EGMLAConfig
from ..conversion.vocabulary import ids_without_token, suppressed_ids
from ..files import write_whole
from ..gate_egmla import gate_table_parameters
from ..loading import in_dtype, misfits
from ..modeling_egmla import EGMLAForCausalLM
from .arguments import build_arguments
from .data import (
    bits_per_byte,
    hash_documents,
    hash_tokenizer,
    load_documents,
    matching_files,
    pack_documents,
    split_documents,
    train_tokenizer,
    unigram_loss,
)
from .parallel import full_state_dict
from .plot import plot_runs
from .recipe import DataRecipe, ModelRecipe, Recipe, RecipeError, TrainingRecipe, load_recipe
from .trainer import EGMLATrainer, JSONLinesLog, mean_token_loss, predicted_losses


def load_tokenizer(path: str, key: str = "tokenizer.path") -> PreTrainedTokenizerBase:
    """
    Loads the tokenizer that the recipe names under `key`.

    Raises:
        RecipeError: there is none, or it has no end-of-text to put between documents.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(find_model(path), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RecipeError(f"`{key}`: no tokenizer loads from {path}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise RecipeError(f"`{key}`: the tokenizer of {path} has no eos token to put between documents.")
    return tokenizer


def load_model(path: str, key: str, model_class: type = EGMLAForCausalLM) -> PreTrainedModel:
    """
    Loads the trained model that the recipe names under `key`, in float32.

    Args:
        path: folder or Hub id, or a preset that has weights.
        key: of the recipe.
        model_class: `AutoModelForCausalLM` takes models of any kind, `EGMLAForCausalLM` only EG-MLA.

    Raises:
        RecipeError: there is none, or one of another kind, or its weights are not those of its configuration.
    """
    path = find_model(path)
    try:
        kind = PreTrainedConfig.get_config_dict(path)[0].get("model_type")
        if model_class is EGMLAForCausalLM and kind != EGMLAConfig.model_type:
            raise RecipeError(
                f"`{key}`: {path} is a model of type {kind}, not {EGMLAConfig.model_type}. Bring it over first, by "
                f"`egmla convert {path} FOLDER`, and name that folder."
            )
        model, info = model_class.from_pretrained(
            path,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
        )
    except RecipeError:
        raise
    except (OSError, ValueError, StrictDataclassError) as error:
        raise RecipeError(f"`{key}`: {path} cannot be loaded: {error}") from error
    if problem := misfits(info, may_leave_out=kind != EGMLAConfig.model_type):
        raise RecipeError(f"`{key}`: of {path} {problem}. Save or convert the model anew.")
    return model


def build_model(recipe: ModelRecipe, tokenizer, seed: int) -> EGMLAForCausalLM:
    """
    Loads the recipe's model, or makes one with the tokenizer's special ids and, unless the recipe says, its size.

    Raises:
        RecipeError: no such model or preset, a field that cannot work, or more tokens than the model has ids.
    """
    special_ids = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
    if recipe.path is not None:
        model = load_model(recipe.path, key="model.path")
    else:
        try:
            preset = EGMLAConfig.from_preset(recipe.preset).to_diff_dict() if recipe.preset else {}
        except ValueError as error:
            raise RecipeError(f"`model.preset`: {error}") from error
        fields_given = {"vocab_size": len(tokenizer), **preset, **(recipe.config or {}), **special_ids}
        try:
            config = EGMLAConfig.from_dict(fields_given)
        except (ValueError, StrictDataclassError) as error:
            raise RecipeError(f"`model.config`: {error}") from error
        torch.manual_seed(seed)
        model = EGMLAForCausalLM(config)
    largest = max(tokenizer.get_vocab().values())
    if largest >= model.config.vocab_size:
        raise RecipeError(
            f"`model.config.vocab_size` is {model.config.vocab_size}, but the tokenizer has ids up to {largest}."
        )
    return model


def add_lora(model: EGMLAForCausalLM, lora: dict[str, Any], seed: int):
    """
    Freezes the model and puts trainable adapters on it, by PEFT.

    Raises:
        RecipeError: PEFT refuses the fields, for example since no module has a name of `target_modules`; or an adapter
            would be on one of two tied weights, and merging it would change both.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    try:
        adapted = get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **lora}))
    except (TypeError, ValueError) as error:
        raise RecipeError(f"`lora`: {error}") from error
    tied = [name for name in adapted.targeted_module_names if name.split(".")[-1] in ("embed_tokens", "lm_head")]
    if model.config.tie_word_embeddings and tied:
        raise RecipeError(
            f"`lora.target_modules`: {tied[0]} shares its weights with the other of embed_tokens and lm_head, and the "
            "merged model would not be the one that was trained. Leave both out."
        )
    return adapted


def save_final(trainer: EGMLATrainer, tokenizer, recipe: TrainingRecipe, generation: dict[str, Any]) -> None:
    """
    Saves model, tokenizer and generation_config; with LoRA, the adapter in `adapter/` and the model with the adapter
    merged into it, which the trainer holds from then on. Weights are stored in `training.save_dtype`; config.json
    keeps the dtype that was computed in, and loading returns to it. Ids that no token has are never sampled.

    Args:
        generation: what the generation_config says beside that and the special ids.
    """
    folder = Path(recipe.output_dir)
    gather = full_state_dict if trainer.cuts_tables else trainer.accelerator.get_state_dict
    state_dict = gather(trainer.model)
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not isinstance(model, EGMLAForCausalLM):
        if trainer.is_world_process_zero():
            model.save_pretrained(folder / "adapter")
        model = model.merge_and_unload()
        state_dict = model.state_dict()
        # In the precision of the run, as all its losses: Trainer prepares one model only, which had the adapter.
        trainer.model = trainer.model_wrapped = trainer.accelerator.prepare_model(model, evaluation_mode=True)
    if not trainer.is_world_process_zero():
        return
    align_special_tokens(model, tokenizer)  # as Trainer does, but not for a run that had taken all its steps
    settings = {name: getattr(model.generation_config, name) for name in SPECIAL_IDS}
    unused = {*ids_without_token(tokenizer, model.config.vocab_size), *(generation.get("suppress_tokens") or ())}
    if unused:
        settings["suppress_tokens"] = sorted(unused)
    model.generation_config = GenerationConfig(**{**generation, **settings})
    model.save_pretrained(folder, state_dict=in_dtype(state_dict, getattr(torch, recipe.save_dtype)))
    tokenizer.save_pretrained(folder)


def merge_generation(
    model: EGMLAForCausalLM, tokenizer: PreTrainedTokenizerBase, key: str, changes: dict[str, Any] | None = None
) -> dict[str, Any]:
    """
    What the generation_config of a trained model will say beside special ids and ids without token: what the model's
    says, with the recipe's changes.

    Args:
        key: what the recipe names the model by.

    Raises:
        RecipeError: both together could not be saved.
    """
    earlier = model.generation_config.to_diff_dict()
    earlier_ids = earlier.pop("suppress_tokens", None)
    if suppressed := suppressed_ids(tokenizer, model.config.vocab_size, earlier_ids):
        earlier["suppress_tokens"] = suppressed
    merged = {**earlier, **(changes or {})}
    try:
        GenerationConfig(**merged).validate(strict=True)
    except (ValueError, TypeError) as error:
        keys = f"`{key}`" + (" and `generation`" if changes else "")
        raise RecipeError(
            f"{keys}: the trained model could not be saved. {' '.join(str(error).split())} Mend the model's "
            "generation_config.json" + (", or say what you want in `generation`." if changes is not None else ".")
        ) from error
    return merged


def check_same_run(earlier: Recipe, recipe: Recipe) -> None:
    """
    Raises a `RecipeError` if the recipes differ in more than how long to train and what the generation_config says: a
    run may be made longer.
    """
    earlier, recipe = asdict(earlier), asdict(recipe)
    for values in (earlier, recipe):
        del values["training"]["steps"], values["training"]["epochs"]
        values.pop("generation", None)
    for section in recipe:
        if earlier[section] != recipe[section]:
            folder = recipe["training"]["output_dir"]
            raise RecipeError(
                f"`training.output_dir`: {folder} holds a run whose recipe differs in `{section}`. Name another "
                "folder, or empty this one."
            )


def last_checkpoint(recipe: Recipe) -> str | None:
    """
    The checkpoint that a run of the recipe continues from, if there is one.

    Raises:
        RecipeError: the output folder holds a run of another recipe, or one that went further.
    """
    folder = Path(recipe.training.output_dir)
    if folder.exists() and not folder.is_dir():
        raise RecipeError(f"`training.output_dir`: {folder} is a file. Name another folder.")
    kept, checkpoint = folder / "recipe.yaml", get_last_checkpoint(folder) if folder.is_dir() else None
    if checkpoint is None and not (folder / "training.json").exists():
        return None  # nothing was trained yet, whatever was written down
    if kept.exists():
        check_same_run(load_recipe(kept, type(recipe)), recipe)
        steps = 0 if checkpoint is None else int(checkpoint.rpartition("-")[2])
        if recipe.training.steps is not None and steps > recipe.training.steps:
            raise RecipeError(
                f"`training.steps` is {recipe.training.steps}, but the run in {folder} has taken {steps}: ask for as "
                "many or more, or name another folder."
            )
        if recipe.training.epochs is not None and checkpoint is not None:
            state = TrainerState.load_from_json(os.path.join(checkpoint, "trainer_state.json"))
            step = state.epoch / max(1, state.global_step)  # of an epoch; the last one of a run may go beyond its end
            if state.epoch >= recipe.training.epochs + step:
                raise RecipeError(
                    f"`training.epochs` is {recipe.training.epochs:g}, but the run in {folder} has taken "
                    f"{state.epoch:.4g}: ask for as many or more, or name another folder."
                )
    elif checkpoint is not None:
        raise RecipeError(
            f"`training.output_dir`: {folder} holds {Path(checkpoint).name} of a run without a recipe, which cannot "
            "be continued by one. Name another folder, or empty this one."
        )
    return checkpoint


def is_finished(checkpoint: str, recipe: TrainingRecipe) -> bool:
    """Whether a checkpoint is as far as the recipe goes."""
    state = TrainerState.load_from_json(os.path.join(checkpoint, "trainer_state.json"))
    return state.global_step >= recipe.steps if recipe.steps is not None else state.epoch >= recipe.epochs


def load_checkpoint(model, checkpoint: str) -> None:
    """Loads the weights of a checkpoint, or of its adapter, into the model."""
    if isinstance(model, EGMLAForCausalLM):
        model.load_state_dict(EGMLAForCausalLM.from_pretrained(checkpoint).state_dict())
    else:
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(model, load_peft_weights(checkpoint, device="cpu"))


def train_to_the_end(trainer: EGMLATrainer, log: JSONLinesLog, recipe: TrainingRecipe, checkpoint: str | None) -> None:
    """
    Trains, from a checkpoint if there is one. Where that is as far as the recipe goes, it is loaded, or the best one
    where the recipe wants that, and that is all.
    """
    if checkpoint is not None and is_finished(checkpoint, recipe):
        # Trainer would take one more step.
        trainer.state = TrainerState.load_from_json(os.path.join(checkpoint, "trainer_state.json"))
        best = trainer.state.best_model_checkpoint if trainer.args.load_best_model_at_end else None
        load_checkpoint(trainer.model, best or checkpoint)
        trainer.state.is_world_process_zero = trainer.is_world_process_zero()  # the file is of the first process
        trainer.state.is_local_process_zero = trainer.is_local_process_zero()
        log.on_train_begin(trainer.args, trainer.state, trainer.control)
    else:
        trainer.train(resume_from_checkpoint=checkpoint)


class Text(NamedTuple):
    """What a run learns from: documents and blocks of tokens to train on (streams, or not) and to validate with."""

    tokenizer: PreTrainedTokenizerBase
    train_documents: Dataset | IterableDataset
    validation_documents: Dataset
    train_blocks: Dataset | IterableDataset
    validation_blocks: Dataset


def load_text(data: DataRecipe, seed: int, tokenizer: PreTrainedTokenizerBase | int) -> Text:
    """
    Reads, splits, tokenises and packs the recipe's documents.

    Args:
        data: of the recipe.
        seed: of a stream's order.
        tokenizer: what to tokenise with, or the size of one to train on the training documents.

    Raises:
        RecipeError: the documents cannot be read or split.
    """
    documents = load_documents(data, seed)
    train, validation = split_documents(documents, data.validation_share, data.validation_documents)
    if isinstance(tokenizer, int):
        tokenizer = train_tokenizer(train, tokenizer)
    train_blocks = pack_documents(train, tokenizer, data.sequence_length, keep_all=False)
    validation_blocks = pack_documents(validation, tokenizer, data.sequence_length, keep_all=True)
    return Text(tokenizer, train, validation, train_blocks, validation_blocks)


def identify(data: DataRecipe, text: Text) -> dict[str, Any]:
    """
    What `start.json` keeps, so that a run is continued on the text and with the tokenizer that it began with: numbers
    of documents, the SHA-256 of their texts and that of the tokenizer. Of a stream, what is known before it is read:
    its validation text, which comes first, and number and bytes of its files, if it has any.
    """
    identity = {
        "tokenizer_sha256": hash_tokenizer(text.tokenizer),
        "validation_documents": len(text.validation_documents),
        "validation_sha256": hash_documents(text.validation_documents),
    }
    if isinstance(text.train_documents, Dataset):
        identity |= {
            "training_documents": len(text.train_documents),
            "training_sha256": hash_documents(text.train_documents),
        }
    elif data.files is not None:
        paths = matching_files(data.files)
        identity |= {"files": len(paths), "bytes": sum(os.path.getsize(path) for path in paths)}
    return identity


def hash_model(model: PreTrainedModel) -> str:
    """SHA-256 of the names and shapes of all weights and of a few values at both ends of each."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        values = weight.detach().flatten()
        ends = torch.cat((values[:16], values[-16:])).float().cpu()
        digest.update(f"{name} {list(weight.shape)}".encode() + ends.numpy().tobytes())
    return digest.hexdigest()


def check_same_start(recipe: Recipe, identity: dict[str, Any], checkpoint: str | None) -> None:
    """
    Compares what a run starts from, [`identify`]'s answer and hashes of models, with what the run that is continued,
    if one is, started from.

    Raises:
        RecipeError: the run began with another text, tokenizer or model.
    """
    folder = Path(recipe.training.output_dir)
    kept = folder / "start.json"
    if checkpoint is None or not kept.exists():
        return
    earlier = json.loads(kept.read_text(encoding="utf-8"))
    if changed := [key for key in identity if identity[key] != earlier.get(key)]:
        named = ("tokenizer", "model", "student", "teacher")
        what = next((name for name in named if changed[0].startswith(name)), "text")
        raise RecipeError(
            f"`training.output_dir`: {folder} holds a run that began with another {what} (`{changed[0]}` in its "
            f"start.json is {earlier.get(changed[0])}, but now {identity[changed[0]]}). Bring that {what} back, or "
            "name another folder, or empty this one."
        )


def write_start(recipe: Recipe, identity: dict[str, Any]) -> None:
    """Writes what a later command compares with before it continues the run: the recipe, and what it starts from."""
    folder = Path(recipe.training.output_dir)
    write_whole(folder / "start.json", json.dumps(identity, indent=2) + "\n")
    write_whole(folder / "recipe.yaml", yaml.safe_dump(asdict(recipe), sort_keys=False))


def losses(text: Text, metrics: dict[str, float], vocab_size: int) -> dict[str, Any]:
    """The validation loss in nats a token and bits a byte, what it is over, and unigrams' (not for a stream)."""
    loss, tokens = metrics["eval_loss"], metrics["eval_tokens"]
    report = {
        "validation_loss": loss,
        "validation_bits_per_byte": bits_per_byte(loss, tokens, text.validation_documents),
        "validation_documents": len(text.validation_documents),
        "validation_tokens": tokens,
    }
    if isinstance(text.train_documents, Dataset):
        report |= {
            "unigram_validation_loss": unigram_loss(text.train_blocks, text.validation_blocks, vocab_size),
            "training_documents": len(text.train_documents),
            "training_text_tokens": len(text.train_blocks) * (len(text.train_blocks[0]["input_ids"]) - 1),
        }
    return report


def finish(
    trainer: EGMLATrainer, recipe: TrainingRecipe, text: Text, use_cache: bool, generation: dict[str, Any]
) -> dict[str, Any]:
    """
    Saves the model and evaluates what was saved.

    Args:
        recipe: of the training.
        text: that the run learnt from.
        use_cache: of the model's config, where Trainer turned it off.
        generation: of the saved generation_config.

    Returns:
        What every run reports: the losses of the saved weights, steps, tokens, passes (not over a stream), seed,
        command.
    """
    trainer.model.config.use_cache = use_cache
    if trainer.is_world_process_zero():
        (Path(recipe.output_dir) / "training.json").unlink(missing_ok=True)  # of weights that are about to go
    save_final(trainer, text.tokenizer, recipe, generation)
    trainer.accelerator.wait_for_everyone()

    # The loss that counts is that of the weights as they were stored.
    weights = EGMLAForCausalLM.from_pretrained(recipe.output_dir).state_dict()
    if trainer.is_fsdp_enabled:
        set_model_state_dict(trainer.model, weights, options=StateDictOptions(full_state_dict=True))
    else:
        trainer.model.load_state_dict(weights)
    metrics = trainer.evaluate()
    report = {
        **losses(text, metrics, trainer.model.config.vocab_size),
        "steps": trainer.state.global_step,
        "tokens_seen": trainer.state.num_input_tokens_seen,
        "seed": recipe.seed,
        "command": shlex.join(["egmla", *sys.argv[1:]]),
    }
    if isinstance(text.train_blocks, Dataset):
        report["passes"] = report["tokens_seen"] / (len(text.train_blocks) * len(text.train_blocks[0]["input_ids"]))
    return report


def train(recipe_path: str | Path) -> dict[str, Any]:
    """
    Runs a recipe. The output folder gets checkpoints, `log.jsonl`, a copy of the recipe, `start.json` (what identifies
    text, tokenizer and base model), and at the end the model, its tokenizer, `training.json` and, with matplotlib,
    `loss.png`. A run whose folder has a checkpoint continues from it, to the same weights.

    Returns:
        What `training.json` says: losses in nats a token (of the saved weights, reloaded; before fine-tuning; of
        unigrams), bits a byte of the validation text, tokens, seconds of training with its evaluations, and the
        command; except of a stream, passes over the text.

    Raises:
        RecipeError: the recipe is wrong, or the output folder belongs to another one, or to another start.
    """
    recipe = load_recipe(recipe_path)
    arguments = build_arguments(recipe.training, recipe.data.sequence_length)
    folder = Path(recipe.training.output_dir)
    # Before the first process makes the folder, and long before it writes a checkpoint, so that all find the same.
    checkpoint = last_checkpoint(recipe)

    with arguments.main_process_first():
        if recipe.tokenizer.path is not None:
            tokenizer = load_tokenizer(recipe.tokenizer.path)
        elif checkpoint is not None:
            tokenizer = load_tokenizer(checkpoint)  # the one that the run trained
        else:
            tokenizer = recipe.tokenizer.vocab_size
        text = load_text(recipe.data, recipe.training.seed, tokenizer)
    tokenizer = text.tokenizer
    model = build_model(recipe.model, tokenizer, recipe.training.seed)
    trained = recipe.model.path is not None
    identity = identify(recipe.data, text) | ({"model_sha256": hash_model(model)} if trained else {})
    check_same_start(recipe, identity, checkpoint)
    length = recipe.data.sequence_length
    if length > model.config.max_position_embeddings:
        raise RecipeError(
            f"`data.sequence_length` is {length}, but `max_position_embeddings` of the model is "
            f"{model.config.max_position_embeddings}."
        )
    sizes = {
        "parameters": model.num_parameters(),
        "gate_table_parameters": sum(table.numel() for table in gate_table_parameters(model)),
    }
    use_cache = model.config.use_cache  # Trainer turns it off.
    generation = recipe.generation
    if trained:
        generation = merge_generation(model, tokenizer, "model.path", generation)
    if recipe.lora is not None:
        model = add_lora(model, recipe.lora, recipe.training.seed)
    sizes["trainable_parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)

    log = JSONLinesLog(folder / "log.jsonl")
    trainer = EGMLATrainer(
        model=model,
        args=arguments,
        train_dataset=text.train_blocks,
        eval_dataset=text.validation_blocks,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=mean_token_loss,
        preprocess_logits_for_metrics=predicted_losses,
        callbacks=[log],
        gate_tables=recipe.gate_tables,
    )
    if trainer.is_world_process_zero():
        write_start(recipe, identity)
    if checkpoint is None and trained:
        # What fine-tuning starts from, as step 0 of the log. Not by `evaluate`, after which Trainer would train on
        # several processes without synchronising them.
        arguments.eval_on_start = True
    train_to_the_end(trainer, log, recipe.training, checkpoint)
    seconds = log.seconds
    report = {**finish(trainer, recipe.training, text, use_cache, generation), **sizes, "seconds": seconds}
    if trained:
        report["initial_validation_loss"] = log.initial_validation_loss()
    if trainer.is_world_process_zero():
        write_whole(folder / "training.json", json.dumps(report, indent=2) + "\n")
        if importlib.util.find_spec("matplotlib") is not None:
            plot_runs([folder], folder / "loss.png")
    return report
