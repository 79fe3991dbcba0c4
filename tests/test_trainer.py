"""What training with the library's Trainer and with PEFT promises."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F


pytest.importorskip("accelerate")  # what Trainer needs

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from modeling_egmla import EGMLAForSequenceClassification, EGMLAForTokenClassification


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def rows(lengths: list[int]) -> list[dict]:
    """Texts of these lengths."""
    return [{"input_ids": random_ids(1, length, seed)[0]} for seed, length in enumerate(lengths)]


def padded(examples: list[dict]) -> dict:
    """A batch padded on the right, its padding masked and not to be predicted."""
    width = max(len(example["input_ids"]) for example in examples)
    batch = {"input_ids": [], "attention_mask": [], "labels": []}
    for example in examples:
        ids = example["input_ids"]
        padding = width - len(ids)
        batch["input_ids"].append(F.pad(ids, (0, padding)))
        batch["attention_mask"].append(F.pad(torch.ones_like(ids), (0, padding)))
        batch["labels"].append(F.pad(example.get("labels", ids), (0, padding), value=-100))
    return {key: torch.stack(value) for key, value in batch.items()}


def make_trainer(model, folder, data, **settings):
    settings = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, **settings}
    arguments = TrainingArguments(output_dir=str(folder), **settings)
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data, data_collator=padded)


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_accumulation_changes_nothing(make_model, tmp_path, micro_batch):
    """
    Texts of uneven lengths: one batch of 8, or small ones accumulated, take the same SGD step and log the same loss,
    which is the mean over all predicted tokens.
    """
    data = rows([3, 17, 5, 9, 30, 4, 12, 7])
    weights, losses = [], []
    for batch, accumulation in ((8, 1), (micro_batch, 8 // micro_batch)):
        model = make_model()
        if not weights:
            with torch.no_grad():
                expected = [
                    F.cross_entropy(
                        model(row["input_ids"][None]).logits[0, :-1], row["input_ids"][1:], reduction="sum"
                    )
                    for row in data
                ]
            expected = (sum(expected) / sum(len(row["input_ids"]) - 1 for row in data)).item()
        trainer = make_trainer(
            model,
            tmp_path,
            data,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            optim="sgd",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_steps=1,
        )
        trainer.train()
        losses.append(next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry))
        weights.append(model.state_dict())
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=1e-6, rtol=0, msg=name)
    assert any(
        (weight - fresh).abs().max() > 1e-4 for weight, fresh in zip(weights[0].values(), make_model().parameters())
    )
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert losses[0] == pytest.approx(expected, abs=1e-4), "labels are shifted once, padding does not count"


def test_evaluation_gives_one_array(make_model, tmp_path):
    """With the cache on, evaluate() and predict() hand compute_metrics one array of logits, with no cache in it."""
    model = make_model()
    assert model.config.use_cache
    data = rows([6, 9, 4, 9, 5])
    seen = []

    def metrics(prediction):
        seen.append(prediction)
        return {"tokens": int((prediction.label_ids != -100).sum())}

    trainer = make_trainer(model, tmp_path, data, per_device_eval_batch_size=2)
    trainer.compute_metrics = metrics
    result = trainer.evaluate()
    assert result["eval_tokens"] == 33
    output = trainer.predict(data)
    for prediction in (seen[0].predictions, seen[1].predictions, output.predictions):
        assert isinstance(prediction, np.ndarray)
        assert prediction.shape == (5, 9, 97)
        for index, row in enumerate(data):
            expected = model(row["input_ids"][None]).logits[0].detach().numpy()
            np.testing.assert_allclose(prediction[index, : len(expected)], expected, atol=1e-5)
    assert "eval_loss" in result


@pytest.mark.parametrize("model_class", [EGMLAForSequenceClassification, EGMLAForTokenClassification])
def test_classifiers_train_and_evaluate(make_model, tmp_path, model_class):
    """Trainer trains a classifier, and evaluates it to one array of logits; its loss falls."""
    model = make_model(model_class, num_labels=3)
    data = [{"input_ids": random_ids(1, 8, seed)[0]} for seed in range(8)]

    def collate(examples):
        ids = torch.stack([example["input_ids"] for example in examples])
        labels = ids % 3
        return {"input_ids": ids, "labels": labels[:, -1] if model_class is EGMLAForSequenceClassification else labels}

    trainer = make_trainer(model, tmp_path, data, max_steps=30, learning_rate=1e-2, per_device_train_batch_size=8)
    trainer.data_collator = collate
    trainer.compute_metrics = lambda prediction: {"shape": prediction.predictions.shape}
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    result = trainer.evaluate()
    assert result["eval_loss"] < 0.7 * before
    assert result["eval_shape"] == ((8, 3) if model_class is EGMLAForSequenceClassification else (8, 8, 3))


@pytest.mark.parametrize("group_size", [1, 2])
def test_trainer_with_gradient_checkpointing(make_model, tmp_path, group_size):
    """Checkpointing, also the reentrant kind, takes the same step as without."""
    data = rows([9, 12, 5, 7])
    weights = []
    for settings in (
        {},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ):
        model = make_model(layer_group_size=group_size)
        common = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.1, "per_device_train_batch_size": 4}
        make_trainer(model, tmp_path, data, **common, **settings).train()
        weights.append(model.state_dict())
    for other in weights[1:]:
        for name, weight in weights[0].items():
            torch.testing.assert_close(other[name], weight, atol=1e-6, rtol=0, msg=name)


def test_checkpoints_resume(make_model, tmp_path):
    """A checkpoint of Trainer loads, generates the same, and training goes on from it as if never stopped."""
    data = rows([9, 12, 5, 7])
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2, "seed": 1}
    whole = make_model()
    make_trainer(whole, tmp_path, data, **settings).train()
    resumed = make_model(seed=5)
    make_trainer(resumed, tmp_path / "other", data, **settings).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-2")
    )
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], weight, atol=1e-6, rtol=0, msg=name)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert torch.equal(loaded(random_ids(1, 5)).logits, whole.eval()(random_ids(1, 5)).logits)


REFUSED = r"Adapters that insert virtual tokens \(prompt tuning, P-tuning, prefix tuning\).*use LoRA instead"


@pytest.mark.parametrize("kv_gate", ["multiply", "add"])
@pytest.mark.parametrize("name", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"])
def test_virtual_tokens_are_refused(make_model, name, kv_gate):
    """Prompt, P- and prefix tuning insert tokens without ids: a sentence says so and what to use, training or not."""
    peft = pytest.importorskip("peft")
    model = make_model(kv_gate=kv_gate, num_attention_heads=4)  # PEFT wants heads that divide the width
    config = getattr(peft, name)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match=REFUSED):
        adapted = peft.get_peft_model(model, config)
        adapted(input_ids=random_ids(2, 5), labels=random_ids(2, 5))
    # In `generate` PEFT hands a prefix over beside a cache of ours; it must not be dropped silently.
    with pytest.raises(ValueError, match=None if name == "PrefixTuningConfig" else REFUSED):
        adapted.generate(input_ids=random_ids(1, 5), max_new_tokens=2)


@pytest.mark.parametrize(
    "changes", [{}, {"layer_group_size": 2, "q_lora_rank": 9}, {"kv_gate": "add"}, {"kv_gate": "none"}], ids=str
)
def test_lora_on_all_linear_layers(make_model, tmp_path, changes):
    """LoRA on all linear layers, and on the gate tables, trains, merges exactly, and its adapter loads again."""
    peft = pytest.importorskip("peft")
    model = make_model(**changes)
    base = copy.deepcopy(model)
    plain = peft.LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=6, target_modules="all-linear")
    adapted = peft.get_peft_model(model, plain)
    targets = {name.split(".")[-1] for name in adapted.base_model.targeted_module_names}
    linear = {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    linear |= {"q_a_proj", "q_b_proj"} if "q_lora_rank" in changes else {"q_proj"}
    gated = changes.get("kv_gate") != "none"
    assert targets == linear | ({"kv_gate_proj"} if gated else set())

    data = rows([9, 12, 5, 7])
    trainer = make_trainer(adapted, tmp_path, data, max_steps=15, learning_rate=1e-2, per_device_train_batch_size=4)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 0.05

    adapted.eval()
    ids = random_ids(2, 8)
    with torch.no_grad():
        logits = adapted(input_ids=ids).logits
        assert (logits - base(ids).logits).abs().max() > 1e-2
        torch.testing.assert_close(adapted(input_ids=ids, use_cache=False).logits, logits, atol=1e-5, rtol=1e-5)
        text = adapted.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
        assert torch.equal(text, adapted.generate(input_ids=ids, max_new_tokens=6, do_sample=False, use_cache=False))
        adapted.save_pretrained(tmp_path / "adapter")
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, logits, atol=1e-5, rtol=1e-5)
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
        torch.testing.assert_close(loaded(input_ids=ids).logits, logits, atol=1e-5, rtol=1e-5)


def test_lora_on_gate_tables(make_model):
    """Gate tables take LoRA too, and merge exactly."""
    peft = pytest.importorskip("peft")
    model = make_model()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["kv_gate_embed", "kv_gate_proj"]))
    ids = random_ids(2, 8)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
    for _ in range(5):
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapted.eval()
    with torch.no_grad():
        logits = adapted(input_ids=ids).logits
        cached = torch.cat(
            [(outputs := adapted(input_ids=ids[:, :5])).logits, adapted(ids[:, 5:], cache=outputs.cache).logits], 1
        )
        torch.testing.assert_close(cached, logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(adapted.merge_and_unload()(ids).logits, logits, atol=1e-5, rtol=1e-5)
