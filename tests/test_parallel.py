"""Several processes: the model's own plan for tensor parallelism."""

import subprocess
import sys

import pytest


PROGRAM = """
import sys
import torch
import modeling_egmla
from transformers import AutoModelForCausalLM

ids = torch.arange(2, 14)[None]
whole = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
cut = AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto").eval()
with torch.no_grad():
    torch.testing.assert_close(cut(ids).logits, whole(ids).logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(*(model.generate(ids, max_new_tokens=8, do_sample=False) for model in (cut, whole)))
weight = cut.model.layers[0].mlp.gate_proj.weight
assert weight.to_local().shape[0] == weight.shape[0] // 2, "the MLP was not cut"
"""


@pytest.mark.slow  # starts two processes
def test_tensor_parallel_logits_and_text(make_model, tmp_path):
    """`tp_plan="auto"` on two processes gives the logits and text of one, each rank with half of the MLP."""
    make_model(intermediate_size=48, vocab_size=96).save_pretrained(tmp_path / "model")
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "program.py"), str(tmp_path / "model")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
