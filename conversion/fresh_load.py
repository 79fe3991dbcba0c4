"""
Runs a model on fixed ids. As a script, loads a folder with its own code in a process where this package cannot be
imported, as on a machine that does not have it, and prints what comes out:

    python -P fresh_load.py FOLDER AUTO_CLASS < ids.json
"""

import json
import sys


def forward_sample(model, input_ids: list[int], size: int = 64) -> list[float]:
    """
    Up to `size` values, evenly spaced, of the logits for one sequence (of a model without a head, the hidden states).

    Raises:
        ValueError: a value is not finite.
    """
    import torch

    was_training = model.training
    model.eval()
    with torch.inference_mode():
        outputs = model(input_ids=torch.tensor([input_ids], device=model.device), use_cache=False)
    model.train(was_training)
    values = outputs["logits"] if "logits" in outputs else outputs["last_hidden_state"]
    if not values.isfinite().all():
        raise ValueError("The forward pass gives values that are not finite: the weights are damaged.")
    values = values.float().flatten()
    return values[:: -(-values.numel() // size)].tolist()


def main(folder: str, auto_class: str) -> None:
    sys.modules["modeling_egmla"] = None  # the import system's way to say that there is no such package
    import transformers

    model, info = getattr(transformers, auto_class).from_pretrained(
        folder, trust_remote_code=True, use_safetensors=True, dtype="auto", output_loading_info=True
    )
    if any(info.values()):
        raise ValueError(f"The weights do not fit the code: {info}")
    print(json.dumps(forward_sample(model, json.load(sys.stdin))))


if __name__ == "__main__":
    main(*sys.argv[1:])
