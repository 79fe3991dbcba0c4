"""The library's Trainer with a parameter group for gate tables, an exact validation loss and a JSON Lines log."""

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import EvalPrediction, Trainer, TrainerCallback
from transformers.trainer_utils import rotate_checkpoints

from ..files import publish, write_whole
from ..gate_egmla import gate_table_parameters
from ..loss_egmla import IGNORED, token_losses
from . import parallel
from .log import read_log
from .recipe import GateTablesRecipe


class EGMLATrainer(Trainer):
    """
    The library's Trainer with gate tables in a parameter group of their own, and with `gate_tables.parallel` cut by
    columns over the processes. Checkpoints are those of one process either way, and any number of processes may
    continue from them. They are written in `_partial`, which is never pushed, and get their names when they are whole.

    Norms and biases are not decayed either, as everywhere in the library: their size is what they are there to set.
    """

    def __init__(self, *args, gate_tables: GateTablesRecipe | None = None, **kwargs):
        self.gate_tables = gate_tables or GateTablesRecipe()
        self.is_saving = False
        super().__init__(*args, **kwargs)
        self.cuts_tables = self.gate_tables.parallel and self.args.world_size > 1
        if self.cuts_tables:
            parallel.shard_gate_tables(self.model)

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        if self.optimizer is not None:
            return self.optimizer
        model = self.model if model is None else model
        optimizer = super().create_optimizer(model)
        tables = [parameter for parameter in gate_table_parameters(model) if parameter.requires_grad]
        apart = set(map(id, tables))
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in apart]
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        if tables:
            learning_rate = self.gate_tables.learning_rate or self.args.learning_rate
            settings = {"lr": learning_rate, "weight_decay": self.gate_tables.weight_decay}
            optimizer.add_param_group({"params": tables, **settings})
        if self.cuts_tables:
            self.optimizer.register_load_state_dict_pre_hook(parallel.cut_optimizer_state)
        return self.optimizer

    def _wrap_model(self, model, training=True, dataloader=None):
        model = super()._wrap_model(model, training, dataloader)
        if training and self.cuts_tables and not isinstance(model, DistributedDataParallel):
            # accelerate wraps no model that has sharded parameters, though DDP leaves these alone.
            model = self.accelerator.prepare_model(model, evaluation_mode=True)
            model = DistributedDataParallel(model, **self.accelerator.ddp_handler.to_kwargs())
        return model

    def _get_output_dir(self, trial):
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, "_partial") if self.is_saving else folder

    def _save_checkpoint(self, model, trial):
        folder = Path(self._get_output_dir(trial))
        checkpoint = folder / f"checkpoint-{self.state.global_step}"
        partial = folder / "_partial" / checkpoint.name
        if self.args.should_save:
            shutil.rmtree(partial.parent, ignore_errors=True)  # of a process that was killed
        self.accelerator.wait_for_everyone()
        self.is_saving = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.is_saving = False
        self.accelerator.wait_for_everyone()
        best = self.state.best_model_checkpoint
        if best is not None and Path(best) == partial:
            self.state.best_model_checkpoint = str(checkpoint)
        if self.args.should_save:
            self.state.save_to_json(partial / "trainer_state.json")
            publish(partial, checkpoint)
            shutil.rmtree(partial.parent, ignore_errors=True)
            if self.args.push_to_hub:
                self._push_from_checkpoint(str(checkpoint))
            rotate_checkpoints(folder, self.args.save_total_limit, self.state.best_model_checkpoint, use_mtime=True)
        self.accelerator.wait_for_everyone()

    def _push_from_checkpoint(self, checkpoint_folder):
        if not self.is_saving:  # else its name is not the last one yet
            super()._push_from_checkpoint(checkpoint_folder)

    def _save(self, output_dir=None, state_dict=None):
        if self.cuts_tables and state_dict is None:
            state_dict = parallel.full_state_dict(self.model)
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir):
        if not self.cuts_tables:
            return super()._save_optimizer_and_scheduler(output_dir)
        whole = parallel.full_optimizer_state_dict(self.optimizer)
        hook = self.optimizer.optimizer.register_state_dict_post_hook(lambda optimizer, state_dict: whole)
        super()._save_optimizer_and_scheduler(output_dir)  # of which the first process only asks for the state
        hook.remove()


def predicted_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Losses of all predicted tokens, [B, S - 1], zero where labels are -100; keeps evaluation from storing logits."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    targets = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    return token_losses(logits.flatten(0, 1), targets.flatten()).view(labels.shape)[:, :-1]


def mean_token_loss(prediction: EvalPrediction) -> dict[str, float]:
    """The validation loss over all tokens alike, which replaces Trainer's mean over batches, and their number."""
    tokens = int((prediction.label_ids[:, 1:] != IGNORED).sum())
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

    def initial_validation_loss(self) -> float | None:
        """The validation loss at step 0, if it was evaluated then."""
        lines = (line for line in read_log(self.path) if line["step"] == 0)
        return next((line["eval_loss"] for line in lines if "eval_loss" in line), None)

    def on_train_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter()
        if state.is_world_process_zero and self.path.exists():
            # A run that left no checkpoint is forgotten.
            kept = [line for line in read_log(self.path) if line["step"] <= state.global_step and state.global_step]
            self.seconds_before = kept[-1]["seconds"] if kept else 0.0
            write_whole(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, "seconds": round(self.seconds, 1), **logs}) + "\n")
