"""The presets are the paper's models: parameters and cache to the unit, from folders that equal one table."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import modeling_egmla.configuration
from modeling_egmla import EGMLAConfig, EGMLAForCausalLM
from modeling_egmla.configuration.presets import PRESETS, write_presets


FOLDER = Path(modeling_egmla.configuration.__file__).parent

# Preset: activated parameters, gate tables, total, cache elements a token.
PAPER = {
    "mla-base-kv256": (120_641_280, 0, 120_641_280, 3_840),
    "egmla-base-kv256-emb256": (125_396_736, 154_533_888, 279_930_624, 3_840),
    "egmla-base-kv128-emb256": (121_856_256, 154_533_888, 276_390_144, 2_304),
    "egmla-base-kv64-emb256": (120_086_016, 154_533_888, 274_619_904, 1_536),
    "egmla-base-kv16-emb256": (118_758_336, 154_533_888, 273_292_224, 960),
    "egmla-base-kv64-emb64": (116_547_072, 38_633_472, 155_180_544, 1_536),
    "egmla-base-kv64-emb128": (117_726_720, 77_266_944, 194_993_664, 1_536),
    "egmla-base-kv64-emb512": (124_804_608, 309_067_776, 433_872_384, 1_536),
    "egmla-base-kv64-emb1024": (134_241_792, 618_135_552, 752_377_344, 1_536),
    "egmla-base-kv64-emb2048": (153_116_160, 1_236_271_104, 1_389_387_264, 1_536),
    "mla-large-kv512": (645_718_016, 0, 645_718_016, 6_912),
    "egmla-large-kv128-emb512": (642_665_984, 309_067_776, 951_733_760, 2_304),
    "egmla-large-kv256-emb512": (652_104_704, 309_067_776, 961_172_480, 3_840),
    "mla-xlarge-kv512": (1_188_411_392, 0, 1_188_411_392, 13_824),
    "egmla-xlarge-kv128-emb512": (1_182_307_328, 618_135_552, 1_800_442_880, 4_608),
}
GROUPED = [name for name in PRESETS if "-lgz" in name]


def count(name: str) -> tuple[int, int, int, int]:
    """Counts the parameters of a model built without memory: activated, gate tables, total; and cache elements."""
    config = EGMLAConfig.from_preset(name)
    with torch.device("meta"):
        model = EGMLAForCausalLM(config)
    sizes = {parameter_name: parameter.numel() for parameter_name, parameter in model.named_parameters()}
    tables = sum(size for parameter_name, size in sizes.items() if parameter_name.endswith("kv_gate_embed.weight"))
    total = sum(sizes.values())
    return total - tables, tables, total, config.cache_elements_per_token


@pytest.mark.parametrize("name", PAPER)
def test_counts_of_the_paper(name):
    """Every preset has the parameters and the cache that the paper's tables give it."""
    assert count(name) == PAPER[name]


@pytest.mark.parametrize("name", GROUPED)
def test_counts_of_layer_groups(name):
    """Of a group's layers, one has a latent, a rotary key and an up-projection, and caches; all have gates."""
    base, group = name.split("-lgz")
    group = int(group)
    config = EGMLAConfig.from_preset(name)
    activated, tables, total, elements = count(base)
    shared = (
        config.hidden_size * (config.kv_lora_rank + config.qk_rope_head_dim)
        + config.kv_lora_rank
        + config.kv_lora_rank * config.kv_width
    )
    dropped = shared * (config.num_hidden_layers - config.num_hidden_layers // group)
    assert count(name) == (activated - dropped, tables, total - dropped, elements // group)


def test_all_presets_are_checked():
    """The paper's fifteen models, and its layer groups of 2, 4 and 6, are there by the names that users type."""
    assert set(PRESETS) == set(PAPER) | set(GROUPED)
    assert {name for name in GROUPED if "kv256" in name} == {f"egmla-large-kv256-emb512-lgz{n}" for n in (2, 4, 6)}


def test_folders_equal_the_table(tmp_path):
    """The folders in the repository are what the table writes, byte for byte, and no stale one is left behind."""
    write_presets(tmp_path)
    written = {path.parent.name: path.read_text() for path in tmp_path.glob("*/config.json")}
    assert set(written) == set(PRESETS)
    for name, text in written.items():
        assert (FOLDER / name / "config.json").read_text() == text
    recipes = {path.stem: path.read_text() for path in (tmp_path / "recipes").glob("*.yaml")}
    assert set(recipes) == set(PRESETS)
    for name, text in recipes.items():
        assert (FOLDER / "recipes" / f"{name}.yaml").read_text() == text
    folders = {path.parent.name for path in FOLDER.glob("*/config.json") if not [*path.parent.glob("*.safetensors")]}
    assert folders == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_recipes_are_the_papers(name):
    """A preset's recipe is one that can be run, with the paper's batch, tokens and rate; the rest is marked."""
    pytest.importorskip("datasets")
    from modeling_egmla.training import load_recipe
    from modeling_egmla.training.arguments import build_arguments

    path = FOLDER / "recipes" / f"{name}.yaml"
    recipe = load_recipe(path)
    config = EGMLAConfig.from_preset(recipe.model.preset)
    assert recipe.model.preset == name
    assert recipe.data.sequence_length <= config.max_position_embeddings
    assert recipe.training.batch_tokens == pytest.approx(0.39e6, rel=0.01)
    assert recipe.training.batch_tokens * recipe.training.steps == pytest.approx(50e9, rel=1e-4)
    size = (config.hidden_size, config.num_hidden_layers)
    assert recipe.training.learning_rate == {(768, 12): 6e-4, (2048, 12): 2.5e-4, (2048, 24): 2e-4}[size]
    arguments = build_arguments(recipe.training, recipe.data.sequence_length)
    sequences = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    assert sequences * recipe.data.sequence_length == recipe.training.batch_tokens
    stated = {"preset", "dataset", "streaming", "output_dir", "batch_tokens", "steps", "learning_rate"}
    for line in path.read_text().splitlines():
        key, colon, value = line.strip().partition(":")
        if colon and value and not key.startswith("#") and "# ours" not in line:
            assert key in stated | ({"sequence_length"} if config.hidden_size > 768 else set()), line


@pytest.mark.parametrize("name", PRESETS)
def test_loadable_by_name_and_by_path(name, tmp_path):
    """A preset is the same configuration by name, by path, and after saving."""
    by_name = EGMLAConfig.from_preset(name)
    by_path = AutoConfig.from_pretrained(FOLDER / name)
    by_name.save_pretrained(tmp_path)
    for config in (by_name, by_path, EGMLAConfig.from_pretrained(tmp_path)):
        fields = json.loads(config.to_json_string(use_diff=False))
        assert {field: fields[field] for field in PRESETS[name]} == PRESETS[name]


def test_auto_class_builds_a_preset():
    """`AutoModelForCausalLM.from_config` takes a preset."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(EGMLAConfig.from_preset("egmla-large-kv256-emb512-lgz6"))
    assert isinstance(model, EGMLAForCausalLM)


def test_unknown_preset_lists_those_there_are():
    """A misspelt name is answered with the names."""
    with pytest.raises(ValueError, match="egmla-base-kv64-emb256"):
        EGMLAConfig.from_preset("egmla-base")
