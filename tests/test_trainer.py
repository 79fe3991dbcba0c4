"""What training with the library's Trainer and with PEFT promises."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F


pytest.importorskip("accelerate")  # what Trainer needs

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from modeling_egmla import (
    EGMLACache,
    EGMLAForSequenceClassification,
    EGMLAForTokenClassification,
    EGMLAStaticCache,
)


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


def test_lora_merges_exactly_with_precomputed_gates(make_model):
    """Merging an adapter on the gates gives the adapter's logits also where gates were computed before."""
    peft = pytest.importorskip("peft")
    model = make_model()
    model.precompute_kv_gates()
    ids = random_ids(2, 8)
    with torch.no_grad():
        before = model(ids).logits
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["kv_gate_embed", "kv_gate_proj", "kv_b_proj"])
    adapted = peft.get_peft_model(model, config)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
    for _ in range(5):
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapted.eval()
    with torch.no_grad():
        logits = adapted(input_ids=ids).logits
        merged = adapted.merge_and_unload()
        assert (logits - before).abs().max() > 1e-2
        torch.testing.assert_close(merged(ids).logits, logits, atol=1e-5, rtol=1e-5)
        assert merged.model.layers[0].self_attn._kv_gate_table is not None, "gates are looked up again"


def test_gate_table_trains_whole_beside_lora(make_model, tmp_path):
    """`modules_to_save` trains gate tables in full beside adapters; saved and loaded, the logits are the same."""
    peft = pytest.importorskip("peft")
    model = make_model()
    base = copy.deepcopy(model)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "kv_b_proj"], modules_to_save=["kv_gate_embed"]
    )
    adapted = peft.get_peft_model(model, config)
    data = rows([9, 12, 5, 7])
    make_trainer(adapted, tmp_path, data, max_steps=5, learning_rate=1e-2, per_device_train_batch_size=4).train()
    adapted.eval()
    adapted.save_pretrained(tmp_path / "adapter")
    ids = random_ids(2, 8)
    with torch.no_grad():
        logits = adapted(input_ids=ids).logits
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
        torch.testing.assert_close(loaded(input_ids=ids).logits, logits, atol=1e-5, rtol=1e-5)
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, logits, atol=1e-5, rtol=1e-5)
    table = merged.model.layers[1].self_attn.kv_gate_embed.weight
    assert (table - make_model().model.layers[1].self_attn.kv_gate_embed.weight).abs().max() > 1e-3


def test_bf16(make_model, tmp_path):
    """`bf16=True` computes in bfloat16 and steps in float32: the weights stay near those of a float32 run."""
    data = rows([9, 12, 5, 7])
    common = {"max_steps": 5, "optim": "sgd", "learning_rate": 0.1, "per_device_train_batch_size": 4}
    exact, mixed = make_model(), make_model()
    make_trainer(exact, tmp_path, data, **common).train()
    make_trainer(mixed, tmp_path, data, bf16=True, **common).train()
    distance = moved = 0.0
    for (name, fresh), weight, rounded in zip(make_model().named_parameters(), exact.parameters(), mixed.parameters()):
        assert rounded.dtype == torch.float32, name
        distance += (rounded - weight).square().sum().item()
        moved += (weight - fresh).square().sum().item()
    assert 0 < distance < 0.05**2 * moved


@pytest.mark.slow  # traces forward and backward
@pytest.mark.parametrize("group_size", [1, 2])
def test_torch_compile(make_model, tmp_path, group_size):
    """`torch_compile=True` takes the same steps, over texts of several lengths."""
    data = rows([9, 12, 5, 7])
    weights = []
    for settings in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        model = make_model(layer_group_size=group_size)
        common = {"max_steps": 4, "optim": "sgd", "learning_rate": 0.1, "per_device_train_batch_size": 2}
        make_trainer(model, tmp_path, data, **common, **settings).train()
        weights.append(model.state_dict())
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=1e-5, rtol=0, msg=name)


def test_grouping_by_length(make_model, tmp_path):
    """`train_sampling_strategy="group_by_length"` puts like lengths together: every text once, less padding."""
    lengths = [3, 40, 4, 41, 5, 42, 6, 43] * 8
    padding = {}
    for strategy in ("random", "group_by_length"):
        trainer = make_trainer(
            make_model(),
            tmp_path,
            rows(lengths),
            train_sampling_strategy=strategy,
            per_device_train_batch_size=4,
            num_train_epochs=1,
        )
        batches = []
        trainer.data_collator = lambda examples, seen=batches: (seen.append(padded(examples)), seen[-1])[1]
        trainer.train()
        masks = [batch["attention_mask"] for batch in batches]
        assert sorted(length for mask in masks for length in mask.sum(-1).tolist()) == sorted(lengths)
        padding[strategy] = sum(int((mask == 0).sum()) for mask in masks)
    assert padding["group_by_length"] < 0.5 * padding["random"]


