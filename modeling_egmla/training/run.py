"""A recipe from beginning to end: model, arguments, training or its continuation, the saved model and the report."""

import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_utils import get_last_checkpoint

from ..configuration_egmla import EGMLAConfig
from ..modeling_egmla import EGMLAForCausalLM
from .data import bits_per_byte, load_documents, pack_documents, split_documents, train_tokenizer, unigram_loss
from .parallel import full_state_dict
from .recipe import ModelRecipe, Recipe, RecipeError, TrainingRecipe, load_recipe
from .trainer import EGMLATrainer, JSONLinesLog, mean_token_loss, token_losses


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
        RecipeError: `batch_tokens` is not a whole number of forward passes of all processes, or FSDP is asked for on
            a CPU.
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
        "ddp_find_unused_parameters": False,  # every weight is used in every pass
    }
    arguments = TrainingArguments(**{**values, **recipe.arguments})
    if arguments.use_cpu and (arguments.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"):
        raise RecipeError(
            "`training.arguments.fsdp`: on a CPU Trainer would silently replicate the model instead. Leave it out, or "
            "call modeling_egmla.training.parallel.shard_model in a loop of your own."
        )
    return arguments


def save_final(trainer: EGMLATrainer, tokenizer, recipe: Recipe, folder: Path) -> None:
    """
    Saves model, tokenizer and generation_config. Weights are stored in `training.save_dtype`; config.json keeps the
    dtype that was computed in, and loading returns to it. Ids that no token has are never sampled.
    """
    gather = full_state_dict if trainer.cuts_tables else trainer.accelerator.get_state_dict
    state_dict = gather(trainer.model)
    if not trainer.is_world_process_zero():
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    settings = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if len(tokenizer) < model.config.vocab_size:
        settings["suppress_tokens"] = list(range(len(tokenizer), model.config.vocab_size))
    model.generation_config = GenerationConfig(**{**recipe.generation, **settings})
    dtype = getattr(torch, recipe.training.save_dtype)
    stored = {}  # One tensor for weights that are tied, which are then saved once.
    state_dict = {name: stored.setdefault(weight.data_ptr(), weight.to(dtype)) for name, weight in state_dict.items()}
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
    trainer.accelerator.wait_for_everyone()

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
