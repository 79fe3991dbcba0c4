"""A recipe in the terms of the library's Trainer, with what could not work refused by its key."""

import os
import sys

import torch
from transformers import TrainingArguments, get_scheduler

from .recipe import RecipeError, TrainingRecipe


def build_arguments(recipe: TrainingRecipe, sequence_length: int) -> TrainingArguments:
    """
    The recipe in the terms of Trainer.

    Raises:
        RecipeError: `batch_tokens` is not a whole number of forward passes of all processes, one process would use
            several devices, a setting of the schedule or of `arguments` cannot work or would do something else, or
            FSDP is asked for on a CPU.
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
        "include_num_input_tokens_seen": "all",
        "report_to": "none",
        "disable_tqdm": not sys.stderr.isatty(),  # a bar in a terminal, lines in a file
        # Without it, several processes on a CPU would each train a copy of their own.
        "use_cpu": not torch.accelerator.is_available(),
        "ddp_find_unused_parameters": False,  # every weight is used in every pass
    }
    try:
        arguments = TrainingArguments(**{**values, **recipe.arguments})
    except (TypeError, ValueError, ImportError) as error:
        raise RecipeError(f"`training.arguments`: {error}") from error
    try:
        optimizer = torch.optim.SGD([torch.zeros(1)])
        get_scheduler(recipe.schedule, optimizer, recipe.warmup_steps, recipe.steps or 1, recipe.schedule_arguments)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"`training.schedule_arguments`: {error}") from error
    if arguments.n_gpu > 1:
        raise RecipeError(
            f"`training.batch_tokens`: Trainer would give each of {arguments.n_gpu} devices as many tokens as one. "
            f"Start one process for each (`torchrun --nproc-per-node {arguments.n_gpu} --no-python egmla ...`), or "
            "show one device only (CUDA_VISIBLE_DEVICES=0)."
        )
    if arguments.fp16 and arguments.use_cpu:
        raise RecipeError("`training.arguments.fp16`: on a CPU accelerate would leave float32 as it is. Use bf16.")
    if arguments.accelerator_config.split_batches:
        raise RecipeError(
            "`training.arguments.accelerator_config`: `split_batches` would make a step smaller than `batch_tokens` "
            "on several processes. Leave it out."
        )
    if arguments.use_cpu and (arguments.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"):
        raise RecipeError(
            "`training.arguments.fsdp`: on a CPU Trainer would silently replicate the model instead. Leave it out, or "
            "call modeling_egmla.training.parallel.shard_model in a loop of your own."
        )
    return arguments
