"""A configuration that cannot work says which field is wrong, and one that works survives being saved."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig

from modeling_egmla import EGMLAConfig, EGMLAForCausalLM


WIDTHS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_gate_dim", "layer_group_size",
    "max_position_embeddings",
)  # fmt: skip
WRONG_VALUES = [
    *[(field, value) for field in WIDTHS for value in (0, -1)],
    ("q_lora_rank", -1),
    ("qk_rope_head_dim", 7),
    ("qk_rope_head_dim", 1),
    ("kv_gate", "sigmoid"),
    ("kv_gate", "Multiply"),
    ("kv_gate_norm", "rms_norm"),
    ("kv_gate_norm_eps", -1e-5),
    ("kv_gate_norm_eps", math.nan),
    ("rms_norm_eps", -1e-6),
    ("initializer_range", -0.02),
    ("initializer_range", math.nan),
    ("attention_dropout", 1.5),
    ("attention_dropout", -0.1),
    ("attention_dropout", math.nan),
    ("layer_group_size", 3),
    ("hidden_act", "sillu"),
    ("bos_token_id", 97),
    ("eos_token_id", -1),
    ("eos_token_id", [1, 97]),
    ("pad_token_id", 97),
    ("head_dim", 7),
    ("qk_head_dim", 8),
    ("num_key_value_heads", 1),
    ("per_layer_config", {0: {"hidden_size": 16}}),
]
WRONG_TYPES = [
    ("hidden_size", "32"),
    ("hidden_size", 32.5),
    ("vocab_size", True),
    ("num_hidden_layers", None),
    ("num_attention_heads", [3, 3]),
    ("kv_gate", None),
    ("kv_gate", True),
    ("kv_gate_norm", None),
    ("rope_interleave", "yes"),
    ("tie_word_embeddings", "no"),
    ("eos_token_id", "</s>"),
    ("eos_token_id", [1, "</s>"]),
    ("rope_parameters", "yarn"),
    ("rope_parameters", [1]),
]
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.0, 1.0], "long_factor": [1.0, 2.0, 4.0]}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
GOOD_ROPES = {
    "nothing": None,
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "theta-alone": {"rope_theta": 100},
    "linear": {"rope_type": "linear", "factor": 2},
    "dynamic": DYNAMIC,
    "yarn": YARN,
    "yarn-deepseek": {
        **YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 64, "truncate": False, "attention_factor": None,
    },
    "llama3": LLAMA3,
    "longrope": LONGROPE,
    "old-name-of-the-type": {"type": "linear", "factor": 2.0},
}  # fmt: skip
# (what the message must name, settings)
WRONG_ROPES = [
    ("rope_type", {"rope_type": "yarm", "factor": 4.0}),
    ("rope_type", {"rope_type": None}),
    ("rope_type", {"rope_type": ["yarn"]}),
    ("rope_type", {"rope_type": "proportional", "partial_rotary_factor": 0.5}),
    ("factor", {"rope_type": "linear"}),
    ("factor", {"rope_type": "yarn"}),
    ("factor", {**YARN, "factor": None}),
    ("factor", {**YARN, "factor": 0.5}),
    ("factor", {**YARN, "factor": "4"}),
    ("factor", {**YARN, "factor": True}),
    ("factor", {**YARN, "factor": math.nan}),
    ("factor", {**YARN, "factor": math.inf}),
    ("rope_theta", {"rope_theta": 0}),
    ("rope_theta", {"rope_theta": -1e4}),
    ("rope_theta", {"rope_theta": None}),
    ("rope_theta", {"rope_theta": "1e4"}),
    ("rope_theta", {"rope_theta": math.nan}),
    ("rope_theta", {"rope_theta": math.inf}),
    ("rope_theta", {**YARN, "rope_theta": 1.0}),  # yarn divides by its logarithm
    ("attention_factor", {**YARN, "attention_factor": -1.0}),
    ("beta_fast", {**YARN, "beta_fast": "fast"}),
    ("beta_slow", {**YARN, "beta_fast": 1, "beta_slow": 2}),
    ("mscale", {**YARN, "mscale": -1.0}),
    ("mscale_all_dim", {**YARN, "mscale_all_dim": "1"}),
    ("truncate", {**YARN, "truncate": "no"}),
    ("original_max_position_embeddings", {**YARN, "original_max_position_embeddings": 0}),
    ("original_max_position_embeddings", {**YARN, "original_max_position_embeddings": None}),
    ("original_max_position_embeddings", {**YARN, "original_max_position_embeddings": "64"}),
    ("low_freq_factor", {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}),
    ("high_freq_factor", {**LLAMA3, "high_freq_factor": 1.0}),
    ("short_factor", {k: v for k, v in LONGROPE.items() if k != "short_factor"}),
    ("short_factor", {**LONGROPE, "short_factor": [1.0, 1.0]}),
    ("short_factor", {**LONGROPE, "short_factor": [1.0, 1.0, 0.0]}),
    ("long_factor", {**LONGROPE, "long_factor": [1.0, 2.0, "4"]}),
    ("long_factor", {**LONGROPE, "long_factor": 2.0}),
    ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    ("factor", {"rope_type": "default", "factor": 4.0}),  # the type was forgotten
    ("mscale", {"rope_type": "linear", "factor": 2.0, "mscale": 1.0}),
    ("sliding_attention", {"sliding_attention": {"rope_type": "default"}}),
]


class TestFaults:
    @pytest.mark.parametrize(("field", "value"), WRONG_VALUES)
    def test_values(self, make_config, field, value):
        """A field whose value cannot work raises a `ValueError` that names it, when the config is made."""
        with pytest.raises(ValueError, match=f"`{field}`"):
            make_config(**{field: value})

    @pytest.mark.parametrize(("field", "value"), WRONG_TYPES)
    def test_types(self, make_config, field, value):
        """A field of the wrong type raises the library's own error for it, which names the field and both types."""
        with pytest.raises(StrictDataclassFieldValidationError, match=f"'{field}'"):
            make_config(**{field: value})

    @pytest.mark.parametrize(("key", "rope"), WRONG_ROPES, ids=lambda v: v if isinstance(v, str) else json.dumps(v))
    def test_rope(self, make_config, key, rope):
        """Rotary settings that cannot work, or that nothing would read, are errors that name the key and its field."""
        with pytest.raises(ValueError, match=rf"`rope_parameters.*{key}"):
            make_config(rope_parameters=rope)

    def test_dynamic_rope_needs_more_than_one_pair(self, make_config):
        """The dynamic type divides by (rotary width - 2)."""
        with pytest.raises(ValueError, match="qk_rope_head_dim"):
            make_config(rope_parameters=dict(DYNAMIC), qk_rope_head_dim=2)

    def test_the_message_is_one_line(self, make_config):
        """The message is a sentence for users, without the names of validators."""
        with pytest.raises(ValueError) as error:
            make_config(qk_rope_head_dim=7)
        assert "\n" not in str(error.value) and "validator" not in str(error.value)

    @pytest.mark.parametrize(("field", "value"), [("kv_gate", "sigmoid"), ("layer_group_size", 3), ("vocab_size", 0)])
    def test_overrides_on_loading(self, make_config, tmp_path, field, value):
        """Overrides given to `from_pretrained` are checked like arguments of the config itself."""
        make_config().save_pretrained(tmp_path)
        for loader in (EGMLAConfig, AutoConfig):
            with pytest.raises(Exception, match=f"`{field}`"):
                loader.from_pretrained(tmp_path, **{field: value})

    @pytest.mark.parametrize(
        ("field", "value"), [("kv_gate", "sigmoid"), ("layer_group_size", 3), ("kv_gate_norm", "x")]
    )
    def test_changes_before_building(self, make_config, field, value):
        """A field that was changed to a wrong value since is named when a model is built from the config."""
        config = make_config()
        setattr(config, field, value)
        with pytest.raises(Exception, match=f"`{field}`"):
            EGMLAForCausalLM(config)

    def test_changes_before_saving(self, make_config, tmp_path):
        """Nor is a wrong config saved."""
        config = make_config()
        config.kv_gate = "sigmoid"
        with pytest.raises(Exception, match="`kv_gate`"):
            config.save_pretrained(tmp_path)

    def test_unknown_preset(self):
        """An unknown preset name is answered with the names there are."""
        with pytest.raises(ValueError, match=r"'egmla-huge'.*egmla-base-kv64-emb256.*mla-xlarge-kv512"):
            EGMLAConfig.from_preset("egmla-huge")
        for name in ("", "..", "egmla-base-kv64-emb256/config.json", "__init__.py"):
            with pytest.raises(ValueError, match="no preset"):
                EGMLAConfig.from_preset(name)


