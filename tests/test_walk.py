"""The whole way of a model: converted, exported, published, and used on a machine that does not have this package."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import minihub
import pytest
import torch
from conftest import TINY, scramble
from minihub import TOKEN, MiniHub
from tiny_export import tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM
from typer.testing import CliRunner

from modeling_egmla.commands import app
from modeling_egmla.configuration import preset_path
from modeling_egmla.evaluation import local_tasks_folder


PROMPT = "The state of the Union is"
# What the model's card and the README tell a reader to type.
ELSEWHERE = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
try:
    import modeling_egmla
except ModuleNotFoundError:
    pass
else:
    sys.exit("the package is not absent")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
inputs = tokenizer(sys.argv[2], return_tensors="pt")
outputs = model.generate(**inputs, max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
assert type(model).__module__.startswith("transformers_modules."), type(model)
assert type(outputs.cache).__name__ == "EGMLACache"
print(json.dumps([outputs.sequences[0].tolist(), model(**inputs).logits[0, -1].tolist(), tokenizer.chat_template]))
"""


def egmla(*arguments) -> str:
    """Runs a line of the README in this process."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, f"egmla {shlex.join(map(str, arguments))}\n{result.output}"
    return result.output


def run_elsewhere(hub: MiniHub, folder: Path, *command) -> str:
    """Runs a command where this package cannot be imported, with a cache of its own, and the Hub."""
    absent = folder / "absent"
    absent.mkdir(exist_ok=True)
    (absent / "modeling_egmla.py").write_text("raise ModuleNotFoundError('absent here', name='modeling_egmla')\n")
    environment = os.environ | {
        "PYTHONPATH": str(absent),
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "0",  # the server on loopback is all of the network that a test has
        "HF_HUB_DISABLE_XET": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def dense_deepseek_v3(folder: Path) -> Path:
    """A model that the library itself made, with tokenizer and chat template, and a vocabulary that is padded."""
    shape = {key: value for key, value in TINY.items() if not key.startswith("kv_gate")} | {"vocab_size": 264}
    shape |= {"num_key_value_heads": TINY["num_attention_heads"], "first_k_dense_replace": TINY["num_hidden_layers"]}
    config = DeepseekV3Config(**shape, q_lora_rank=None, eos_token_id=1)
    scramble(DeepseekV3ForCausalLM(config)).save_pretrained(folder)
    tiny_tokenizer(tokens=258).save_pretrained(folder)
    return folder


def from_mla(folder: Path) -> Path:
    """A start of EG-MLA from the library's DeepSeek-V3: its layout first, then gates, fitted on text."""
    egmla("convert", dense_deepseek_v3(folder / "deepseek"), folder / "mla")
    (folder / "text.txt").write_text("The Senate and the House met again to hear of the state of the Union. " * 30)
    text = ["--calibration", folder / "text.txt", "--calibration-tokens", 1024]
    report = egmla("convert", folder / "mla", folder / "start", "--gate", "multiply", "--gate-dim", 8, *text)
    assert "LayerNorm fitted" in report
    return folder / "start"


@pytest.mark.slow  # starts processes that import torch and the harness
@pytest.mark.parametrize("source", [lambda folder: preset_path(), from_mla], ids=["embedded", "deepseek_v3"])
def test_from_here_to_another_machine(tmp_path, monkeypatch, source):
    """
    A new user converts, exports, checks and pushes by the README's commands; on a machine without this package, the
    model loads from the Hub with its own code, generates the same text on the compressed cache, and the harness's own
    command scores it.
    """
    saved = source(tmp_path)
    with MiniHub(tmp_path / "server") as hub:
        minihub.use_hub(monkeypatch, hub, tmp_path / "cache")
        egmla("export", saved, tmp_path / "my-model", "--license", "apache-2.0", "--new-card")
        assert "all as exported" in egmla("verify", tmp_path / "my-model")
        egmla("push", tmp_path / "my-model", "my-model", "--tag", "v1")
        egmla("pull", "tester/my-model", tmp_path / "pulled", "--revision", "v1")

        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        sequence, logits, template = json.loads(
            run_elsewhere(hub, elsewhere, sys.executable, "-c", ELSEWHERE, "tester/my-model", PROMPT).splitlines()[-1]
        )
        run_elsewhere(
            hub,
            elsewhere,
            *(sys.executable, "-m", "lm_eval", "--model", "hf"),
            *("--model_args", "pretrained=tester/my-model,trust_remote_code=True"),
            *("--tasks", "sotu_continuation", "--include_path", local_tasks_folder(), "--limit", "2"),
            *("--device", "cpu", "--batch_size", "2", "--output_path", "scores"),
        )

    model, tokenizer = AutoModelForCausalLM.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    suppressed = list(range(len(tokenizer), model.config.vocab_size)) or None
    same = model.generate(**inputs, max_new_tokens=12, do_sample=False, suppress_tokens=suppressed)
    assert sequence == same[0].tolist()
    torch.testing.assert_close(torch.tensor(logits), model(**inputs).logits[0, -1].detach(), atol=1e-5, rtol=0)
    assert template == tokenizer.chat_template
    (scores,) = (elsewhere / "scores").rglob("results_*.json")
    results = json.loads(scores.read_text())
    assert results["n-samples"]["sotu_continuation"]["effective"] == 2
    assert 0 <= results["results"]["sotu_continuation"]["acc,none"] <= 1
