"""Training by recipe: what a recipe promises, and what the embedded model is."""

import importlib.util
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tracemalloc
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from datasets import Dataset
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_gqa import tiny_llama
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import modeling_egmla  # noqa: F401  registers the Auto classes
from modeling_egmla.conversion.vocabulary import leading_ids
from modeling_egmla.files import write_whole
from modeling_egmla.training import EGMLATrainer, RecipeError, load_recipe, run, train
from modeling_egmla.training.arguments import build_arguments
from modeling_egmla.training.data import (
    bits_per_byte,
    is_validation,
    load_documents,
    pack_documents,
    split_documents,
    train_tokenizer,
    unigram_loss,
)
from modeling_egmla.training.plot import loss_differences, plot_runs
from modeling_egmla.training.recipe import REFUSED_ARGUMENTS, DataRecipe, GateTablesRecipe, ModelRecipe
from modeling_egmla.training.run import build_model, last_checkpoint
from modeling_egmla.training.trainer import JSONLinesLog


EMBEDDED = files("modeling_egmla.configuration") / "egmla-sotu"
# Written for this test in the language of the messages, so that it is in no document.
EXCERPT = (
    "The condition of the Treasury and the faithful execution of the laws are matters to which the attention of "
    "Congress is respectfully invited. The reports of the several Departments will show in detail what has been done "
    "during the past year. I recommend that provision be made by law for the relief of the people, and that the "
    "United States continue to maintain peace and friendship with all nations."
)


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    """Forty short documents of made-up sentences."""
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    words = ["the", "state", "of", "union", "law", "peace", "trade", "people", "war", "treaty", "army", "tax", "land"]
    for number in range(40):
        sentences = [" ".join(rng.choices(words, k=8)) + "." for _ in range(25)]
        (folder / f"{number:02}.txt").write_text("\n".join(sentences), encoding="utf-8")
    return folder


@pytest.fixture
def recipe(text_folder, tmp_path):
    """A tiny recipe, as a dictionary; write it with `write_recipe`."""
    return {
        "model": {
            "config": {
                "vocab_size": 320,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "kv_lora_rank": 8,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 8,
                "v_head_dim": 8,
                "kv_gate_dim": 8,
                "max_position_embeddings": 32,
            }
        },
        "tokenizer": {"vocab_size": 300},
        "data": {"files": [str(text_folder / "*.txt")], "validation_share": 0.2, "sequence_length": 32},
        "training": {
            "output_dir": str(tmp_path / "out"),
            "batch_tokens": 128,
            "sequences_per_device": 2,
            "steps": 8,
            "learning_rate": 0.01,
            "eval_steps": 4,
            "save_steps": 4,
            "logging_steps": 1,
            "arguments": {"disable_tqdm": True},
        },
    }


