"""Training on several processes gives the weights of one, whatever engine carries it and however tables are cut."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig, get_peft_model
from test_training import die_while_saving, recipe, text_folder, write_recipe  # noqa: F401
from torch import distributed as dist
from torch import multiprocessing
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from modeling_egmla import training
from modeling_egmla.training import RecipeError, parallel


# Batches of each step and process, [sequences, tokens]; the last ones are uneven, down to a single short sequence.
SHAPES = [[(2, 9)] * 4] * 3 + [[(3, 9), (1, 5), (2, 4), (2, 7)], [(2, 6), (1, 3), (1, 8), (1, 2)]]


def run_on(processes, function, *args):
    """Runs `function(*args)` on so many gloo processes; their errors are raised here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["modeling_egmla.training", "conftest"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.start_processes(
        work, (processes, port, function, args), nprocs=processes, start_method="forkserver"
    )


def work(rank, processes, port, function, args):
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ.update({key: str(value) for key, value in environment.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        function(*args)
    finally:
        dist.destroy_process_group()


def batches(processes):
    """For each step the ids of every process, each [sequences, tokens]."""
    generator = torch.Generator().manual_seed(1)
    return [[torch.randint(2, 97, shape, generator=generator) for shape in step[:processes]] for step in SHAPES]


def make_optimizer(model):
    """AdamW with gate tables in a group of their own, and a learning rate that warms up."""
    tables = [p for name, p in model.named_parameters() if "kv_gate_embed" in name]
    rest = [p for name, p in model.named_parameters() if "kv_gate_embed" not in name]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": tables, "lr": 2e-3}], lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


def train(model, optimizer, scheduler, steps, rank=None):
    """
    Token-weighted AdamW steps with clipping, of one process of several or of one on everybody's batches, from buffers
    that are filled again. Returns the norms of the gradients.
    """
    buffers, norms = {}, []
    for step in steps:
        mine = step if rank is None else [step[rank]]
        tokens = sum((ids.shape[1] - 1) * ids.shape[0] for ids in step)
        for ids in mine:
            ids = buffers.setdefault(ids.shape, torch.empty_like(ids)).copy_(ids)
            loss = model(input_ids=ids, labels=ids, num_items_in_batch=tokens, use_cache=False).loss
            (loss if rank is None else loss * len(step)).backward()
        norms.append(parallel.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert min(norms) > 0.5, "nothing was clipped"
    return torch.stack(norms)


def assert_same_weights(actual, expected, atol, head=(3, 8)):
    """
    The same state dicts, apart from the key half of the gate norm's bias, whose gradient is rounding noise.

    Args:
        head: number of heads, and key channels of each.
    """
    assert actual.keys() == expected.keys()
    for name in expected:
        a, e = actual[name], expected[name]
        if name.endswith("kv_gate_norm.bias"):
            a, e = (t.view(head[0], -1)[:, head[1] :] for t in (a, e))
        torch.testing.assert_close(a, e, atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def check_own_loop(engine, dtype, atol, changes):
    rank, processes = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (processes,))
    steps = batches(processes)
    single = tiny_model(**changes).to(dtype).train()
    norms = train(single, *make_optimizer(single), steps)

    model = tiny_model(**changes, seed=rank).to(dtype).train()  # the first process's weights count
    if "columns" in engine:
        parallel.shard_gate_tables(model, mesh)
        for name, parameter in model.named_parameters():
            if "kv_gate_embed" in name:
                assert parameter.to_local().shape == (97, 12 // processes)
    if "checkpointing" in engine:
        model.gradient_checkpointing_enable()
    wrapped = DistributedDataParallel(model) if "ddp" in engine else parallel.shard_model(model, mesh)
    if engine == "fsdp":
        assert all(isinstance(layer.self_attn.kv_gate_embed, FSDPModule) for layer in model.model.layers)
    torch.testing.assert_close(train(wrapped, *make_optimizer(model), steps, rank), norms, atol=atol, rtol=atol)
    weights = parallel.full_state_dict(model)
    if rank == 0:
        assert_same_weights(weights, single.state_dict(), atol)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("engine", ["ddp", "ddp columns", "fsdp", "fsdp columns"])
def test_weights_of_one_process(engine, processes):
    """Five AdamW steps in float64, with uneven batches and clipping, end at one process's weights."""
    run_on(processes, check_own_loop, engine, torch.float64, 1e-10, {})


@pytest.mark.parametrize("processes", [2, 4])
def test_weights_of_one_process_in_float32(processes):
    """In float32, cut tables end within 1e-6 of one process."""
    run_on(processes, check_own_loop, "ddp columns", torch.float32, 1e-6, {})


@pytest.mark.parametrize(
    ("engine", "changes"),
    [
        ("ddp columns", {"kv_gate": "add"}),
        ("ddp columns", {"kv_gate_norm": "none"}),
        ("ddp columns checkpointing", {"layer_group_size": 2}),
    ],
    ids=str,
)
def test_other_models(engine, changes):
    """Cut tables serve every kind of gate, and layers that are run again in the backward pass."""
    run_on(2, check_own_loop, engine, torch.float64, 1e-10, changes)


def check_continues(engine, folder):
    rank, processes = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (processes,))
    steps = batches(processes)

    def build(seed):
        model = tiny_model(seed=seed).double().train()
        parallel.shard_gate_tables(model, mesh)
        wrapped = DistributedDataParallel(model) if engine == "ddp" else parallel.shard_model(model, mesh)
        return model, wrapped, *make_optimizer(model)

    model, wrapped, optimizer, scheduler = build(0)
    train(wrapped, optimizer, scheduler, steps[:3], rank)
    weights, state = parallel.full_state_dict(model), parallel.full_optimizer_state_dict(optimizer)
    if rank == 0:
        model.save_pretrained(folder, state_dict=weights)
        torch.save(state, folder / "optimizer.pt")
    else:
        assert weights == state == {}
    dist.barrier()
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict()
    state = torch.load(folder / "optimizer.pt")

    fresh, fresh_wrapped, fresh_optimizer, fresh_scheduler = build(1)
    if engine == "ddp":
        fresh.load_state_dict(saved)
    else:
        set_model_state_dict(fresh, saved, options=StateDictOptions(full_state_dict=True))
    parallel.load_optimizer_state_dict(fresh_optimizer, state)
    fresh_scheduler.load_state_dict(scheduler.state_dict())
    train(wrapped, optimizer, scheduler, steps[3:], rank)
    train(fresh_wrapped, fresh_optimizer, fresh_scheduler, steps[3:], rank)
    expected, actual = parallel.full_state_dict(model), parallel.full_state_dict(fresh)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_own_loop_saves_and_continues(engine, tmp_path):
    """What an own loop saves loads on one process, and takes it up again to exactly the same weights."""
    run_on(2, check_continues, engine, tmp_path)


def check_loaded(folder, how):
    """Trains a model that the library itself distributed when it loaded it."""
    rank, processes = dist.get_rank(), dist.get_world_size()
    steps = batches(processes)
    single = AutoModelForCausalLM.from_pretrained(folder).double().train()
    train(single, *make_optimizer(single), steps)

    config = DistributedConfig(fsdp_size=processes) if how == "fsdp" else DistributedConfig(tp_size=processes)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float64).train()
    if how == "fsdp":
        tables = [m for name, m in model.named_modules() if name.endswith("kv_gate_embed")]
        assert tables and all(isinstance(table, FSDPModule) for table in tables)
        train(model, *make_optimizer(model), steps, rank)
    else:
        assert model.model.layers[0].mlp.up_proj.weight.to_local().shape[0] == 40 // processes
        train(model, *make_optimizer(model), steps)  # all processes see every batch
    weights = parallel.full_state_dict(model)
    if rank == 0:
        assert_same_weights(weights, single.state_dict(), 1e-10)


@pytest.mark.slow  # starts two processes
@pytest.mark.parametrize("how", ["fsdp", "tp"])
def test_plans_of_the_model_train(tmp_path, how):
    """`DistributedConfig` shards by the model's plans, tables as units, and trains to the same weights."""
    tiny_model(vocab_size=98).save_pretrained(tmp_path)
    run_on(2, check_loaded, tmp_path, how)


def check_groups_decode(folder):
    """Every way to decode reads the up-projection that a layer group shares, though the layer with it is sharded."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ids = torch.arange(24).view(1, 24) % 7
    expected = tiny_model(layer_group_size=2)(ids).logits
    config = DistributedConfig(fsdp_size=dist.get_world_size())
    models = [
        parallel.shard_model(tiny_model(layer_group_size=2), mesh),
        AutoModelForCausalLM.from_pretrained(folder, distributed_config=config),
    ]
    for model in models:
        for way in ("expanded", "tiles", "grouped"):
            model.set_kv_decoding(way)
            with torch.no_grad():
                cache = model(ids[:, :-2], use_cache=True).cache
                logits = model(ids[:, -2:], cache=cache).logits
            torch.testing.assert_close(logits, expected[:, -2:], atol=1e-5, rtol=1e-5)


@pytest.mark.slow  # starts two processes
def test_sharded_layer_groups_decode(tmp_path):
    tiny_model(layer_group_size=2).save_pretrained(tmp_path)
    run_on(2, check_groups_decode, tmp_path)


def test_pipelines_are_refused(tmp_path):
    """Later stages would have no token ids: an error before anything is loaded or any process waits for another."""
    tiny_model().save_pretrained(tmp_path)
    for config in (DistributedConfig(pp_size=2), {"pp_size": 2}):
        with pytest.raises(ValueError, match="`pp_size` must be 1"):
            AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config=config)


def check_errors():
    def cut(model, message):
        with pytest.raises(ValueError, match=message):
            parallel.shard_gate_tables(model)

    cut(tiny_model(kv_gate_dim=13), "`kv_gate_dim` is 13, which 2 processes")
    cut(tiny_model(kv_gate="none"), '`kv_gate` is "none"')
    model = tiny_model()
    parallel.shard_gate_tables(model)
    cut(model, "`kv_gate_embed` is a .*ShardedEmbedding")
    lora = LoraConfig(target_modules=["kv_gate_embed"])
    cut(get_peft_model(tiny_model(), lora), "`kv_gate_embed` is a .*peft")


def test_tables_that_cannot_be_cut():
    """A width that the processes cannot share is refused with both numbers, and so is what is no plain table."""
    run_on(2, check_errors)


def test_fsdp_through_trainer_is_refused_on_a_cpu(recipe, tmp_path):  # noqa: F811
    """A recipe that asks for FSDP where Trainer would quietly train replicas is refused by the key's name."""
    recipe["training"]["arguments"].update(fsdp=True, use_cpu=True)
    with pytest.raises(RecipeError, match=r"training\.arguments\.fsdp"):
        training.train(write_recipe(recipe, tmp_path))


def run_recipe(recipe, folder, name, processes, gate_tables, launch=run_on, **changes):  # noqa: F811
    """Trains a recipe in `folder / name` on so many processes and returns the weights that it saved."""
    recipe = {**recipe, "gate_tables": gate_tables}
    recipe["training"] = {**recipe["training"], "output_dir": str(folder / name), **changes}
    path = write_recipe(recipe, folder)
    if processes == 1:
        training.train(path)
    else:
        launch(processes, training.train, path)
    return AutoModelForCausalLM.from_pretrained(folder / name).state_dict()


def torchrun(processes, _, recipe_path):
    """Runs `egmla train` as the documents say it."""
    script = Path(sys.executable).with_name("egmla")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run([*command, "--no-python", script, "train", recipe_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def global_recipe(recipe):  # noqa: F811
    """The tiny recipe with a batch of 8 sequences, which one, two and four processes can share."""
    recipe["training"].update(batch_tokens=256, schedule="constant_with_warmup", warmup_steps=2, eval_steps=8)
    return recipe


@pytest.mark.slow  # starts up to four processes
@pytest.mark.parametrize(
    ("processes", "cut", "launch"), [(2, False, run_on), (4, False, run_on), (2, True, torchrun), (4, True, run_on)]
)
def test_recipe_on_several_processes(global_recipe, tmp_path, processes, cut, launch):
    """A recipe on several processes, its batch shared by them, saves the weights of one and reports the same loss."""
    gate_tables = {"parallel": cut}
    single = run_recipe(global_recipe, tmp_path, "single", 1, gate_tables, steps=5)
    several = run_recipe(global_recipe, tmp_path, "several", processes, gate_tables, launch, steps=5)
    assert_same_weights(several, single, 1e-6, head=(2, 8))
    losses = [
        json.loads((tmp_path / n / "training.json").read_text())["validation_loss"] for n in ("single", "several")
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


@pytest.mark.slow  # starts up to four processes, three times
def test_resume_on_another_number_of_processes(global_recipe, tmp_path):
    """A run on one process continues on two, then four, then one, tables cut or whole, and ends where one would."""
    single = run_recipe(global_recipe, tmp_path, "single", 1, {"parallel": True}, steps=8)
    for steps, processes in ((2, 1), (4, 2), (6, 4), (8, 1)):
        moved = run_recipe(global_recipe, tmp_path, "moved", processes, {"parallel": True}, steps=steps, save_steps=2)
    assert_same_weights(moved, single, 2e-6, head=(2, 8))


def check_dies_while_saving(path, step):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InterruptedError):
        die_while_saving(patch, step)
        training.train(path)


@pytest.mark.slow  # starts two processes, twice
def test_processes_that_die_while_saving_continue(global_recipe, tmp_path):
    """Several processes that die with half a checkpoint continue from the whole one before it, with cut tables too."""
    single = run_recipe(global_recipe, tmp_path, "single", 1, {"parallel": True}, steps=6, save_steps=2)

    def die_at_four(processes, function, path):
        run_on(processes, check_dies_while_saving, path, 4)
        assert [folder.name for folder in (tmp_path / "died").glob("checkpoint-*")] == ["checkpoint-2"]
        run_on(processes, function, path)

    died = run_recipe(
        global_recipe, tmp_path, "died", 2, {"parallel": True}, launch=die_at_four, steps=6, save_steps=2
    )
    assert_same_weights(died, single, 2e-6, head=(2, 8))