class TestFields:
    @pytest.mark.parametrize("name", GOOD_ROPES)
    def test_good_rope(self, make_config, name):
        """Every rotary type of the library builds a model and survives saving."""
        config = make_config(rope_parameters=GOOD_ROPES[name] and dict(GOOD_ROPES[name]))
        EGMLAForCausalLM(config)
        assert EGMLAConfig.from_dict(json.loads(config.to_json_string(use_diff=False))).to_dict() == config.to_dict()
        assert config.rope_parameters["rope_theta"] == (GOOD_ROPES[name] or {}).get("rope_theta", 10000.0)

    def test_old_rope_arguments(self, make_config):
        """`rope_theta` and `rope_scaling` of older checkpoints are understood."""
        assert make_config(rope_theta=5e5).rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
        rope = make_config(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}).rope_parameters
        assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("linear", 2.0, 5e5)

    def test_no_low_rank_query(self, make_config):
        """`q_lora_rank` 0 means none, and is saved as none."""
        assert make_config(q_lora_rank=0).q_lora_rank is None
        assert make_config(q_lora_rank=0).to_dict() == make_config(q_lora_rank=None).to_dict()
        assert make_config(q_lora_rank=5).q_lora_rank == 5

    def test_no_low_rank_query_on_loading(self, make_config, tmp_path):
        """Also where a folder or an override says 0."""
        make_config(q_lora_rank=5).save_pretrained(tmp_path)
        config = EGMLAConfig.from_pretrained(tmp_path, q_lora_rank=0)
        assert hasattr(EGMLAForCausalLM(config).model.layers[0].self_attn, "q_proj")
        fields = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**fields, "q_lora_rank": 0}))
        assert EGMLAConfig.from_pretrained(tmp_path).q_lora_rank is None

    def test_plain_mla_ignores_the_gate_fields(self, make_config):
        """`kv_gate="none"` is plain MLA, whatever the other gate fields say."""
        expected = EGMLAForCausalLM(make_config(kv_gate="none"))
        shapes = {name: tensor.shape for name, tensor in expected.state_dict().items()}
        for changes in (
            {"kv_gate_dim": 64},
            {"kv_gate_norm": "none"},
            {"kv_gate_norm_eps": 0.1},
            {"kv_gate_dim": 0, "kv_gate_norm": "whatever", "kv_gate_norm_eps": 0.0},
        ):
            model = EGMLAForCausalLM(make_config(kv_gate="none", **changes))
            assert {name: tensor.shape for name, tensor in model.state_dict().items()} == shapes

    def test_derived_fields(self, make_config):
        """The library reads these from a config; they follow from ours and may be given only if they agree."""
        config = make_config(num_hidden_layers=6, layer_group_size=3)
        assert config.head_dim == 6 and config.qk_head_dim == 14 and config.num_key_value_heads == 3
        assert config.kv_width == 3 * 18
        assert config.num_layer_groups == 2
        assert config.cache_elements_per_token == 2 * (16 + 6)
        make_config(head_dim=6, qk_head_dim=14, num_key_value_heads=3)
        for name in ("head_dim", "qk_head_dim", "num_key_value_heads"):
            assert name not in config.to_dict()
            with pytest.raises(AttributeError, match=name):
                setattr(config, name, 1)

    def test_unknown_attributes(self, make_config):
        """A misspelt attribute is an error to read, not a silent None."""
        with pytest.raises(AttributeError, match="kv_lora_rnk"):
            make_config().kv_lora_rnk

    def test_defaults(self):
        """The defaults are the documented ones."""
        config = EGMLAConfig()
        expected = {
            "vocab_size": 50304, "hidden_size": 768, "intermediate_size": 1920, "num_hidden_layers": 12,
            "num_attention_heads": 12, "q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64, "v_head_dim": 64, "kv_gate": "multiply", "kv_gate_dim": 256,
            "kv_gate_norm": "layer_norm", "kv_gate_norm_eps": 1e-5, "layer_group_size": 1, "rope_interleave": False,
            "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 4096, "initializer_range": 0.02,
            "tie_word_embeddings": True, "attention_bias": False, "attention_dropout": 0.0, "use_cache": True,
            "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        }  # fmt: skip
        assert {name: getattr(config, name) for name in expected} == expected
        assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
        assert config.model_type == "egmla"

    @pytest.mark.parametrize(
        "rope", [{"rope_type": "linear", "factor": 2.0}, {"rope_theta": 7e5}, {"type": "linear", "factor": 2.0}]
    )
    def test_rotary_settings_given_while_loading(self, tmp_path, rope):
        """What they leave out is the checkpoint's base, and the default type."""
        EGMLAConfig(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).save_pretrained(tmp_path)
        loaded = EGMLAConfig.from_pretrained(tmp_path, rope_parameters=rope).rope_parameters
        assert loaded["rope_theta"] == rope.get("rope_theta", 5e5)
        assert loaded["rope_type"] == ("linear" if "factor" in rope else "default")
        written = json.loads((tmp_path / "config.json").read_text())
        del written["rope_parameters"]
        for base in ({}, {"rope_theta": 5e5}):
            (tmp_path / "config.json").write_text(json.dumps(written | base))
            loaded = EGMLAConfig.from_pretrained(tmp_path, rope_parameters=rope).rope_parameters
            assert loaded["rope_theta"] == rope.get("rope_theta", base.get("rope_theta", 10000.0))

    def test_configs_share_nothing(self):
        """Changing one config's rotary settings changes no other's."""
        first, second = EGMLAConfig(), EGMLAConfig()
        first.rope_parameters["rope_theta"] = 1.0
        assert second.rope_parameters["rope_theta"] == 10000.0


class TestSaving:
    OTHER_VALUES = {
        "vocab_size": 101, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 4,
        "num_attention_heads": 2, "q_lora_rank": 10, "kv_lora_rank": 9, "qk_nope_head_dim": 5, "qk_rope_head_dim": 6,
        "v_head_dim": 7, "kv_gate": "add", "kv_gate_dim": 11, "kv_gate_norm": "none", "kv_gate_norm_eps": 1e-3,
        "layer_group_size": 2, "rope_parameters": {**YARN, "rope_theta": 99.0, "original_max_position_embeddings": 7},
        "rope_interleave": True, "rms_norm_eps": 1e-4, "hidden_act": "gelu", "max_position_embeddings": 77,
        "initializer_range": 0.5, "tie_word_embeddings": False, "attention_bias": True, "attention_dropout": 0.25,
        "use_cache": False, "bos_token_id": 3, "eos_token_id": [4, 5], "pad_token_id": 6,
    }  # fmt: skip

    def fields(self):
        """Fields of our own, those of the library's base class left out."""
        names = {field.name for field in dataclasses.fields(EGMLAConfig)}
        return names & set(EGMLAConfig.__annotations__)

    def test_every_field_survives(self, tmp_path):
        """A saved and reloaded config keeps every field: all of them, away from their defaults."""
        default, values = EGMLAConfig(), dict(self.OTHER_VALUES)
        own = self.fields()
        for name in own - values.keys():  # fields that this table does not know yet
            value = getattr(default, name)
            assert isinstance(value, float), f"add {name} to OTHER_VALUES"
            values[name] = value / 2
        config = EGMLAConfig(**{k: dict(v) if isinstance(v, dict) else v for k, v in values.items()})
        config.save_pretrained(tmp_path)
        for reloaded in (
            EGMLAConfig.from_pretrained(tmp_path),
            AutoConfig.from_pretrained(tmp_path),
            EGMLAConfig.from_dict(config.to_dict()),
            EGMLAConfig.from_dict(config.to_diff_dict()),
        ):
            assert type(reloaded) is EGMLAConfig
            for name in sorted(own):
                assert getattr(config, name) == values[name] != getattr(default, name), name
                assert getattr(reloaded, name) == values[name], name
                assert type(getattr(reloaded, name)) is type(values[name]), name

    def test_none_survives(self, tmp_path):
        """Ids that were taken away stay away: None is saved as None."""
        EGMLAConfig(bos_token_id=None, eos_token_id=None, q_lora_rank=None).save_pretrained(tmp_path)
        reloaded = EGMLAConfig.from_pretrained(tmp_path)
        assert (reloaded.bos_token_id, reloaded.eos_token_id, reloaded.q_lora_rank) == (None, None, None)

    def test_labels_survive(self, make_config, tmp_path):
        """Label names of classification heads survive too."""
        make_config(id2label={0: "a", 1: "b", 2: "c"}, label2id={"a": 0, "b": 1, "c": 2}).save_pretrained(tmp_path)
        reloaded = EGMLAConfig.from_pretrained(tmp_path)
        assert reloaded.num_labels == 3 and reloaded.id2label == {0: "a", 1: "b", 2: "c"}


def test_unsupported_transformers():
    """Outside the supported range the import says so in one sentence that names both versions and the remedy."""
    code = """
import sys, transformers
for version in ("5.23.9", "6.0.0", "6.1.0.dev0", "5.99.0"):
    transformers.__version__ = version
    try:
        import modeling_egmla
        print(version, "| imported")
    except ImportError as error:
        print(version, "|", error)
    for name in [name for name in sys.modules if name.startswith("modeling_egmla")]:
        del sys.modules[name]
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = dict(line.split(" | ") for line in result.stdout.splitlines())
    for version in ("5.23.9", "6.0.0", "6.1.0.dev0"):
        assert version in said[version] and "5.24" in said[version] and "pip install" in said[version]
        assert said[version].count(". ") == 0
    assert said["5.99.0"] == "imported"