@pytest.fixture
def streamed(tmp_path):
    """A recipe's `data` for a stream of 120 documents from three files."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in range(3):
        rows = [{"text": f"Document {number} of shard {shard}, on peace.", "id": number} for number in range(40)]
        (folder / f"part_{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "files": [str(folder / "*.jsonl")],
        "streaming": True,
        "shuffle_buffer": 30,
        "validation_share": 0.2,
        "validation_documents": 3,
        "sequence_length": 32,
    }


@pytest.fixture
def start(recipe, tmp_path):
    """Folder of a tiny model with its tokenizer, to fine-tune."""
    folder = str(tmp_path / "start")
    documents = load_documents(DataRecipe(**recipe["data"]))
    tokenizer = train_tokenizer(documents, recipe["tokenizer"]["vocab_size"])
    model = build_model(ModelRecipe(**recipe["model"]), tokenizer, seed=3)
    model.generation_config.update(do_sample=True, temperature=0.8)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_recipe(recipe, folder):
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def test_recipe_trains_a_model_that_loads(recipe, tmp_path):
    """A recipe makes a folder that the Auto classes load, whose loss fell and is the one that was reported."""
    recipe["data"]["sequence_length"] = 24
    recipe["training"].update(steps=40, eval_steps=20, save_steps=40, save_dtype="bfloat16", batch_tokens=120)
    recipe["training"]["sequences_per_device"] = 5  # of which neither text is a multiple
    recipe["generation"] = {"do_sample": True, "top_p": 0.9}
    report = train(write_recipe(recipe, tmp_path))
    folder = tmp_path / "out"

    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    evaluations = [row["eval_loss"] for row in log if "eval_loss" in row]
    assert len(evaluations) == 3 and evaluations[1] < evaluations[0]
    assert report["validation_loss"] < report["unigram_validation_loss"]
    assert (folder / "loss.png").exists() == (importlib.util.find_spec("matplotlib") is not None)
    assert json.loads((folder / "training.json").read_text()) == report

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32 and model.config.vocab_size == 320
    assert model.generation_config.suppress_tokens == list(range(len(tokenizer), 320))
    assert model.generation_config.top_p == 0.9 and model.config.use_cache
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118
        assert weights.get_tensor("model.embed_tokens.weight").dtype == torch.bfloat16

    # The validation loss counts every token once, blocks and batches of unequal length included.
    documents = load_documents(load_recipe(folder / "recipe.yaml").data)
    validation = pack_documents(split_documents(documents, 0.2)[1], tokenizer, 24, keep_all=True)
    assert len(validation) % 5
    total, count = 0.0, 0
    for block in validation:
        ids, labels = torch.tensor([block["input_ids"]]), torch.tensor([block["labels"]])
        targets = (labels[:, 1:] != -100).sum().item()
        total += model(input_ids=ids, labels=labels).loss.item() * targets
        count += targets
    texts = tokenizer(list(split_documents(documents, 0.2)[1]["text"]))["input_ids"]
    assert count == report["validation_tokens"] == sum(len(ids) + 1 for ids in texts)
    assert total / count == pytest.approx(report["validation_loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("section", "change", "named"),
    [
        ("training", {"learning_rat": 1.0}, "training.learning_rat"),
        ("training", {"learning_rate": "fast"}, "training.learning_rate"),
        ("training", {"learning_rate": None}, "learning_rate"),
        ("training", {"steps": "many"}, "steps"),
        ("training", {"steps": -1}, "steps"),
        ("training", {"epochs": 1}, "epochs"),
        ("training", {"batch_tokens": 100}, "training.batch_tokens"),
        ("training", {"schedule": "cosin"}, "training.schedule"),
        ("training", {"arguments": {"bf17": True}}, "training.arguments.bf17"),
        ("training", {"arguments": {"gradient_accumulation_steps": 2}}, "training.batch_tokens"),
        ("training", {"arguments": {"per_device_train_batch_size": 2}}, "training.sequences_per_device"),
        ("training", {"arguments": {"weight_decay": 0.5}}, "training.weight_decay"),
        ("training", {"arguments": {"include_num_input_tokens_seen": "no"}}, "include_num_input_tokens_seen"),
        ("training", {"arguments": {"hub_token": "hf_abc"}}, "training.arguments.hub_token"),
        ("training", {"arguments": {"push_to_hub": True}}, "training.arguments.push_to_hub"),
        ("training", {"arguments": {"resume_from_checkpoint": "x"}}, "training.arguments.resume_from_checkpoint"),
        ("training", {"arguments": {"dataloader_drop_last": True}}, "training.arguments.dataloader_drop_last"),
        ("training", {"arguments": {"save_only_model": True}}, "training.arguments.save_only_model"),
        ("training", {"arguments": {"adam_epsilon": "small"}}, "training.arguments.adam_epsilon"),
        ("model", {"config": {"hidden": 3}}, "model.config.hidden"),
        ("model", {"path": "somewhere"}, "path"),
        ("data", {"files": ["nothing-here/*.txt"]}, "data.files"),
        ("data", {"validation_share": 2}, "validation_share"),
        ("training", {"schedule_arguments": {"num_cycels": 2}}, "training.schedule_arguments"),
        ("training", {"arguments": {"bf16": True, "fp16": True}}, "training.arguments"),
        ("model", {"config": {"vocab_size": 320, "kv_gate": "multiplied"}}, "model.config"),
        ("model", {"preset": "egmla-base"}, "model.preset"),
        ("tokenizer", {"path": "nowhere/at-all", "vocab_size": None}, "tokenizer.path"),
        ("data", {"files": None, "dataset": "nowhere/at-all"}, "data.dataset"),
        ("data", {"sequence_length": 1}, "data.sequence_length"),
        ("data", {"streaming": True}, "data.validation_documents"),
        ("data", {"streaming": True, "validation_documents": 3}, "tokenizer.vocab_size"),
        ("lora", {"r": 4}, "model.path"),
        ("generation", {"temprature": 1.0}, "generation.temprature"),
        ("generation", {"temperature": 0.5}, "generation"),
        ("generation", {"max_new_tokens": -3}, "generation"),
        ("generation", {"suppress_tokens": 5}, "generation.suppress_tokens"),
        ("generation", {"eos_token_id": 7}, "generation.eos_token_id"),
        ("training", {"arguments": {"label_names": ["x"]}}, "training.arguments.label_names"),
        ("optimizer", {"name": "sgd"}, "optimizer"),
    ],
)
def test_wrong_key_is_named_before_training(recipe, tmp_path, section, change, named):
    """A recipe that cannot run says which key is wrong, and nothing is written."""
    recipe.setdefault(section, {}).update(change)
    with pytest.raises(RecipeError, match=named.replace(".", r"\.")):
        train(write_recipe(recipe, tmp_path))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("section", "change", "named"),
    [
        ("lora", {"rr": 4}, "lora.rr"),
        ("lora", {"inference_mode": True}, "lora.inference_mode"),
        ("lora", {"target_modules": ["w_q"]}, "lora"),
        ("model", {"path": "nowhere/at-all"}, "model.path"),
        ("training", {"epochs": 1, "steps": None}, "training.epochs"),
    ],
)
def test_wrong_key_of_fine_tuning_is_named(recipe, tmp_path, monkeypatch, section, change, named):
    """So do a recipe for fine-tuning and one for a stream."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    recipe["model"] = {"path": "egmla-sotu"}
    recipe["tokenizer"] = {"path": "egmla-sotu"}
    recipe["data"] |= {"streaming": section == "training", "validation_documents": 3}
    recipe.setdefault(section, {}).update(change)
    with pytest.raises(RecipeError, match=named.replace(".", r"\.")):
        train(write_recipe(recipe, tmp_path))
    assert not (tmp_path / "out").exists()


def test_model_of_another_kind_is_refused(recipe, start, tmp_path):
    """A folder with a Llama does not become a half random EG-MLA: the message names the way to bring it over."""
    recipe["model"], recipe["tokenizer"] = {"path": str(tmp_path / "llama")}, {"path": start}
    tiny_llama().save_pretrained(tmp_path / "llama")
    with pytest.raises(RecipeError, match=r"`model\.path`.*type llama.*egmla convert"):
        train(write_recipe(recipe, tmp_path))


