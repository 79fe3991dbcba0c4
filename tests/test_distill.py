"""Distillation: a converted model comes nearer to its source, and a run that is stopped goes on to the same end."""

import json
import random
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import yaml
from conftest import tiny_model
from safetensors.torch import load_file
from test_gqa import CALIBRATION, tiny_llama
from test_parallel_training import run_on
from test_training import die_while_saving
from tiny_export import tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, default_data_collator

from modeling_egmla import EGMLAForCausalLM, loss_egmla
from modeling_egmla.commands.train import summary
from modeling_egmla.conversion.converter import convert
from modeling_egmla.conversion.stages import LatentStart
from modeling_egmla.training import RecipeError
from modeling_egmla.training import distill as room
from modeling_egmla.training.arguments import build_arguments
from modeling_egmla.training.data import load_documents, pack_documents, split_documents
from modeling_egmla.training.distill import DistillationRecipe, DistillationTrainer, DistillRecipe, distill
from modeling_egmla.training.log import read_log
from modeling_egmla.training.recipe import DataRecipe, load_recipe


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    """A teacher of the Llama form, what it was converted to, and text."""
    folder = tmp_path_factory.mktemp("pair")
    tiny_llama().save_pretrained(folder / "teacher")
    tiny_tokenizer(97).save_pretrained(folder / "teacher")
    latent = LatentStart(width=9, rope_dim=6)
    convert(
        folder / "teacher", folder / "student", latent=latent, calibration=CALIBRATION, gate="multiply", gate_dim=6
    )
    rng, words = random.Random(0), ["THE", "STATE", "OF", "UNION", "LAW", "PEACE", "TRADE", "PEOPLE", "WAR", "TREATY"]
    for number in range(40):
        text = " ".join(rng.choices(words, k=60))
        (folder / f"{number:02}.txt").write_text(text)
    return folder


@pytest.fixture
def recipe(pair, tmp_path) -> dict:
    return {
        "models": {"student": str(pair / "student"), "teacher": str(pair / "teacher")},
        "data": {"files": [str(pair / "*.txt")], "validation_share": 0.2, "sequence_length": 32},
        "training": {
            "output_dir": str(tmp_path / "out"),
            "batch_tokens": 128,
            "sequences_per_device": 2,
            "steps": 8,
            "learning_rate": 0.001,
            "schedule": "constant",
            "eval_steps": 4,
            "save_steps": 4,
            "logging_steps": 1,
            "arguments": {"disable_tqdm": True},
        },
    }


def validation_loss(folder: Path, recipe: dict) -> float:
    """That of the model in the folder, in nats a token, token by token."""
    model, tokenizer = EGMLAForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    data = DataRecipe(**recipe["data"])
    held_out = split_documents(load_documents(data), data.validation_share)[1]
    total = count = 0
    for block in pack_documents(held_out, tokenizer, data.sequence_length, keep_all=True):
        ids, labels = torch.tensor([block["input_ids"]]), torch.tensor([block["labels"]])
        targets = int((labels[:, 1:] != -100).sum())
        total += model(input_ids=ids, labels=labels).loss.item() * targets
        count += targets
    return total / count


def write(recipe: dict, path: Path) -> Path:
    path.write_text(yaml.safe_dump(recipe))
    return path


