"""
The presets: one table, from which `python -m modeling_egmla.configuration.presets` writes a folder with a config.json
for each. `EGMLAConfig.from_preset(name)` and `AutoConfig.from_pretrained(folder)` read the folders.

The architectures are those of arXiv:2509.16686 (tables 7, 11 and 12). What it does not report was recovered from its
parameter counts: a vocabulary of 50,304, tied embeddings, an MLP of 2.5 times the width, no biases, 16 heads in Large
and XLarge. The rope base and the context of Base are our choice.
"""

import json
from pathlib import Path


SIZES = {
    "base": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "max_position_embeddings": 4096,
    },
    "large": {
        "hidden_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "max_position_embeddings": 2048,
    },
    "xlarge": {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "max_position_embeddings": 4096,
    },
}

# Size, width of the latent, width of the gate tables (0: no gate, plain MLA), and layer group sizes.
MODELS = [
    ("base", 256, 0, (1,)),
    ("base", 256, 256, (1,)),
    ("base", 128, 256, (1,)),
    ("base", 64, 256, (1,)),
    ("base", 16, 256, (1,)),
    ("base", 64, 64, (1,)),
    ("base", 64, 128, (1,)),
    ("base", 64, 512, (1,)),
    ("base", 64, 1024, (1,)),
    ("base", 64, 2048, (1,)),
    ("large", 512, 0, (1,)),
    ("large", 128, 512, (1, 2, 4, 6)),
    ("large", 256, 512, (1, 2, 4, 6)),
    ("xlarge", 512, 0, (1,)),
    ("xlarge", 128, 512, (1,)),
]


def preset_name(size: str, latent: int, table: int, group: int) -> str:
    """`mla-base-kv256`, `egmla-base-kv64-emb256`, `egmla-large-kv256-emb512-lgz2`."""
    name = f"egmla-{size}-kv{latent}-emb{table}" if table else f"mla-{size}-kv{latent}"
    return name if group == 1 else f"{name}-lgz{group}"


def preset_config(size: str, latent: int, table: int, group: int) -> dict:
    """Content of a preset's config.json."""
    shape = SIZES[size]
    gate = {"kv_gate": "multiply", "kv_gate_dim": table} if table else {"kv_gate": "none"}
    return {
        "architectures": ["EGMLAForCausalLM"],
        "model_type": "egmla",
        "vocab_size": 50304,
        **shape,
        "intermediate_size": shape["hidden_size"] * 5 // 2,
        "kv_lora_rank": latent,
        "qk_rope_head_dim": 64,
        **gate,
        "layer_group_size": group,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
    }


PRESETS = {
    preset_name(size, latent, table, group): preset_config(size, latent, table, group)
    for size, latent, table, groups in MODELS
    for group in groups
}


def write_presets(folder: Path) -> None:
    """Writes `folder/<preset>/config.json` for every preset."""
    for name, config in PRESETS.items():
        path = folder / name / "config.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_presets(Path(__file__).parent)