@pytest.mark.parametrize("lacking", ["missing", "another shape"])
def test_model_with_missing_weights_is_refused(recipe, start, tmp_path, lacking):
    """Nor are weights drawn at random where the folder lacks some, or has them for other sizes."""
    recipe["model"] = recipe["tokenizer"] = {"path": start}
    weights, name = load_file(Path(start) / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    if lacking == "missing":
        del weights[name]
    else:
        weights[name] = weights[name][1:].clone()
    save_file(weights, Path(start) / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RecipeError, match=rf"`model\.path`.*{re.escape(name)}.*{lacking}"):
        train(write_recipe(recipe, tmp_path))


@pytest.mark.parametrize("key", ["model", "tokenizer", "data", "training.output_dir", "training.batch_tokens"])
def test_missing_key_is_named(recipe, tmp_path, key):
    """A recipe that lacks what it needs says what."""
    *sections, last = key.split(".")
    mapping = recipe
    for section in sections:
        mapping = mapping[section]
    del mapping[last]
    with pytest.raises(RecipeError, match=key.replace(".", r"\.")):
        load_recipe(write_recipe(recipe, tmp_path))


def test_number_without_dot_is_a_number(recipe, tmp_path):
    """YAML reads 3e-4 as a string; a learning rate written so is still a number."""
    recipe["training"]["learning_rate"] = "3e-4"
    recipe["training"]["arguments"] = {"adam_epsilon": "1e-9", "optim_args": "a=1"}
    training = load_recipe(write_recipe(recipe, tmp_path)).training
    assert training.learning_rate == 3e-4 and training.arguments == {"adam_epsilon": 1e-9, "optim_args": "a=1"}


def test_several_devices_in_one_process_are_refused(recipe, tmp_path, monkeypatch):
    """Trainer would give each device a batch, and steps more tokens than the recipe says."""
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(RecipeError, match=r"batch_tokens.*each of 2 devices.*torchrun"):
        train(write_recipe(recipe, tmp_path))


def test_a_run_without_a_recipe_is_not_continued(recipe, tmp_path):
    """Checkpoints of a script of one's own, about which nothing is known, are left alone."""
    (tmp_path / "out" / "checkpoint-4").mkdir(parents=True)
    with pytest.raises(RecipeError, match=r"output_dir.*checkpoint-4 of a run without a recipe"):
        train(write_recipe(recipe, tmp_path))


def test_finished_run_keeps_its_best_weights(recipe, tmp_path):
    """A run that ends with its best checkpoint, here the worst, does so when it is called again."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    recipe["training"] |= {"steps": 8, "eval_steps": 4, "save_steps": 4, "arguments": best}
    path = write_recipe(recipe, tmp_path)
    report = train(path)
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["eval_loss"] for line in reversed(log) if "eval_loss" in line}
    assert report["validation_loss"] == pytest.approx(losses[4], abs=1e-6) and losses[8] < losses[4] - 1e-3
    assert train(path)["validation_loss"] == report["validation_loss"]


def test_suppressed_tokens_are_kept(recipe, start, tmp_path):
    """Ids without a token, wherever they are, join those that the recipe or the base model suppresses."""
    recipe["model"] = recipe["tokenizer"] = {"path": start}
    recipe["training"]["steps"] = 1
    recipe["generation"] = {"suppress_tokens": [7]}
    train(write_recipe(recipe, tmp_path))
    tokenizer, config = AutoTokenizer.from_pretrained(start), AutoConfig.from_pretrained(start)
    unused = set(range(config.vocab_size)) - set(tokenizer.get_vocab().values())
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings["suppress_tokens"] == sorted({7, *unused})


def test_padding_that_became_tokens_is_generated(recipe, start, tmp_path):
    """Ids that had no token when the base model was saved, and have one now, are suppressed no longer."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(start), AutoTokenizer.from_pretrained(start)
    size, before = model.config.vocab_size, len(tokenizer)
    model.generation_config.suppress_tokens = [7, *range(before, size)]
    model.save_pretrained(start)
    tokenizer.add_special_tokens({"eos_token": "<end>", "additional_special_tokens": ["<user>"]})
    tokenizer.save_pretrained(start)
    recipe["model"] = recipe["tokenizer"] = {"path": start}
    recipe["training"]["steps"] = 1
    train(write_recipe(recipe, tmp_path))
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings["suppress_tokens"] == [7, *range(before + 2, size)]


def test_pushes_are_of_whole_checkpoints(recipe, tmp_path, monkeypatch):
    """What `EGMLATrainer` pushes during a run has its last name by then, and nothing half-written lies beside it."""
    pushed = []
    monkeypatch.delitem(REFUSED_ARGUMENTS, "push_to_hub")  # of recipes, whose folder is not what it would push

    def push(self, folder):
        assert not (Path(folder).parent / "_partial").exists()
        pushed.append(Path(folder).name)

    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self, **kwargs: None)
    monkeypatch.setattr(Trainer, "push_to_hub", lambda self, *args, **kwargs: None)
    recipe["training"] |= {"steps": 8, "save_steps": 4, "arguments": {"push_to_hub": True}}
    train(write_recipe(recipe, tmp_path))
    assert pushed == ["checkpoint-4", "checkpoint-8"]


def die_at(monkeypatch, step):
    """Lets training die when it has logged this step."""
    on_log = JSONLinesLog.on_log

    def die(self, args, state, control, **kwargs):
        on_log(self, args, state, control, **kwargs)
        if state.global_step == step:
            with self.path.open("a") as file:
                file.write('{"step": ')  # a line that it could not finish
            raise KeyboardInterrupt

    monkeypatch.setattr(JSONLinesLog, "on_log", die)


@pytest.mark.parametrize("kind", ["pretraining", "stream", "lora"])
def test_stopped_run_continues_to_the_same_weights(recipe, streamed, start, tmp_path, monkeypatch, kind):
    """
    A run that dies and is started again ends with the weights, and the log, of one that did not: on text that is read
    at once or streamed, whole or with LoRA.
    """
    if kind == "stream":
        recipe["tokenizer"], recipe["data"] = {"path": "egmla-sotu"}, streamed
        recipe["model"]["config"].pop("vocab_size")
    if kind == "lora":
        recipe["model"] = recipe["tokenizer"] = {"path": start}
        recipe["lora"] = {"r": 2, "target_modules": "all-linear", "lora_dropout": 0.1}
    train(write_recipe(recipe, tmp_path))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()

    recipe["training"]["output_dir"] = str(tmp_path / "stopped")
    path = write_recipe(recipe, tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        die_at(patch, 6)
        train(path)
    train(path)
    resumed = AutoModelForCausalLM.from_pretrained(tmp_path / "stopped").state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)

    log = [json.loads(line) for line in (tmp_path / "stopped" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log if "loss" in row] == list(range(1, 9))

    # Once more: it is finished, and stays as it is.
    assert train(path)["steps"] == 8
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "stopped").state_dict()
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def die_while_saving(patch, step):
    """Lets training die when it has written all of this step's checkpoint but the end."""
    save = EGMLATrainer._save_rng_state

    def die(self, output_dir):
        if self.state.global_step == step:
            raise InterruptedError
        save(self, output_dir)

    patch.setattr(EGMLATrainer, "_save_rng_state", die)


