"""What loading, saving, resizing and exporting promise: the same model, wherever it is opened."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from modeling_egmla import (
    EGMLAConfig,
    EGMLAForCausalLM,
    EGMLAForSequenceClassification,
    EGMLAForTokenClassification,
    EGMLAModel,
)


AUTO_CLASSES = {
    AutoModel: EGMLAModel,
    AutoModelForCausalLM: EGMLAForCausalLM,
    AutoModelForSequenceClassification: EGMLAForSequenceClassification,
    AutoModelForTokenClassification: EGMLAForTokenClassification,
}
ROOMS = (
    "cache",
    "configuration",
    "decoding",
    "fused",
    "gate",
    "generation",
    "inputs",
    "loss",
    "mapped",
    "modeling",
    "placement",
    "table",
)
CODE = {f"{room}_egmla.py" for room in ROOMS}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale_all_dim": 1.0}


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 90, (batch, length), generator=torch.Generator().manual_seed(seed))


def saved_keys(folder) -> set[str]:
    keys = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            keys |= set(tensors.keys())
    return keys


def dirty_allocator():
    """Leaves freed memory full of numbers that no buffer should have, in blocks of many sizes."""
    blocks = [torch.full((size,), 1e30) for size in range(1, 400) for _ in range(3)]
    del blocks


@pytest.mark.parametrize("rope", [None, YARN], ids=["default", "yarn"])
@pytest.mark.parametrize("how", ["class", "auto", "remote code", "device_map", "bfloat16", "classifier"])
def test_buffers_after_loading(make_model, tmp_path, how, rope):
    """However and how often a model is loaded, buffers that are not saved hold what a fresh model's hold."""
    model = make_model(rope_parameters=rope)
    model.save_pretrained(tmp_path)
    load = {
        "class": lambda: EGMLAForCausalLM.from_pretrained(tmp_path),
        "auto": lambda: AutoModelForCausalLM.from_pretrained(tmp_path),
        "remote code": lambda: AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True),
        "device_map": lambda: EGMLAForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"}),
        "bfloat16": lambda: EGMLAForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16),
        "classifier": lambda: EGMLAForSequenceClassification.from_pretrained(tmp_path),
    }[how]
    expected = {name.split("model.")[-1]: buffer for name, buffer in model.named_buffers()}
    assert expected
    for _ in range(5):
        dirty_allocator()
        loaded = dict(load().named_buffers())
        assert {name.split("model.")[-1] for name in loaded} == expected.keys()
        for name, buffer in loaded.items():
            assert torch.equal(buffer, expected[name.split("model.")[-1]]), name


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights(make_model, tmp_path, tied):
    """Head and embedding are one tensor if and only if asked; saving, loading and saving writes the same keys."""
    assert isinstance(EGMLAForCausalLM._tied_weights_keys, dict)
    model = make_model(tie_word_embeddings=tied)
    for folder in (tmp_path / "first", tmp_path / "second"):
        model.save_pretrained(folder)
        assert ("lm_head.weight" in saved_keys(folder)) != tied
        assert "model.embed_tokens.weight" in saved_keys(folder)
        ids = random_ids(1, 5)
        logits = model(ids).logits
        model = EGMLAForCausalLM.from_pretrained(folder)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert torch.equal(model(ids).logits, logits)
    assert saved_keys(tmp_path / "first") == saved_keys(tmp_path / "second")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shards", [False, True])