def test_student_comes_nearer(recipe, tmp_path):
    """Divergence and errors of hidden states fall; the folder holds a model, its log and a report with all losses."""
    report = distill(write({**recipe, "training": {**recipe["training"], "steps": 24}}, tmp_path / "recipe.yaml"))
    lines = [json.loads(line) for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    for part in ("loss_logits", "loss_hidden_states"):
        values = [line[part] for line in lines if part in line]
        assert len(values) == 24 and sum(values[-4:]) < 0.8 * sum(values[:4]), values
    losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert lines[0]["step"] == 0 and losses[0] == pytest.approx(report["initial_validation_loss"])
    assert losses[-1] == pytest.approx(report["validation_loss"]) and report["teacher_validation_loss"] > 0
    saved = json.loads((tmp_path / "out/training.json").read_text())
    assert saved == report and report["tokens_seen"] == 24 * 128
    assert EGMLAForCausalLM.from_pretrained(tmp_path / "out").config.kv_gate == "multiply"


def test_stopped_run_goes_on_to_the_same_weights(recipe, tmp_path, monkeypatch):
    """Killed after the checkpoint of step 4, the same command continues there and ends with the same bits."""

    class Killed(Exception):
        pass

    class Killer(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 6:
                raise Killed

    whole = {**recipe, "training": {**recipe["training"], "output_dir": str(tmp_path / "whole")}}
    expected = distill(write(whole, tmp_path / "whole.yaml"))
    path = write(recipe, tmp_path / "recipe.yaml")
    trainer_class = room.DistillationTrainer
    monkeypatch.setattr(
        room,
        "DistillationTrainer",
        lambda callbacks, **kwargs: trainer_class(callbacks=[*callbacks, Killer()], **kwargs),
    )
    with pytest.raises(Killed):
        distill(path)
    monkeypatch.undo()
    passes, divergences = [], room.token_divergences
    monkeypatch.setattr(room, "token_divergences", lambda *logits: passes.append(0) or divergences(*logits))
    report = distill(path)
    assert len(passes) == 4 * 2  # steps 5 to 8, of two passes each
    ends = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert report["validation_loss"] == expected["validation_loss"]
    steps = [json.loads(line)["step"] for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and {0, 4, 8} <= set(steps)
    assert distill(path)["steps"] == 8  # a run that is finished takes no step more
    recipe["training"]["steps"] = 10
    assert distill(write(recipe, path))["steps"] == 10  # unless it is made longer
    assert load_recipe(tmp_path / "out/recipe.yaml", DistillRecipe).training.steps == 10
    with pytest.raises(RecipeError, match="differs in `distillation`"):
        distill(write({**recipe, "distillation": {"labels": 1.0}}, tmp_path / "other.yaml"))


def test_a_head_that_no_loss_reads_is_not_trained(recipe, tmp_path, monkeypatch):
    """With hidden states alone an untied head gets no gradient, for which several processes would wait in vain."""
    students, trainer_class = [], room.DistillationTrainer

    def make(model, **kwargs):
        students.append(model)
        return trainer_class(model=model, **kwargs)

    monkeypatch.setattr(room, "DistillationTrainer", make)
    recipe["distillation"] = {"logits": 0.0, "hidden_states": 1.0}
    distill(write(recipe, tmp_path / "recipe.yaml"))
    assert not students[0].config.tie_word_embeddings and not students[0].lm_head.weight.requires_grad


def test_reported_loss_is_that_of_the_saved_model(recipe, pair, tmp_path):
    """The loss of the report is what the folder's weights have, rounded to `save_dtype`; its ids are the student's."""
    student = EGMLAForCausalLM.from_pretrained(pair / "student")
    student.generation_config.update(eos_token_id=[5], temperature=0.5, do_sample=True)
    student.save_pretrained(tmp_path / "student")
    tiny_tokenizer(97).save_pretrained(tmp_path / "student")
    recipe["models"]["student"] = str(tmp_path / "student")
    recipe["training"].update(save_dtype="bfloat16", learning_rate=0.01)
    report = distill(write(recipe, tmp_path / "recipe.yaml"))
    assert report["validation_loss"] == pytest.approx(validation_loss(tmp_path / "out", recipe), abs=1e-6)
    weights = load_file(tmp_path / "out/model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    saved = EGMLAForCausalLM.from_pretrained(tmp_path / "out")
    assert saved.config.use_cache and saved.generation_config.eos_token_id == [1, 5]
    assert saved.generation_config.temperature == 0.5

    # A run that had taken all its steps when it was killed saves the same.
    generation = (tmp_path / "out/generation_config.json").read_text()
    (tmp_path / "out/generation_config.json").unlink()
    assert distill(write(recipe, tmp_path / "recipe.yaml"))["validation_loss"] == report["validation_loss"]
    assert (tmp_path / "out/generation_config.json").read_text() == generation


def test_generation_that_could_not_be_saved_is_refused_first(recipe, pair, tmp_path):
    """Conversions carry over what the library would not save; that is said before the first step."""
    shutil.copytree(pair / "student", tmp_path / "student")
    path = tmp_path / "student" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "do_sample": False, "temperature": 0.5}))
    recipe["models"]["student"] = str(tmp_path / "student")
    with pytest.raises(RecipeError, match=r"`models\.student`: .*temperature.* Mend"):
        distill(write(recipe, tmp_path / "recipe.yaml"))
    assert not (tmp_path / "out").exists()


def test_run_of_another_text_is_refused(recipe, pair, tmp_path):
    """A run is not continued on a text that has changed."""
    text = tmp_path / "text"
    text.mkdir()
    for file in pair.glob("*.txt"):
        (text / file.name).write_text(file.read_text())
    recipe["data"]["files"] = [str(text / "*.txt")]
    recipe["training"]["steps"] = 4
    path = write(recipe, tmp_path / "recipe.yaml")
    distill(path)
    (text / "40.txt").write_text("WAR AND PEACE")
    with pytest.raises(RecipeError, match="another text"):
        distill(path)


def test_teacher_of_another_vocabulary_is_refused(recipe, pair, tmp_path):
    """As many ids are not the same ids: what a teacher says of other tokens teaches nothing."""
    folder = shutil.copytree(pair / "teacher", tmp_path / "teacher")
    recipe["models"]["teacher"] = str(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(RecipeError, match=r"`models\.teacher`: the ids .* stand for other tokens"):
        distill(write(recipe, tmp_path / "recipe.yaml"))


@pytest.mark.parametrize("which", ["student", "teacher"])
def test_run_of_another_model_is_refused(recipe, pair, tmp_path, which):
    """Nor with another teacher, or for another student, in the folder that the recipe names."""
    recipe["models"][which] = str(shutil.copytree(pair / which, tmp_path / which))
    recipe["training"]["steps"] = 4
    path = write(recipe, tmp_path / "recipe.yaml")
    distill(path)
    assert distill(path)["steps"] == 4
    model = AutoModelForCausalLM.from_pretrained(tmp_path / which)
    with torch.no_grad():
        model.model.norm.weight[0] += 0.5
    model.save_pretrained(tmp_path / which)
    with pytest.raises(RecipeError, match=f"another {which}"):
        distill(path)


def test_run_that_dies_while_saving_continues(recipe, tmp_path, monkeypatch):
    """A run that dies with half a checkpoint continues from the whole one before it."""
    path = write(recipe, tmp_path / "recipe.yaml")
    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        die_while_saving(patch, 8)
        distill(path)
    assert [folder.name for folder in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-4"]
    assert distill(path)["steps"] == 8


@pytest.mark.parametrize("streaming", [False, True])
def test_keys_of_the_data_count(recipe, tmp_path, streaming):
    """Held-out documents are limited as the recipe says, and a stream is read as one."""
    data = {**recipe["data"], "validation_documents": 2, "streaming": streaming}
    report = distill(write({**recipe, "data": data}, tmp_path / "recipe.yaml"))
    assert report["validation_documents"] == 2 and report["steps"] == 8
    assert ("passes" in report) is not streaming
    assert ("passes" in summary(report)) is not streaming and "teacher: 6." in summary(report)


def make_trainer(recipe: dict, tmp_path: Path, student, teacher, **training) -> DistillationTrainer:
    recipe = {**recipe, "training": {**recipe["training"], **training}, "distillation": {"labels": 0.5}}
    read = load_recipe(write(recipe, tmp_path / "recipe.yaml"), DistillRecipe)
    rows = torch.randint(0, 97, (8, 32), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([32, 20, 30, 8, 32, 26, 12, 18])
    labels = rows.masked_fill(torch.arange(32) >= lengths[:, None], -100)
    return DistillationTrainer(
        model=student,
        args=build_arguments(read.training, 32),
        train_dataset=[{"input_ids": ids, "labels": label} for ids, label in zip(rows, labels)],
        data_collator=default_data_collator,
        teacher=teacher,
        distillation=read.distillation,
    )


def test_accumulation_changes_nothing(recipe, pair, tmp_path):
    """One pass of four sequences or four of one: the same step, however uneven the lengths; the teacher stays."""
    ends, before = [], tiny_llama().state_dict()
    for number, size in enumerate((4, 1)):
        student, teacher = EGMLAForCausalLM.from_pretrained(pair / "student"), tiny_llama(attention_dropout=0.5)
        settings = {"steps": 1, "sequences_per_device": size, "arguments": {"optim": "sgd", "eval_strategy": "no"}}
        make_trainer(recipe, tmp_path, student, teacher, **settings, output_dir=str(tmp_path / str(number))).train()
        ends.append(student.state_dict())
        assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())
    moved = max((ends[0][name] - value).abs().max() for name, value in ends[1].items())
    start = EGMLAForCausalLM.from_pretrained(pair / "student").state_dict()
    assert moved < 1e-6 < 1e-4 < max((start[name] - value).abs().max() for name, value in ends[1].items())


@pytest.mark.slow  # starts two processes
@pytest.mark.parametrize("cut", [False, True])
def test_two_processes_distill_as_one(recipe, tmp_path, cut):
    """
    Under plain SGD, whose step shows a gradient's size, two processes end with the weights and the log of one, also
    where each holds its columns of the gate tables.
    """
    ends, logs = [], []
    recipe["gate_tables"] = {"parallel": cut}
    recipe["training"].update(learning_rate=0.003, max_grad_norm=1e9, logging_steps=3)
    recipe["training"]["arguments"] = {"disable_tqdm": True, "optim": "sgd", "use_cpu": True}
    for processes in (1, 2):
        recipe["training"]["output_dir"] = str(tmp_path / str(processes))
        path = write(recipe, tmp_path / "recipe.yaml")
        distill(path) if processes == 1 else run_on(processes, distill, path)
        ends.append(load_file(tmp_path / str(processes) / "model.safetensors"))
        logs.append([line for line in read_log(tmp_path / str(processes) / "log.jsonl") if "loss" in line])
        assert json.loads((tmp_path / str(processes) / "training.json").read_text())["tokens_seen"] == 8 * 128
    for name, weight in ends[0].items():
        torch.testing.assert_close(ends[1][name], weight, atol=1e-6, rtol=0, msg=name)
    for key in ("loss", "grad_norm", "loss_logits", "loss_hidden_states"):
        assert [line[key] for line in logs[1]] == pytest.approx([line[key] for line in logs[0]], rel=1e-4), key


def test_logged_parts_add_up(recipe, pair, tmp_path):
    """At each log the losses of its own, weighted, are the loss, also where an epoch ends within an accumulation."""
    student = EGMLAForCausalLM.from_pretrained(pair / "student")
    settings = {"sequences_per_device": 1, "batch_tokens": 96, "steps": 7, "logging_steps": 2}
    arguments = {"eval_strategy": "no"}
    trainer = make_trainer(recipe, tmp_path, student, tiny_llama(), **settings, arguments=arguments)
    trainer.train()  # eight sequences, three a step: the third step of an epoch has two
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["step"] for line in lines] == [2, 4, 6]
    for line in lines:
        total = line["loss_logits"] + line["loss_hidden_states"] + 0.5 * line["loss_labels"]
        assert total == pytest.approx(line["loss"], rel=1e-4)


def test_equal_models_have_no_loss(recipe, tmp_path):
    """A student that is its teacher has neither divergence nor errors, and the text's loss is the library's."""
    model, same = tiny_model(), tiny_model()
    trainer = make_trainer(recipe, tmp_path, model.train(), same, arguments={"eval_strategy": "no"})
    inputs = default_data_collator([trainer.train_dataset[i] for i in range(4)])
    total = trainer.compute_loss(model, inputs)
    assert trainer.parts["logits"] < 1e-6 and trainer.parts["hidden_states"] < 1e-9
    torch.testing.assert_close(total, 0.5 * model(**inputs).loss)


def test_losses_are_what_they_say():
    """Divergence in nats and relative errors, from their definitions."""
    logits, target = torch.randn(2, 1, 3, 7).double().unbind()
    p, q = target.softmax(-1), logits.softmax(-1)
    torch.testing.assert_close(
        room.token_divergences(logits, target).double(), (p * (p / q).log()).sum(-1), atol=1e-5, rtol=0
    )
    states = tuple(torch.full((1, 2, 4), value) for value in (9.0, 2.0, 3.0))
    wanted = tuple(torch.full((1, 2, 4), value) for value in (0.0, 1.0, 6.0))
    torch.testing.assert_close(room.state_errors(states, wanted), torch.full((1, 2), (1 + 0.25) / 2))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergences_have_the_gradient_of_their_definition(dtype, bound, temperature, monkeypatch):
    """Value and gradient are those of float64 autograd, over more tokens than one chunk; targets get none."""
    monkeypatch.setattr(loss_egmla, "CPU_CHUNK", 16 * 11)
    logits, target = (3 * torch.randn(2, 2, 37, 11)).to(dtype).unbind()
    weights = torch.rand(logits.shape[:-1])
    ours = logits.clone().requires_grad_()
    divergences = room.token_divergences(ours, target.requires_grad_(), temperature)
    (divergences * weights).sum().backward()

    exact = logits.double().requires_grad_()
    p, q = (x.double().div(temperature).softmax(-1) for x in (target.detach(), exact))
    expected = (p * (p / q).log()).sum(-1)
    (expected * weights).sum().backward()
    torch.testing.assert_close(divergences.double(), expected, atol=1e-5, rtol=1e-5)
    assert ours.grad.dtype == dtype and target.grad is None
    assert (ours.grad.double() - exact.grad).norm() < bound * exact.grad.norm()
    with torch.no_grad():
        assert torch.equal(room.token_divergences(logits, target, temperature), divergences)


def test_teacher_runs_in_the_precision_of_the_run(recipe, pair, tmp_path):
    """With `bf16` the teacher multiplies in bfloat16 as the student does, and keeps its float32 weights."""
    student, teacher = (EGMLAForCausalLM.from_pretrained(pair / "student") for _ in range(2))
    trainer = make_trainer(recipe, tmp_path, student, teacher, arguments={"bf16": True, "eval_strategy": "no"})
    seen = []
    teacher.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    trainer.train()
    assert set(seen) == {torch.bfloat16}
    assert {weight.dtype for weight in teacher.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distillation": {"logits": -1.0}}, "not negative"),
        ({"distillation": {"logits": 0, "hidden_states": 0}}, "one above 0"),
        ({"distillation": {"warmth": 1}}, "distillation.warmth"),
        ({"teachers": "x"}, "Unknown key `teachers`"),
        ({"training": {"arguments": {"label_smoothing_factor": 0.5}}}, "training.arguments.label_smoothing_factor"),
    ],
)
def test_wrong_recipes_are_named(recipe, tmp_path, changes, message):
    if "training" in changes:
        changes = {"training": {**recipe["training"], **changes["training"]}}
    with pytest.raises(RecipeError, match=message):
        load_recipe(write({**recipe, **changes}, tmp_path / "recipe.yaml"), DistillRecipe)


def test_epochs_of_a_stream_are_refused(recipe, tmp_path):
    """A stream has no length to count passes by; the recipe says so before a model is loaded."""
    recipe["data"] |= {"streaming": True, "validation_documents": 2}
    recipe["training"] |= {"steps": None, "epochs": 1}
    with pytest.raises(RecipeError, match=r"`training\.epochs`.*`training\.steps`"):
        load_recipe(write(recipe, tmp_path / "recipe.yaml"), DistillRecipe)


def test_pairs_that_cannot_be_compared(recipe, tmp_path):
    """Another vocabulary, or other layers where hidden states are compared, is named; logits alone may do."""
    tiny_llama(num_hidden_layers=3).save_pretrained(tmp_path / "deeper")
    tiny_llama(vocab_size=90).save_pretrained(tmp_path / "other")
    for teacher, message in (("deeper", "`num_hidden_layers` 3"), ("other", "`vocab_size` 90")):
        models = {**recipe["models"], "teacher": str(tmp_path / teacher)}
        path = write({**recipe, "models": models}, tmp_path / "recipe.yaml")
        with pytest.raises(RecipeError, match=message):
            distill(path)
    models = {**recipe["models"], "teacher": str(tmp_path / "deeper")}
    logits_only = {**recipe, "models": models, "distillation": {"hidden_states": 0}}
    room.load_pair(load_recipe(write(logits_only, tmp_path / "recipe.yaml"), DistillRecipe))
    assert DistillationRecipe().temperature == 1


@pytest.mark.parametrize(
    ("key", "path", "message"),
    [
        ("student", "teacher", r"`models\.student`.*type llama.*egmla convert"),
        ("student", "nowhere", r"`models\.student`.*cannot be loaded"),
        ("teacher", "nowhere", r"`models\.teacher`.*cannot be loaded"),
    ],
)
def test_models_that_do_not_load(recipe, pair, tmp_path, key, path, message):
    """A student that was not converted, or folders that are not there, are named with their key."""
    recipe["models"][key] = str(pair / path)
    with pytest.raises(RecipeError, match=message):
        distill(write(recipe, tmp_path / "recipe.yaml"))


def test_recipe_that_comes_along():
    """The recipe of the documents can be read."""
    path = files("modeling_egmla.configuration") / "recipes" / "distill-smollm2.yaml"
    assert load_recipe(path, DistillRecipe).distillation == DistillationRecipe()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_losses_are_of_the_position_that_predicts(recipe, tmp_path, temperature):
    """With one token to predict, student and teacher are compared one position before it, and nowhere else."""
    student, teacher = tiny_model(), tiny_model(seed=1)
    trainer = make_trainer(recipe, tmp_path, student.train(), teacher, arguments={"eval_strategy": "no"})
    trainer.distillation.temperature = temperature
    ids = torch.randint(2, 97, (1, 12))
    labels = torch.full_like(ids, -100)
    labels[0, 5] = ids[0, 5]
    trainer.compute_loss(student, {"input_ids": ids, "labels": labels})
    with torch.no_grad():
        ours, theirs = (model(ids, output_hidden_states=True) for model in (student, teacher))
    p, q = ((outputs.logits[0, 4] / temperature).softmax(-1) for outputs in (theirs, ours))
    divergence = temperature**2 * (p * (p / q).log()).sum()
    errors = [
        (state[0, 4] - wanted[0, 4]).square().sum() / wanted[0, 4].square().sum()
        for state, wanted in zip(ours.hidden_states[1:], theirs.hidden_states[1:])
    ]
    torch.testing.assert_close(trainer.parts["logits"], divergence, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(trainer.parts["hidden_states"], sum(errors) / 2, rtol=1e-4, atol=1e-6)


def test_losses_are_means_over_all_tokens(recipe, tmp_path):
    """The count that Trainer gives divides as the batch's own does."""
    student, teacher = tiny_model(), tiny_model(seed=1)
    trainer = make_trainer(recipe, tmp_path, student.train(), teacher, arguments={"eval_strategy": "no"})
    ids = torch.randint(2, 97, (2, 12))
    batch = {"input_ids": ids, "labels": ids}
    given = trainer.compute_loss(student, dict(batch), num_items_in_batch=22)
    torch.testing.assert_close(given, trainer.compute_loss(student, dict(batch)))