def test_run_that_dies_while_saving_continues(recipe, tmp_path, monkeypatch):
    """A checkpoint that is not whole has no name that it could be taken by: the run continues from the one before."""
    recipe["training"]["arguments"] |= {"metric_for_best_model": "loss", "load_best_model_at_end": True}
    train(write_recipe(recipe, tmp_path))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    recipe["training"]["output_dir"] = str(tmp_path / "stopped")
    path = write_recipe(recipe, tmp_path)
    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        die_while_saving(patch, 8)
        train(path)
    checkpoints = sorted(folder.name for folder in (tmp_path / "stopped").glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-4"]
    train(path)
    resumed = AutoModelForCausalLM.from_pretrained(tmp_path / "stopped").state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert not (tmp_path / "stopped" / "_partial").exists()
    state = json.loads((tmp_path / "stopped" / "checkpoint-8" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "stopped" / "checkpoint-8")

    recipe["training"]["steps"] = 12
    train(write_recipe(recipe, tmp_path))
    checkpoints = sorted(folder.name for folder in (tmp_path / "stopped").glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-12", "checkpoint-8"]  # the last two


def test_run_of_another_text_is_refused(recipe, text_folder, tmp_path):
    """A run is not continued on a text that has changed, be it by one letter; put back, it is."""
    own = tmp_path / "text"
    shutil.copytree(text_folder, own)
    recipe["data"]["files"] = [str(own / "*.txt")]
    recipe["training"]["steps"] = 4
    path = write_recipe(recipe, tmp_path)
    train(path)
    changed = next(file for file in sorted(own.iterdir()) if not is_validation(file.read_text(), 0.2))
    before = changed.read_text()
    changed.write_text(before + "a")
    with pytest.raises(RecipeError, match=r"output_dir.*another text .*training_"):
        train(path)
    changed.write_text(before)
    assert train(path)["steps"] == 4


def test_run_of_another_stream_is_refused(recipe, streamed, tmp_path):
    """Of a stream, its files and the validation text count, which are known before it is read."""
    recipe["tokenizer"], recipe["data"] = {"path": "egmla-sotu"}, streamed
    recipe["model"]["config"].pop("vocab_size")
    recipe["training"]["steps"] = 4
    path = write_recipe(recipe, tmp_path)
    train(path)
    with (tmp_path / "shards" / "part_2.jsonl").open("a") as file:
        file.write(json.dumps({"text": "One more.", "id": 40}) + "\n")
    with pytest.raises(RecipeError, match=r"another text .*`bytes`"):
        train(path)


def test_run_of_another_tokenizer_is_refused(recipe, start, tmp_path):
    """A tokenizer whose folder was written anew does not take over a run."""
    recipe["tokenizer"] = {"path": start}
    recipe["training"]["steps"] = 4
    path = write_recipe(recipe, tmp_path)
    train(path)
    assert train(path)["steps"] == 4
    train_tokenizer(load_documents(DataRecipe(**recipe["data"])), 290).save_pretrained(start)
    with pytest.raises(RecipeError, match="another tokenizer"):
        train(path)


def test_run_of_another_base_is_refused(recipe, start, tmp_path):
    """Adapters that were trained on a model are not trained on, nor merged into, what was written in its place."""
    recipe["model"] = recipe["tokenizer"] = {"path": start}
    recipe["lora"] = {"r": 2, "target_modules": "all-linear"}
    recipe["training"]["steps"] = 4
    path = write_recipe(recipe, tmp_path)
    train(path)
    assert train(path)["steps"] == 4
    model = AutoModelForCausalLM.from_pretrained(start)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight += 0.01
    model.save_pretrained(start)
    with pytest.raises(RecipeError, match=r"another model .*`model_sha256`"):
        train(path)


def test_trained_tokenizer_is_kept(recipe, tmp_path, monkeypatch):
    """A run that trained a tokenizer goes on with that one, whatever training another would give today."""
    recipe["training"]["steps"] = 4
    train(write_recipe(recipe, tmp_path))
    recipe["training"]["steps"] = 5
    monkeypatch.setattr(run, "train_tokenizer", None)
    assert train(write_recipe(recipe, tmp_path))["steps"] == 5


def test_tokens_of_whole_passes(recipe, tmp_path):
    """A pass sees every block once, also where its last batch is smaller, and so does one that a longer run adds."""
    del recipe["training"]["steps"]
    recipe["training"].update(eval_steps=100, batch_tokens=32 * 7, sequences_per_device=1)
    for epochs in (1, 2):
        recipe["training"]["epochs"] = epochs
        report = train(write_recipe(recipe, tmp_path))
        blocks = report["training_text_tokens"] // 31
        assert blocks % 7 and report["steps"] == epochs * (blocks // 7 + 1)
        assert report["tokens_seen"] == epochs * blocks * 32 and report["passes"] == epochs


def test_documents_stream(streamed):
    """
    A stream gives every document that is not held out, in the same shuffled order each time, and as validation text
    only documents that are held out; what it trains on begins again when the text ends.
    """
    recipe = DataRecipe(**streamed)
    documents = load_documents(recipe, seed=1)
    train_text, validation_text = split_documents(documents, recipe.validation_share, recipe.validation_documents)
    held_out = [row["text"] for row in documents if is_validation(row["text"], recipe.validation_share)]
    assert len(held_out) > 3 and list(validation_text["text"]) == held_out[:3]
    order = [row["text"] for row in train_text]
    assert len(order) == len(set(order)) == 120 - len(held_out) and not set(order) & set(held_out)
    assert order == [row["text"] for row in split_documents(load_documents(recipe, 1), 0.2, 3)[0]]
    other_seed = [row["text"] for row in load_documents(recipe, 2) if row["text"] in order]
    assert order != sorted(order) and order != other_seed

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    blocks = pack_documents(train_text, tokenizer, 16, keep_all=False)
    once = pack_documents(Dataset.from_dict({"text": order}), tokenizer, 16, keep_all=False)["input_ids"]
    ids = [row["input_ids"] for row in blocks.take(2 * len(once))]
    assert ids == [*once, *once]


@pytest.mark.parametrize("streaming", [False, True])
def test_text_shorter_than_a_block(streamed, streaming):
    """Text that does not fill a block, also a stream's, is said with the recipe's key, before anything is trained."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    documents = load_documents(DataRecipe(**{**streamed, "streaming": streaming}))
    with pytest.raises(RecipeError, match=r"`data\.sequence_length` 9999 is longer"):
        pack_documents(documents, tokenizer, 9999, keep_all=False)


def test_dataset_by_name_streams_and_loads(streamed, tmp_path):
    """`data.dataset` is what `load_dataset` takes, here a folder: read whole, or streamed, with the same documents."""
    texts = []
    for streaming in (False, True):
        recipe = DataRecipe(**{**streamed, "files": None, "dataset": str(tmp_path / "shards"), "streaming": streaming})
        texts.append({row["text"] for row in load_documents(recipe)})
    assert texts[0] == texts[1] and len(texts[0]) == 120


def test_limited_validation(recipe, tmp_path):
    """`validation_documents` limits what is evaluated; held-out documents beyond it are still not trained on."""
    documents = load_documents(DataRecipe(**recipe["data"]))
    train_text, validation_text = split_documents(documents, 0.2)
    fewer_train, fewer = split_documents(documents, 0.2, 2)
    assert list(fewer["text"]) == list(validation_text["text"])[:2] and len(validation_text) > 2
    assert list(fewer_train["text"]) == list(train_text["text"])


def test_adapters_on_tied_weights_are_refused(recipe, start, tmp_path):
    """Merged into the embedding, an adapter would change the head that shares its weights, trained without it."""
    recipe["model"] = recipe["tokenizer"] = {"path": start}
    recipe["lora"] = {"r": 4, "target_modules": ["q_proj", "embed_tokens"]}
    with pytest.raises(RecipeError, match=r"`lora\.target_modules`: .*embed_tokens shares its weights"):
        train(write_recipe(recipe, tmp_path))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"fp16": True}, "fp16"), ({"accelerator_config": {"split_batches": True}}, "split_batches")],
)
def test_arguments_that_would_do_something_else_are_refused(recipe, tmp_path, arguments, named):
    """On a CPU fp16 would leave float32 as it is, and split batches would make smaller steps than the recipe says."""
    recipe["training"]["arguments"] |= {"use_cpu": True, **arguments}
    with pytest.raises(RecipeError, match=named):
        train(write_recipe(recipe, tmp_path))


def test_lora_recipe_saves_adapter_and_merged_model(recipe, start, tmp_path):
    """With `lora` the folder is the merged model; `adapter/` on the model it was trained on gives the same."""
    peft = pytest.importorskip("peft")
    recipe["model"] = recipe["tokenizer"] = {"path": start}
    recipe["lora"] = {"r": 4, "target_modules": "all-linear"}
    recipe["training"].update(steps=20, eval_steps=10, save_steps=20)
    report = train(write_recipe(recipe, tmp_path))
    assert report["validation_loss"] < report["initial_validation_loss"] - 0.05

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(start)
    assert report["parameters"] == base.num_parameters() == merged.num_parameters()
    assert 0 < report["trainable_parameters"] < base.num_parameters()
    assert merged.generation_config.temperature == base.generation_config.temperature == 0.8
    assert torch.equal(merged.model.embed_tokens.weight, base.model.embed_tokens.weight)
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        before = base(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "out" / "adapter")
        assert (merged(ids).logits - before).abs().max() > 1e-2
        torch.testing.assert_close(adapted(input_ids=ids).logits, merged(ids).logits, atol=1e-4, rtol=1e-4)


def test_lora_in_bfloat16_reports_one_precision(recipe, start, tmp_path):
    """The loss of the merged model is computed as the others of the run are, so that a second call gives it again."""
    pytest.importorskip("peft")
    recipe["model"] = recipe["tokenizer"] = {"path": start}
    recipe["lora"] = {"r": 4, "target_modules": "all-linear"}
    recipe["training"] |= {"steps": 2, "save_steps": 2, "arguments": {"bf16": True}}
    report = train(write_recipe(recipe, tmp_path))
    assert train(write_recipe(recipe, tmp_path))["validation_loss"] == report["validation_loss"]


@pytest.mark.slow  # starts processes
@pytest.mark.parametrize("kind", ["lora", "stream"])
def test_two_processes_train_as_one(recipe, start, streamed, tmp_path, kind):
    """Fine-tuning under torchrun, with LoRA or whole on a stream, ends with the weights and losses of one process."""
    recipe["model"] = recipe["tokenizer"] = {"path": start}
    recipe["lora"] = {"r": 2, "target_modules": "all-linear"} if kind == "lora" else None
    recipe["data"] = streamed if kind == "stream" else recipe["data"] | {"validation_documents": 2}
    recipe["training"]["arguments"] = {"disable_tqdm": True, "use_cpu": True}
    first = train(write_recipe(recipe, tmp_path))
    recipe["training"]["output_dir"] = str(tmp_path / "two")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(Path(sys.executable).parent / "egmla"), "train", str(write_recipe(recipe, tmp_path))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    second = json.loads((tmp_path / "two" / "training.json").read_text())
    for key in ("initial_validation_loss", "validation_loss"):
        assert second[key] == pytest.approx(first[key], abs=1e-5)
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("out", "two"))
    for name, weight in one.items():
        if "kv_gate_norm.bias" not in name:  # half of it has no gradient, and Adam moves it by rounding noise
            torch.testing.assert_close(two[name], weight, atol=1e-4, rtol=0, msg=name)


def test_initial_loss_is_that_of_the_model(recipe, start, tmp_path):
    """Fine-tuning reports the loss that it started from, also after a continuation."""
    recipe["model"] = recipe["tokenizer"] = {"path": start}
    first = train(write_recipe(recipe, tmp_path))
    recipe["training"]["steps"] = 10
    second = train(write_recipe(recipe, tmp_path))
    assert second["steps"] == 10
    assert first["initial_validation_loss"] == second["initial_validation_loss"] > first["validation_loss"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(start), AutoTokenizer.from_pretrained(start)
    _, validation_text = split_documents(load_documents(DataRecipe(**recipe["data"])), 0.2)
    total = count = 0
    for block in pack_documents(validation_text, tokenizer, 32, keep_all=True):
        ids, labels = torch.tensor([block["input_ids"]]), torch.tensor([block["labels"]])
        targets = int((labels[:, 1:] != -100).sum())
        total += model(input_ids=ids, labels=labels).loss.item() * targets
        count += targets
    assert first["initial_validation_loss"] == pytest.approx(total / count, abs=1e-5)


def write_log(folder, losses):
    folder.mkdir()
    lines = [{"step": step, "eval_loss": loss} for step, loss in losses.items()]
    lines += [{"step": step, "loss": loss + 0.1} for step, loss in losses.items()]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_two_runs_are_compared(tmp_path):
    """`egmla plot A B` subtracts validation losses by step and draws them; without common steps it refuses."""
    pytest.importorskip("matplotlib")
    first = write_log(tmp_path / "first", {10: 3.0, 20: 2.5, 30: 2.25})
    second = write_log(tmp_path / "second", {10: 3.25, 20: 2.0, 40: 1.0})
    assert loss_differences(first, second) == {10: -0.25, 20: 0.5}
    plot_runs([first, second], tmp_path / "new" / "both.png")
    assert (tmp_path / "new" / "both.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="eval_steps"):
        loss_differences(first, write_log(tmp_path / "third", {5: 1.0}))
    with pytest.raises(ValueError, match=r"log\.jsonl"):
        plot_runs([tmp_path], tmp_path / "x.png")


def test_output_folder_of_another_recipe_is_refused(recipe, tmp_path):
    """A run never continues from the checkpoints of another recipe."""
    recipe["training"]["steps"] = 1
    train(write_recipe(recipe, tmp_path))
    recipe["training"]["weight_decay"] = 0.5
    with pytest.raises(RecipeError, match=r"training\.output_dir"):
        train(write_recipe(recipe, tmp_path))


def test_checkpoint_is_looked_for_before_there_is_a_folder(recipe, tmp_path):
    """Of several processes, those that look before the first one has made the folder find no checkpoint."""
    recipe["training"]["steps"] = 12
    assert last_checkpoint(load_recipe(write_recipe(recipe, tmp_path))) is None
    (tmp_path / "out" / "checkpoint-12").mkdir(parents=True)
    (tmp_path / "out" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert last_checkpoint(load_recipe(write_recipe(recipe, tmp_path))) == str(tmp_path / "out" / "checkpoint-12")


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "parquet"])
def test_documents_load_from_files(tmp_path, suffix):
    """Text files are a document each; JSON Lines and parquet have one a row, in the column that is named."""
    texts = ["peace\n\nand trade\n", "war"]
    if suffix == "txt":
        for number, text in enumerate(texts):
            (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    else:
        dataset = Dataset.from_dict({"message": texts, "year": [1790, 1812]})
        getattr(dataset, {"jsonl": "to_json", "parquet": "to_parquet"}[suffix])(tmp_path / f"all.{suffix}")
    column = "text" if suffix == "txt" else "message"
    documents = load_documents(DataRecipe(files=[str(tmp_path / f"*.{suffix}")], text_column=column))
    assert documents.column_names == ["text"] and list(documents["text"]) == texts
    with pytest.raises(RecipeError, match=r"data\.text_column"):
        load_documents(DataRecipe(files=[str(tmp_path / f"*.{suffix}")], text_column="nothing"))


@pytest.mark.parametrize("kind", ["whole", "stream", "numbers"])
def test_row_without_text_is_named(tmp_path, kind):
    """A null in the column of the text, or a column of numbers, is named with its column and, if known, its row."""
    rows = [{"message": number if kind == "numbers" else f"text {number}"} for number in range(20)]
    rows[0 if kind == "numbers" else 7]["message"] = 0 if kind == "numbers" else None
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"files": [str(tmp_path / "*.jsonl")], "text_column": "message"}
    if kind == "stream":
        data = DataRecipe(**files, streaming=True, validation_documents=2)
        with pytest.raises(RecipeError, match="a row of the stream has None in 'message'"):
            split_documents(load_documents(data), 0.2, 2)
    else:
        row, value = (0, "0") if kind == "numbers" else (7, "None")
        with pytest.raises(RecipeError, match=f"row {row}, from 0 .* has {value} in 'message'"):
            load_documents(DataRecipe(**files))


def test_split_keeps_documents_apart():
    """No text is on both sides, copies included, and new documents move no old one."""
    texts = [f"document {number}" for number in range(400)]
    train_text, validation_text = split_documents(Dataset.from_dict({"text": texts + texts[:50]}), 0.1)
    assert not set(train_text["text"]) & set(validation_text["text"])
    assert len(train_text) + len(validation_text) == 450
    assert 20 <= len(set(validation_text["text"])) <= 60

    more = [f"another {number}" for number in range(100)] + texts
    _, validation_of_more = split_documents(Dataset.from_dict({"text": more}), 0.1)
    assert set(validation_of_more["text"]) & set(texts) == set(validation_text["text"])


def test_packing_predicts_every_token_once():
    """Blocks hold all text in order, documents apart, each token predicted once."""
    documents = Dataset.from_dict({"text": ["peace and trade", "war", "the land of the river " * 9]})
    tokenizer = train_tokenizer(documents, 300)
    blocks = pack_documents(documents, tokenizer, 16, keep_all=True)
    predicted = [token for labels in blocks["labels"] for token in labels[1:] if token != -100]
    expected = [i for text in documents["text"] for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    assert predicted == expected
    assert all(len(ids) == 16 for ids in blocks["input_ids"])
    assert tokenizer.decode(tokenizer("Naïve: 1,000 €\n\n x")["input_ids"]) == "Naïve: 1,000 €\n\n x"


def test_packing_begins_documents_as_the_tokenizer_does():
    """Where a tokenizer puts a bos of its own in front of texts, documents have it, and nobody has to predict it."""
    documents = Dataset.from_dict({"text": ["peace and trade", "war"]})
    tokenizer = train_tokenizer(documents, 300)
    assert leading_ids(tokenizer) == []
    tokenizer.add_special_tokens({"bos_token": "<begin>"})
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert leading_ids(tokenizer) == []  # it does not use it
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", bos)]
    )
    assert leading_ids(tokenizer) == [bos]
    (block,) = pack_documents(documents, tokenizer, 32, keep_all=True)
    texts = [tokenizer(text)["input_ids"] for text in documents["text"]]
    expected = [eos, *texts[0], eos, *texts[1], eos]
    assert texts[0][0] == bos and block["input_ids"][: len(expected)] == expected
    wanted = [-100 if token_id == bos else token_id for token_id in expected]
    assert block["labels"] == wanted + [-100] * (32 - len(expected))


def test_dataset_of_mixed_columns_is_named(recipe, tmp_path):
    """The library's own kind of error is one of the recipe's too."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("text", "body"):
        (folder / f"{name}.jsonl").write_text(json.dumps({name: "peace"}) + "\n")
    with pytest.raises(RecipeError, match=r"`data\.dataset`: .*rows cannot be loaded"):
        load_documents(DataRecipe(dataset=str(folder), sequence_length=32))


def test_unigram_loss():
    """The baseline is the entropy of smoothed frequencies."""
    blocks = Dataset.from_dict({"labels": [[0, 1, 1, -100]]})
    train_blocks = Dataset.from_dict({"labels": [[0, 1, 1, 0]]})
    assert unigram_loss(train_blocks, blocks, 2) == pytest.approx(-torch.tensor(0.6).log().item())


def test_unigram_loss_of_much_text():
    """Memory does not grow with the text: here two million tokens, counted a thousand blocks at a time."""
    blocks = Dataset.from_dict({"labels": np.random.default_rng(0).integers(0, 50, (4000, 512))})
    tracemalloc.start()
    loss = unigram_loss(blocks, blocks, 50)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert loss == pytest.approx(np.log(50), abs=1e-3) and peak < 20e6


@pytest.mark.parametrize(
    "change",
    [{"kv_gate_norm": "none"}, {"kv_gate": "add"}, {"kv_gate": "none"}, {"layer_group_size": 2}],
    ids=str,
)
def test_ablations_train_by_configuration(recipe, tmp_path, change):
    """The paper's ablations and layer groups are fields beside a preset: they train, and the saved model has them."""
    shape = {**recipe["model"]["config"], "vocab_size": 300}
    recipe["model"] = {"preset": "egmla-base-kv256-emb256", "config": {**shape, **change}}
    recipe["training"].update(steps=12, eval_steps=6, save_steps=12)
    report = train(write_recipe(recipe, tmp_path))
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    first = next(row["loss"] for row in log if "loss" in row)
    assert report["validation_loss"] < first - 0.3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {field: getattr(model.config, field) for field in change} == change
    assert model.config.rope_parameters["rope_theta"] == 10000.0  # of the preset


def test_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """A process that dies while it writes a report or results leaves the old file, and no rest of the new one."""
    path = tmp_path / "new" / "results.json"
    write_whole(path, "old")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
        write_whole(path, "new")
    assert path.read_text() == "old" and list(path.parent.iterdir()) == [path]
    write_whole(path, "new")
    assert path.read_text() == "new"


def test_gate_tables_have_their_own_parameter_group(recipe, tmp_path):
    """Gate tables take their own learning rate and decay; norms and biases are not decayed."""
    recipe["training"]["arguments"]["eval_strategy"] = "no"
    parsed = load_recipe(write_recipe(recipe, tmp_path))
    tokenizer = train_tokenizer(Dataset.from_dict({"text": ["peace and trade"]}), 300)
    model = build_model(parsed.model, tokenizer, seed=0)
    trainer = EGMLATrainer(
        model=model,
        args=build_arguments(parsed.training, parsed.data.sequence_length),
        gate_tables=GateTablesRecipe(learning_rate=0.1, weight_decay=0.01),
    )
    groups = {
        (group["lr"], group["weight_decay"]): {id(parameter) for parameter in group["params"]}
        for group in trainer.create_optimizer().param_groups
    }
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed = {names[i] for i in groups[0.01, 0.1]}
    plain = {names[i] for i in groups[0.01, 0.0]}
    tables = {names[i] for i in groups[0.1, 0.01]}
    assert tables == {name for name in names.values() if "kv_gate_embed" in name}
    assert plain == {name for name in names.values() if "norm" in name}
    assert decayed == set(names.values()) - tables - plain


def test_embedded_model_predicts_english():
    """The model in the package computes in float32, knows its ids, and beats unigrams on text that it never saw."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(EMBEDDED), AutoTokenizer.from_pretrained(EMBEDDED)
    assert model.dtype == torch.float32 and model.config.kv_gate == "multiply" and model.config.use_cache
    assert len(tokenizer) == model.config.vocab_size
    assert model.generation_config.suppress_tokens is None
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.bos_token_id
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)

    ids = tokenizer(EXCERPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    report = json.loads((EMBEDDED / "training.json").read_text(encoding="utf-8"))
    assert loss < 5.0 < report["unigram_validation_loss"]
    assert report["validation_loss"] < report["unigram_validation_loss"] - 1.5


def test_embedded_recipes_differ_by_the_gate_only():
    """The plain MLA beside the embedded model is its equal in all but the gate."""
    folder = files("modeling_egmla.configuration") / "recipes"
    gated, plain = (yaml.safe_load((folder / f"{name}-sotu.yaml").read_text()) for name in ("egmla", "mla"))
    gated["model"]["config"].pop("kv_gate_dim")
    assert gated["model"]["config"].pop("kv_gate") == "multiply"
    assert plain["model"]["config"].pop("kv_gate") == "none"
    gated["training"].pop("output_dir"), plain["training"].pop("output_dir")
    assert gated == plain


def test_fields_reach_the_trainer(recipe, tmp_path):
    """What a recipe says of optimizer and schedule is what Trainer is told; none of it is a default."""
    said = {"adam_beta2": 0.9, "warmup_steps": 3, "max_grad_norm": 0.7, "weight_decay": 0.02, "seed": 5}
    recipe["training"].update(said, schedule="linear")
    arguments = build_arguments(load_recipe(write_recipe(recipe, tmp_path)).training, 32)
    assert {name: getattr(arguments, name) for name in said} == said
    assert arguments.lr_scheduler_type == "linear"


def test_bits_per_byte():
    """One bit a token, two tokens a byte, and a letter of two bytes."""
    assert bits_per_byte(math.log(2), 10, Dataset.from_dict({"text": ["\u00e9a", "bc"]})) == pytest.approx(10 / 5)


def test_tokenizers_are_trained_on_training_text(recipe, tmp_path, monkeypatch):
    """What is held out does not shape the vocabulary."""
    seen = []

    def spy(documents, *args, **kwargs):
        seen.extend(documents["text"])
        return train_tokenizer(documents, *args, **kwargs)

    monkeypatch.setattr(run, "train_tokenizer", spy)
    parsed = load_recipe(write_recipe(recipe, tmp_path))
    train_texts, held_out = split_documents(load_documents(parsed.data), parsed.data.validation_share)
    train(write_recipe(recipe, tmp_path))
    assert sorted(seen) == sorted(train_texts["text"])
    assert not set(seen) & set(held_out["text"])


def test_a_run_is_not_made_shorter(recipe, tmp_path):
    """Fewer steps than were taken would be reported with the weights of more."""
    train(write_recipe(recipe, tmp_path))
    kept = (tmp_path / "out" / "recipe.yaml").read_bytes()
    recipe["training"]["steps"] = 4
    with pytest.raises(RecipeError, match=r"`training\.steps` is 4, but the run in .* has taken 8"):
        train(write_recipe(recipe, tmp_path))
    assert (tmp_path / "out" / "recipe.yaml").read_bytes() == kept


def test_epochs_are_not_made_fewer(recipe, tmp_path):
    """Neither are passes; as many again, or more, are no other run."""
    del recipe["training"]["steps"]
    recipe["training"] |= {"epochs": 0.5, "save_steps": 1000}
    report = train(write_recipe(recipe, tmp_path))
    recipe["training"]["epochs"] = 0.25
    with pytest.raises(RecipeError, match=r"`training\.epochs` is 0\.25, but the run in .* has taken 0\.5"):
        train(write_recipe(recipe, tmp_path))
    recipe["training"]["epochs"] = 0.5
    assert train(write_recipe(recipe, tmp_path))["steps"] == report["steps"]


def test_generation_that_could_not_be_saved_is_refused_first(recipe, start, tmp_path):
    """What base model and recipe say together is validated before the first step, not when all is trained."""
    recipe["model"] = recipe["tokenizer"] = {"path": start}
    recipe["generation"] = {"do_sample": False}  # with the base model's temperature
    with pytest.raises(RecipeError, match=r"`model\.path` and `generation`: .*temperature"):
        train(write_recipe(recipe, tmp_path))
    assert not (tmp_path / "out" / "recipe.yaml").exists()


def test_a_run_that_never_began_is_in_nobodys_way(recipe, tmp_path, monkeypatch):
    """A recipe that fails at its first step may be corrected in place; what generation_config says, at any time."""
    with monkeypatch.context() as patch:
        patch.setattr(EGMLATrainer, "training_step", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(write_recipe(recipe, tmp_path))
    assert (tmp_path / "out" / "recipe.yaml").exists()
    recipe["training"]["learning_rate"] = 0.02
    train(write_recipe(recipe, tmp_path))
    recipe["generation"] = {"do_sample": True, "top_p": 0.9}
    train(write_recipe(recipe, tmp_path))
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["top_p"] == 0.9


def test_no_report_of_other_weights(recipe, tmp_path, monkeypatch):
    """A run that is made longer and dies while it saves its result has no report, and not that of the shorter one."""
    train(write_recipe(recipe, tmp_path))
    recipe["training"]["steps"] = 12

    def die(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "save_final", die)
    with pytest.raises(KeyboardInterrupt):
        train(write_recipe(recipe, tmp_path))
    assert not (tmp_path / "out" / "training.json").exists()
    monkeypatch.undo()
    assert train(write_recipe(recipe, tmp_path))["steps"] == 12


@pytest.mark.parametrize(
    ("name", "content"), [("a.txt", b"\xff\xfe\xff"), ("a.jsonl", b'{"text": "a"\n'), ("a.jsonl", b"")], ids=str
)
def test_unreadable_files_are_named(recipe, tmp_path, name, content):
    """Text that is not UTF-8 or not JSON is an error that names key and file."""
    (tmp_path / name).write_bytes(content)
    recipe["data"]["files"] = [str(tmp_path / name)]
    with pytest.raises(RecipeError, match=rf"`data\.files`: .*{re.escape(name)}.* cannot be read"):
        train(write_recipe(recipe, tmp_path))


def test_byte_order_marks_are_no_text(recipe, tmp_path):
    """A file that an editor began with a mark begins with its text."""
    (tmp_path / "marked.txt").write_text("The state", encoding="utf-8-sig")
    assert load_documents(DataRecipe(files=[str(tmp_path / "marked.txt")]))["text"][0] == "The state"


def test_held_out_text_that_is_empty():
    """Nothing to predict is an error before the first step."""
    share = 0.89  # the hash of no text lies just below
    texts = ["", *(text for text in map(str, range(50)) if not is_validation(text, share))]
    with pytest.raises(RecipeError, match="all documents that it holds out are empty"):
        split_documents(Dataset.from_dict({"text": texts}), share)


def test_output_folder_that_is_a_file(recipe, tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(RecipeError, match=r"`training\.output_dir`: .* is a file"):
        train(write_recipe(recipe, tmp_path))
