"""
The presets: one table, from which `python -m modeling_egmla.configuration.presets` writes a folder with a config.json
for each, and a recipe that trains it as the paper says. `EGMLAConfig.from_preset(name)` and
`AutoConfig.from_pretrained(folder)` read the folders, `egmla train` the recipes.

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


# From the paper: 0.39 M tokens a step, 50 B tokens a run, a learning rate for each size.
BATCH_TOKENS = 393_216
STEPS = -(-50_000_000_000 // BATCH_TOKENS)
LEARNING_RATES = {"base": "6.0e-4", "large": "2.5e-4", "xlarge": "2.0e-4"}

RECIPE = """\
# {name} trained as in arXiv:2509.16686. Written by configuration/presets.py; copy it to change it.
# "ours": the paper does not say, and this is our choice. Loss and scores of the paper's run are not promised by it.
#   egmla train configuration/recipes/{name}.yaml
# A stream that is resumed at step N is first read and tokenised again for N steps: for a run of days, and with disk
# enough, take `streaming: false` and `dataset_split: "train[:13%]"`.
model:
  preset: {name}
tokenizer:
  path: openai-community/gpt2  # ours: 50,257 tokens of the 50,304 that the paper's parameter counts give
data:
  dataset: OptimalScale/ClimbMix  # the text of nvidia/Nemotron-ClimbMix, which NVIDIA published as GPT-2 tokens
  streaming: true
  shuffle_buffer: 100000  # ours
  validation_share: 0.01  # ours, and so are the documents that it holds out
  validation_documents: 2000  # ours
  sequence_length: {length}{length_note}
training:
  output_dir: out/{name}
  batch_tokens: {batch}  # 0.39 M
  sequences_per_device: 4  # ours: as many as memory allows; the batch stays the same
  steps: {steps}  # 50 B tokens
  learning_rate: {learning_rate}
  schedule: cosine_with_min_lr  # ours
  schedule_arguments: {{min_lr_rate: 0.1}}  # ours
  warmup_steps: 2000  # ours
  weight_decay: 0.1  # ours
  adam_beta2: 0.95  # ours
  max_grad_norm: 1.0  # ours
  seed: 0  # ours: the paper names none
  eval_steps: 1000  # ours
  save_steps: 1000  # ours
  save_dtype: bfloat16  # ours
  arguments:
    bf16: true  # ours
gate_tables:
  weight_decay: 0.0  # ours
"""


def preset_recipe(name: str, size: str) -> str:
    """Content of the recipe that trains a preset as the paper says."""
    return RECIPE.format(
        name=name,
        length=SIZES[size]["max_position_embeddings"],
        length_note="  # ours: the longest prompt of the paper's latencies" if size == "base" else "",
        batch=BATCH_TOKENS,
        steps=STEPS,
        learning_rate=LEARNING_RATES[size],
    )


PRESETS = {
    preset_name(size, latent, table, group): preset_config(size, latent, table, group)
    for size, latent, table, groups in MODELS
    for group in groups
}


RECIPES = {
    name: preset_recipe(name, size)
    for size, latent, table, groups in MODELS
    for group in groups
    for name in [preset_name(size, latent, table, group)]
}


def write_presets(folder: Path) -> None:
    """Writes `folder/<preset>/config.json` and `folder/recipes/<preset>.yaml` for every preset."""
    for name, config in PRESETS.items():
        write(folder / name / "config.json", json.dumps(config, indent=2) + "\n")
    for name, recipe in RECIPES.items():
        write(folder / "recipes" / f"{name}.yaml", recipe)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_presets(Path(__file__).parent)