def test_compiled_packed_documents_do_not_see_each_other(make_model):
    """Nor in a compiled model, which makes a cache by default."""
    model = make_model()
    documents = [random_ids(1, length, seed) for seed, length in enumerate([5, 9])]
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    with torch.no_grad():
        alone = torch.cat([model(document).logits for document in documents], dim=1)
        packed = torch.compile(model, backend="eager")(torch.cat(documents, 1), position_ids=positions).logits
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("group_size", [1, 2])
def test_packed_documents_do_not_see_each_other(make_model, attention, use_cache, group_size):
    """
    Documents in one row, told apart by position_ids that begin again, get the logits that each has alone; with several
    rows, and with the cache on, as well.
    """
    model = make_model(layer_group_size=group_size, attn_implementation=attention)
    documents = [random_ids(1, length, seed)[0] for seed, length in enumerate([5, 9, 1, 7])]
    ids = torch.cat(documents)
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    with torch.no_grad():
        alone = torch.cat([model(document[None], use_cache=False).logits[0] for document in documents])
        packed = model(ids[None], position_ids=positions[None], use_cache=use_cache).logits
        torch.testing.assert_close(packed[0], alone, atol=1e-5, rtol=1e-5)
        whole = model(ids[None], use_cache=use_cache).logits
        rows_packed = model(
            torch.stack([ids, ids]),
            position_ids=torch.stack([torch.arange(len(ids)), positions]),
            use_cache=use_cache,
        ).logits
        torch.testing.assert_close(rows_packed, torch.stack([whole[0], alone]), atol=1e-5, rtol=1e-5)
        assert (whole[0] - alone).abs().max() > 1e-2, "without position_ids it is one document"
        singles = model(ids[None, :3], position_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=use_cache).logits
        each = torch.cat([model(token[None, None], use_cache=False).logits[0] for token in ids[:3]])
        torch.testing.assert_close(singles[0], each, atol=1e-5, rtol=1e-5)


def test_packed_documents_and_a_given_cache(make_model):
    """Into an empty cache they go apart as well; where they could not be told apart any more, they are refused."""
    model = make_model()
    ids, positions = random_ids(1, 8), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with torch.no_grad():
        alone = model(ids[:, 4:]).logits
        cache = EGMLACache(model.config)
        packed = model(ids, position_ids=positions, cache=cache).logits
        torch.testing.assert_close(packed[:, 4:], alone, atol=1e-5, rtol=1e-5)
        for full in (cache, EGMLAStaticCache(model.config, 16)):
            with pytest.raises(ValueError, match="`position_ids` begin again within a row"):
                model(ids, position_ids=positions, cache=full)


def test_flattened_batches_train_as_padded_ones(make_model, tmp_path):
    """`DataCollatorWithFlattening`, which packs a batch into one row, takes the step that padding takes."""
    from transformers import DataCollatorWithFlattening

    data = [{"input_ids": row["input_ids"].tolist()} for row in rows([9, 3, 12, 5])]
    weights = []
    for collator in (
        lambda examples: padded([{"input_ids": torch.tensor(e["input_ids"])} for e in examples]),
        DataCollatorWithFlattening(),
    ):
        model = make_model()
        common = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}
        trainer = make_trainer(model, tmp_path, data, per_device_train_batch_size=2, **common)
        trainer.data_collator = collator
        trainer.train()
        weights.append(model.state_dict())
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=1e-6, rtol=0, msg=name)


CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ 'Question: ' + message.content + '\\nAnswer:\\n' }}{% endif %}{% endfor %}"
)


@pytest.mark.slow  # imports trl
@pytest.mark.parametrize("with_lora", [False, True])
def test_sft_trainer_on_chats(make_model, tmp_path, with_lora):
    """TRL's SFTTrainer fine-tunes on chats, on the assistant's words alone, whole or with LoRA, as with any model."""
    trl = pytest.importorskip("trl")
    peft = pytest.importorskip("peft")
    from datasets import Dataset
    from transformers import AutoTokenizer

    from modeling_egmla import preset_path

    tokenizer = AutoTokenizer.from_pretrained(preset_path())
    tokenizer.chat_template = CHAT_TEMPLATE
    words = ["peace", "war", "trade", "union", "treaty", "army", "land", "law"]
    chats = [
        [{"role": "user", "content": f"What of {word}?"}, {"role": "assistant", "content": f"Of {word} I report."}]
        for word in words
    ]
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = make_model(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **special)
    settings = {
        "output_dir": str(tmp_path),
        "max_steps": 20,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "assistant_only_loss": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**settings),
        train_dataset=Dataset.from_dict({"messages": chats}),
        eval_dataset=Dataset.from_dict({"messages": chats}),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear") if with_lora else None,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    answers = {tokenizer.decode(labels[labels != -100]) for labels in batch["labels"]}
    assert answers <= {f"Of {word} I report.{tokenizer.eos_token}" for word in words}
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < (0.9 if with_lora else 0.5) * before


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "LoRA"])
def test_smoothed_labels_are_of_the_next_token(make_model, tmp_path, adapter):
    """With `label_smoothing_factor` Trainer goes on predicting the next token, and not the one just read."""
    model = make_model()
    if adapter:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    ids = random_ids(2, 9)
    arguments = TrainingArguments(tmp_path, label_smoothing_factor=1e-6, use_cpu=True, report_to="none")
    loss = Trainer(model, arguments).compute_loss(model, {"input_ids": ids, "labels": ids})
    with torch.no_grad():
        logits = model(ids).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(loss.detach(), expected, atol=1e-4, rtol=1e-4)
