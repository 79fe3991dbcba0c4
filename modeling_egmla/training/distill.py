"""
Distillation by a recipe (`egmla distill`): a converted model learns to say what its source says.

For every token the student is held to the teacher's next-token distribution (Kullback-Leibler divergence), to the
hidden states behind each of its layers (squared error over squared length) and to the text itself, as weighted.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch.autograd.function import once_differentiable
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, default_data_collator

from ..files import write_whole
from ..loss_egmla import chunks
from ..modeling_egmla import EGMLAForCausalLM
from .arguments import build_arguments
from .recipe import (
    DataRecipe,
    GateTablesRecipe,
    RecipeError,
    TrainingRecipe,
    check_stream_length,
    load_recipe,
    positive,
)
from .run import (
    check_same_start,
    finish,
    hash_model,
    identify,
    last_checkpoint,
    load_model,
    load_text,
    load_tokenizer,
    merge_generation,
    train_to_the_end,
    write_start,
)
from .trainer import EGMLATrainer, JSONLinesLog, mean_token_loss, predicted_losses


@strict
@dataclass
class DistillationRecipe:
    """
    Weights of the three losses, and the temperature of the distributions that `logits` compares (its loss is
    multiplied by the temperature's square, so that gradients keep their size).
    """

    logits: float = 1.0
    hidden_states: float = 1.0
    labels: float = 0.0
    temperature: float = positive(default=1.0)

    def validate_weights(self):
        weights = (self.logits, self.hidden_states, self.labels)
        if min(weights) < 0 or not any(weights):
            raise ValueError("`distillation` needs weights that are not negative, and one above 0.")


@strict
@dataclass
class PairRecipe:
    """Folders or Hub ids of the `student`, whose tokenizer is used, and of the `teacher`."""

    student: str
    teacher: str


@strict
@dataclass
class DistillRecipe:
    """A whole recipe."""

    models: PairRecipe
    data: DataRecipe
    training: TrainingRecipe
    distillation: DistillationRecipe = field(default_factory=DistillationRecipe)
    gate_tables: GateTablesRecipe = field(default_factory=GateTablesRecipe)

    def validate_stream(self):
        check_stream_length(self)

    def validate_losses(self):
        if self.training.arguments.get("label_smoothing_factor"):
            raise ValueError("`training.arguments.label_smoothing_factor`: no loss here reads it. Leave it out.")


class DistillationTrainer(EGMLATrainer):
    """
    Trains a student on what a teacher says; evaluates it on text alone.

    Args:
        teacher: a causal language model with the student's vocabulary; it is not trained and not saved.
        distillation: weights of the losses.
    """

    def __init__(self, *args, teacher: PreTrainedModel, distillation: DistillationRecipe, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)
        self.distillation = distillation
        self.parts: dict[str, torch.Tensor] = {}  # sums since the last log, which was at `parts_since` steps
        self.parts_since = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The weighted sum of the losses, each a mean over predicted tokens of the whole batch."""
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        weights = self.distillation
        predicted = inputs["labels"][:, 1:] != -100
        count = predicted.sum() if num_items_in_batch is None else num_items_in_batch
        ids = {name: value for name, value in inputs.items() if name != "labels"}
        with_states = weights.hidden_states > 0
        outputs = model(**ids, use_cache=False, output_hidden_states=with_states)
        with torch.no_grad(), self.accelerator.autocast():  # the teacher is not prepared, as the student is
            target = self.teacher(**ids, use_cache=False, output_hidden_states=with_states)

        losses = {}
        if weights.logits:
            divergences = token_divergences(outputs.logits, target.logits, weights.temperature)
            losses["logits"] = weights.temperature**2 * divergences[:, :-1][predicted].sum() / count
        if with_states:
            errors = state_errors(outputs.hidden_states, target.hidden_states)
            losses["hidden_states"] = errors[:, :-1][predicted].sum() / count
        if weights.labels:
            losses["labels"] = predicted_losses(outputs.logits, inputs["labels"]).sum() / count
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # The tokens of all processes were counted, and gradients are averaged over processes.
            losses = {name: loss * self.accelerator.num_processes for name, loss in losses.items()}
        if not self.parts:
            self.parts_since = self.state.global_step
        for name, loss in losses.items():
            self.parts[name] = self.parts.get(name, 0.0) + loss.detach()
        total = sum(getattr(weights, name) * loss for name, loss in losses.items())
        return (total, outputs) if return_outputs else total

    def log(self, logs, *args, **kwargs):
        """As the library's, with the mean of each loss of its own over the steps since the last time."""
        if "loss" in logs:
            steps = self.state.global_step - self.parts_since
            parts = self.accelerator.reduce(self.parts, "mean")
            logs = {**logs, **{f"loss_{name}": part.item() / steps for name, part in parts.items()}}
            self.parts = {}
        super().log(logs, *args, **kwargs)


def token_divergences(logits: torch.Tensor, target: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """
    Kullback-Leibler divergence of each token's distribution from its target's, [B, S], in nats, of logits [B, S, V]
    divided by `temperature`. Gradients go to `logits` alone.
    """
    divergences = _Divergences.apply(logits.flatten(0, 1), target.flatten(0, 1), temperature)
    return divergences.view(logits.shape[:-1])


class _Divergences(torch.autograd.Function):
    """
    With respect to its logits a divergence has the gradient (q - p) / temperature, p being the target's distribution.
    It is computed on the way, a few tokens at a time: a vocabulary is wide, and a temporary of all tokens would be
    larger than any other activation.
    """

    @staticmethod
    def forward(ctx, logits: torch.Tensor, target: torch.Tensor, temperature: float) -> torch.Tensor:
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        divergences = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        for tokens in chunks(logits):
            log_q = (logits[tokens].float() / temperature).log_softmax(-1)
            log_p = (target[tokens].float() / temperature).log_softmax(-1)
            p = log_p.exp()
            divergences[tokens] = (p * log_p.sub_(log_q)).sum(-1)
            if gradient is not None:
                gradient[tokens] = log_q.exp_().sub_(p).div_(temperature)
        ctx.save_for_backward(gradient)
        return divergences

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[..., None].to(gradient.dtype), None, None


def state_errors(states: tuple[torch.Tensor, ...], target: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Squared error over the target's squared length, mean over layers, [B, S], of hidden states [B, S, E] each."""
    errors = [
        (state.float() - wanted.float()).square().sum(-1) / wanted.float().square().sum(-1).clamp_min(1e-12)
        for state, wanted in zip(states[1:], target[1:])  # behind each layer; the embeddings are before
    ]
    return torch.stack(errors).mean(0)


def load_pair(recipe: DistillRecipe) -> tuple[EGMLAForCausalLM, PreTrainedModel]:
    """
    Loads student and teacher, in float32.

    Raises:
        RecipeError: one does not load, they cannot be compared, or the recipe's sequences are too long for one.
    """
    student = load_model(recipe.models.student, key="models.student")
    teacher = load_model(recipe.models.teacher, key="models.teacher", model_class=AutoModelForCausalLM)
    same = ["vocab_size"] + (["hidden_size", "num_hidden_layers"] if recipe.distillation.hidden_states else [])
    for name in same:
        ours, theirs = getattr(student.config, name), getattr(teacher.config, name)
        if ours != theirs:
            remedy = " Set `distillation.hidden_states` to 0 to compare logits only."
            if name == "vocab_size":
                remedy = " Name the model that the student was converted from."
            raise RecipeError(f"`models.teacher` has `{name}` {theirs}, but the student {ours}.{remedy}")
    longest = min(model.config.max_position_embeddings for model in (student, teacher))
    if recipe.data.sequence_length > longest:
        raise RecipeError(
            f"`data.sequence_length` is {recipe.data.sequence_length}, but the models' context is {longest}."
        )
    return student, teacher


def check_same_vocabulary(tokenizer: PreTrainedTokenizerBase, models: PairRecipe) -> None:
    """Raises a `RecipeError` if the teacher has a tokenizer whose ids stand for other tokens than the student's."""
    try:
        theirs = load_tokenizer(models.teacher, key="models.teacher")
    except RecipeError:
        return  # a folder of weights alone
    if theirs.get_vocab() != tokenizer.get_vocab():
        raise RecipeError(
            f"`models.teacher`: the ids of {models.teacher} stand for other tokens than those of {models.student}, so "
            "what it says of a text cannot be compared. Name the model that the student was converted from."
        )


def distill(recipe_path: str | Path) -> dict[str, Any]:
    """
    Runs a recipe. The output folder gets checkpoints, `log.jsonl` (validation losses from the start on), a copy of the
    recipe, `start.json` (what identifies text, tokenizer and both models), and at the end the model, its tokenizer
    and `training.json`. A run whose folder has a checkpoint continues from it, to the same weights.

    Returns:
        What `training.json` says: validation losses in nats a token, of the teacher, of the student before and of its
        saved weights, reloaded; tokens, seconds, and the command.

    Raises:
        RecipeError: the recipe is wrong, or the output folder belongs to another one, or to another start.
    """
    recipe = load_recipe(recipe_path, DistillRecipe)
    arguments = build_arguments(recipe.training, recipe.data.sequence_length)
    folder = Path(recipe.training.output_dir)
    checkpoint = last_checkpoint(recipe)

    student, teacher = load_pair(recipe)
    tokenizer = load_tokenizer(recipe.models.student, key="models.student")
    check_same_vocabulary(tokenizer, recipe.models)
    with arguments.main_process_first():
        text = load_text(recipe.data, recipe.training.seed, tokenizer)
    hashes = {"student_sha256": hash_model(student), "teacher_sha256": hash_model(teacher)}
    identity = identify(recipe.data, text) | hashes
    check_same_start(recipe, identity, checkpoint)

    weights = recipe.distillation
    if not (weights.logits or weights.labels or student.config.tie_word_embeddings):
        student.lm_head.requires_grad_(False)  # no loss reads it, and DDP would wait for its gradient

    use_cache, generation = student.config.use_cache, merge_generation(student, tokenizer, "models.student")
    evaluation = {
        "args": arguments,
        "eval_dataset": text.validation_blocks,
        "data_collator": default_data_collator,
        "compute_metrics": mean_token_loss,
        "preprocess_logits_for_metrics": predicted_losses,
    }
    log = JSONLinesLog(folder / "log.jsonl")
    trainer = DistillationTrainer(
        model=student,
        train_dataset=text.train_blocks,
        processing_class=tokenizer,
        callbacks=[log],
        gate_tables=recipe.gate_tables,
        teacher=teacher,
        distillation=recipe.distillation,
        **evaluation,
    )
    teacher_file = folder / "teacher.json"
    if trainer.is_world_process_zero():
        write_start(recipe, identity)
    if checkpoint is None:
        teacher_loss = EGMLATrainer(model=teacher, **evaluation).evaluate()["eval_loss"]
        # Not by `evaluate` before: several processes would then train copies that are never synchronised.
        arguments.eval_on_start = True
        if trainer.is_world_process_zero():
            write_whole(teacher_file, json.dumps({"teacher_validation_loss": teacher_loss}) + "\n")
    train_to_the_end(trainer, log, recipe.training, checkpoint)

    seconds = log.seconds
    report = {
        **json.loads(teacher_file.read_text(encoding="utf-8")),
        "initial_validation_loss": log.initial_validation_loss(),
        **finish(trainer, recipe.training, text, use_cache, generation),
        "parameters": student.num_parameters(),
        "seconds": seconds,
    }
    if trainer.is_world_process_zero():
        write_whole(folder / "training.json", json.dumps(report, indent=2) + "\n")
    return report