def test_every_dtype_and_shards(make_model, tmp_path, dtype, shards):
    """Weights come back bit for bit, in one file or many, in the dtype that they were saved in or another."""
    model = make_model(q_lora_rank=9, attention_bias=True, layer_group_size=2).to(dtype)
    model.save_pretrained(tmp_path, **({"max_shard_size": "10KB"} if shards else {}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == shards
    for loaded in (
        AutoModelForCausalLM.from_pretrained(tmp_path),
        EGMLAForCausalLM.from_pretrained(tmp_path, dtype=dtype),
    ):
        assert loaded.dtype == dtype
        for (name, parameter), other in zip(model.named_parameters(), loaded.parameters()):
            assert torch.equal(parameter, other), name
        assert torch.equal(loaded(random_ids(1, 4)).logits, model(random_ids(1, 4)).logits)
    assert EGMLAForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_auto_classes_with_the_package_imported(make_model, tmp_path):
    """With the package imported the Auto classes need no trust, and give the package's own classes."""
    make_model().save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is EGMLAConfig
    for auto_class, model_class in AUTO_CLASSES.items():
        assert type(auto_class.from_pretrained(tmp_path)) is model_class
        assert type(auto_class.from_config(EGMLAConfig.from_pretrained(tmp_path))) is model_class


def gates(model) -> list[torch.Tensor]:
    return [m.kv_gate_embed.weight for m in model.modules() if hasattr(m, "kv_gate_embed")]


@pytest.mark.parametrize("kv_gate", ["multiply", "add", "none"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "arguments, size",
    [((100,), 100), ((None, 64), 128), ((98, 16), 112), ((90,), 90), ((97,), 97), ((), 97)],
    ids=str,
)
def test_resizing_the_vocabulary(make_model, tmp_path, kv_gate, tied, arguments, size):
    """
    Embedding, head, all gate tables and config follow each other; a new id's gate row is the table's mean (multiply)
    or zero (add), the same each time; old ids keep their logits; save and reload work.
    """
    models = [make_model(kv_gate=kv_gate, tie_word_embeddings=tied) for _ in range(2)]
    before = [table.detach().clone() for table in gates(models[0])]
    ids = random_ids(2, 6)
    logits = models[0](ids).logits[..., : min(size, 97)]
    for seed, model in enumerate(models):
        torch.manual_seed(seed)
        embeddings = model.resize_token_embeddings(*arguments)
        assert embeddings is model.get_input_embeddings()
        assert embeddings.weight.shape == model.lm_head.weight.shape == (size, 32)
        assert (model.lm_head.weight is embeddings.weight) == tied
        assert embeddings.num_embeddings == model.lm_head.out_features == model.config.vocab_size == size
        assert model.vocab_size == size
        tables = gates(model)
        assert len(tables) == (0 if kv_gate == "none" else 2)
        for table, old in zip(tables, before):
            assert table.shape == (size, 12) and table.requires_grad
            assert torch.equal(table[:97], old[:size])
            new_row = old.double().mean(0).float() if kv_gate == "multiply" else torch.zeros(12)
            assert torch.equal(table[97:], new_row.expand(max(size - 97, 0), -1))
        torch.testing.assert_close(model(ids).logits[..., :97], logits, atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = EGMLAForCausalLM.from_pretrained(tmp_path)
    last = torch.full((1, 3), size - 1)
    assert torch.equal(loaded(last).logits, model(last).logits)
    assert loaded.generate(last, max_new_tokens=3).max() < size
    with pytest.raises(ValueError, match=f"{size} lies outside"):
        loaded(last + 1)


def test_resizing_other_heads(make_model):
    """The decoder alone and the classifiers resize their gate tables too."""
    for model_class in (EGMLAModel, EGMLAForSequenceClassification, EGMLAForTokenClassification):
        model = make_model(model_class)
        model.resize_token_embeddings(101)
        assert {table.shape[0] for table in gates(model)} == {101}
        model(torch.full((1, 2), 100))


def test_resizing_keeps_what_points_to_the_tables(make_model):
    """Frozen tables stay frozen, dtypes stay, and a training step after a resize works."""
    model = make_model().to(torch.bfloat16)
    for table in gates(model):
        table.requires_grad_(False)
    model.resize_token_embeddings(99)
    assert not any(table.requires_grad for table in gates(model))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    model(torch.full((1, 3), 98), labels=torch.full((1, 3), 98)).loss.backward()


def test_resizing_below_a_special_id_is_refused(make_model):
    """A vocabulary that would lose a special id is an error that names it, before anything changes."""
    model = make_model(eos_token_id=[5, 95])
    with pytest.raises(ValueError, match=r"`eos_token_id` is 95.*outside the vocabulary.*0 to 89"):
        model.resize_token_embeddings(90)
    assert model.config.vocab_size == 97 == len(gates(model)[0]) == len(model.lm_head.weight)


# Runs where the package cannot be imported; prints what it finds as JSON.
REMOTE = """
import json, os, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "modeling_egmla":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())

import torch
import transformers

torch.set_num_threads(1)
work, ids, found = sys.argv[1], torch.tensor(json.loads(sys.argv[2])), {}
CODE_AND_CONFIG = lambda folder: {
    "files": sorted(os.listdir(folder)),
    "auto_map": json.load(open(os.path.join(folder, "config.json")))["auto_map"],
}

def load(name, auto_class="AutoModelForCausalLM", **kwargs):
    return getattr(transformers, auto_class).from_pretrained(
        os.path.join(work, name), trust_remote_code=True, **kwargs
    ).eval()

@torch.no_grad()
def look(model):
    result = {"module": type(model).__module__, "class": type(model).__name__}
    outputs = model(ids)
    result["output"] = (outputs.last_hidden_state if "last_hidden_state" in outputs else outputs.logits).tolist()
    result["cache"] = type(outputs.get("cache")).__module__
    if "CausalLM" in result["class"]:
        result["text"] = model.generate(ids, max_new_tokens=12, do_sample=False).tolist()
        beams = model.generate(ids, max_new_tokens=6, num_beams=3, do_sample=False, cache_implementation="static")
        result["beams"] = beams.tolist()
    return result

try:
    import modeling_egmla
    found["package"] = True
except ModuleNotFoundError:
    found["package"] = False

for name in sorted(os.listdir(work)):
    if name.startswith("causal"):
        found[name] = look(load(name))
for auto_class in ("AutoModel", "AutoModelForSequenceClassification", "AutoModelForTokenClassification"):
    for name in ("causal", "own " + auto_class):
        try:
            found[f"{auto_class} of {name}"] = look(load(name, auto_class))
        except Exception as error:
            found[f"{auto_class} of {name}"] = {"error": f"{type(error).__name__}: {error}"[:300]}

model = load("causal", dtype=torch.bfloat16)
found["bfloat16"] = str(model.dtype)
model = load("causal")
again = os.path.join(work, "saved again")
model.save_pretrained(again)
found["saved again"] = {**CODE_AND_CONFIG(again), **look(load("saved again"))}
load("saved again").save_pretrained(os.path.join(work, "saved thrice"))
found["saved thrice"] = {**CODE_AND_CONFIG(os.path.join(work, "saved thrice")), **look(load("saved thrice"))}
model.resize_token_embeddings(100)
found["resized"] = [len(m.kv_gate_embed.weight) for m in model.modules() if hasattr(m, "kv_gate_embed")]
try:
    type(model.config).from_preset("egmla-base-kv64-emb256")
except ImportError as error:
    found["preset"] = str(error)
try:
    transformers.AutoModelForCausalLM.from_pretrained(os.path.join(work, "causal"), trust_remote_code=False)
except ValueError as error:
    found["untrusted"] = str(error)
print("FOUND" + json.dumps(found))
"""

# Two exported copies whose text must differ, and names that Python could not import as they are.
EXPORTS = {"causal": 0, "causal other": 1, "causal-v1.0.2-rc": 2, "causal 3.5 (final) copy": 3}


@pytest.fixture(scope="module")
def exported(make_model, tmp_path_factory):
    """What a process finds in exported folders that cannot import the package, has no network and an empty cache."""
    work, cache = tmp_path_factory.mktemp("exports"), tmp_path_factory.mktemp("modules")
    for name, seed in EXPORTS.items():
        make_model(seed=seed, layer_group_size=1 + seed % 2).save_pretrained(work / name)
    for auto_class, model_class in AUTO_CLASSES.items():
        make_model(model_class, seed=9).save_pretrained(work / f"own {auto_class.__name__}")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(cache), "HF_HOME": str(cache / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", REMOTE, str(work), json.dumps(random_ids(2, 6).tolist())]
    process = subprocess.run(
        command, cwd=cache, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return work, json.loads(process.stdout.split("FOUND")[1])


@pytest.mark.slow  # starts a process
@pytest.mark.parametrize("name", EXPORTS)
def test_an_exported_folder_generates_the_same_text_without_the_package(exported, make_model, name):
    """A saved folder carries its code: the same text and logits where the package is not, whatever its name."""
    _, found = exported
    assert found["package"] is False
    seed = EXPORTS[name]
    model = make_model(seed=seed, layer_group_size=1 + seed % 2)
    ids = random_ids(2, 6)
    result = found[name]
    assert result["module"].startswith("transformers_modules.")
    assert result["cache"].startswith("transformers_modules."), "the compressed cache of the same copy"
    torch.testing.assert_close(torch.tensor(result["output"]), model(ids).logits, atol=1e-5, rtol=1e-5)
    assert result["text"] == model.generate(ids, max_new_tokens=12, do_sample=False).tolist()
    assert result["beams"] == model.generate(ids, max_new_tokens=6, do_sample=False, num_beams=3).tolist()


@pytest.mark.slow  # starts a process
def test_exported_folders_are_flat_and_complete(exported):
    """Weights, configs and the model's code, no folder; every Auto class finds its model."""
    work, _ = exported
    for name in EXPORTS:
        assert {path.name for path in (work / name).iterdir()} == CODE | {
            "config.json",
            "generation_config.json",
            "model.safetensors",
        }
        auto_map = json.loads((work / name / "config.json").read_text())["auto_map"]
        assert auto_map["AutoConfig"] == "configuration_egmla.EGMLAConfig"
        for auto_class, model_class in AUTO_CLASSES.items():
            assert auto_map.get(auto_class.__name__) == f"modeling_egmla.{model_class.__name__}"


@pytest.mark.slow  # starts a process
@pytest.mark.parametrize("auto_class", [c for c in AUTO_CLASSES if c is not AutoModelForCausalLM])
def test_other_auto_classes_in_remote_code(exported, make_model, auto_class):
    """Decoder and classifiers load from their own exported folders and from a language model's, as in the package."""
    work, found = exported
    name = auto_class.__name__
    for source in (f"own {name}", "causal"):
        result = found[f"{name} of {source}"]
        assert "error" not in result, result
        assert result["class"] == AUTO_CLASSES[auto_class].__name__
        if source != "causal" or auto_class is AutoModel:
            outputs = auto_class.from_pretrained(work / source)(random_ids(2, 6))
            expected = outputs.last_hidden_state if auto_class is AutoModel else outputs.logits
            torch.testing.assert_close(torch.tensor(result["output"]), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow  # starts a process
def test_load_save_load_keeps_files_and_auto_map(exported):
    """A folder that was loaded by its own code and saved is as complete as before, and so is that one's copy."""
    work, found = exported
    first = json.loads((work / "causal" / "config.json").read_text())["auto_map"]
    for name in ("saved again", "saved thrice"):
        assert set(found[name]["files"]) == {path.name for path in (work / "causal").iterdir()}
        assert found[name]["auto_map"] == first
        assert found[name]["text"] == found["causal"]["text"]
        for file in CODE:
            assert (work / name / file).read_bytes() == (work / "causal" / file).read_bytes()


@pytest.mark.slow  # starts a process
def test_remote_code_in_other_ways(exported):
    """Remote code loads in another dtype and resizes; presets and missing trust are errors that say what to do."""
    _, found = exported
    assert found["bfloat16"] == "torch.bfloat16"
    assert found["resized"] == [100, 100]
    assert "not installed here" in found["preset"]
    assert "trust_remote_code=True" in found["untrusted"]


@pytest.mark.slow  # starts a process
def test_the_package_and_remote_code_in_one_process(exported):
    """Where the package is too, an exported folder loads with and without trust, and caches are understood."""
    work, _ = exported
    ids = random_ids(1, 5)
    models = [
        AutoModelForCausalLM.from_pretrained(work / "causal", trust_remote_code=trust) for trust in (False, True)
    ]
    caches = [model(ids).cache for model in models]
    logits = [model(ids[:, :1], cache=cache).logits for model, cache in zip(models, reversed(caches))]
    assert torch.equal(*logits)


def test_export_of_the_code_needs_nothing_else():
    """The files of a model import each other one level deep, and nothing else of ours."""
    import modeling_egmla

    folder = os.path.dirname(modeling_egmla.__file__)
    for name in CODE:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            imports = [
                line.split()[1] for line in file if line.startswith(("from .", "import modeling", "from modeling"))
            ]
        assert {f"{module.removeprefix('.')}.py" for module in imports} <= CODE
