"""Exported folders: complete, checked, and never half written."""

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import typer
import yaml
from safetensors.torch import load_file, save_file
from tiny_export import TOKENS, accept_changes, edit_json, tiny_tokenizer
from transformers import AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

import modeling_egmla
from modeling_egmla import (
    EGMLAForCausalLM,
    EGMLAForSequenceClassification,
    EGMLAForTokenClassification,
    EGMLAModel,
    files,
)
from modeling_egmla.conversion.export import export, export_model
from modeling_egmla.conversion.verify import (
    VerificationError,
    check_code,
    check_privacy,
    check_special_ids,
    read_manifest,
    verify,
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory, make_model):
    """A folder in several shards, whose name needs quoting everywhere."""
    folder = tmp_path_factory.mktemp("export") / "tiny-1.0 model"
    return export_model(make_model(), folder, tiny_tokenizer(), max_shard_size="20KB", license="apache-2.0")


@pytest.fixture
def folder(exported, tmp_path):
    """A copy to spoil."""
    return Path(shutil.copytree(exported, tmp_path / "copy"))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_folder_is_complete(exported):
    """Weights in shards, config with every Auto class, all code, tokenizer, generation config, card and manifest."""
    names = {path.name for path in exported.iterdir()}
    package = Path(modeling_egmla.__file__).parent
    code = {"configuration_egmla.py", "cache_egmla.py", "modeling_egmla.py"}
    others = {"README.md", "config.json", "generation_config.json", "manifest.json", "tokenizer.json"}
    assert code | others | {"tokenizer_config.json", "chat_template.jinja", "model.safetensors.index.json"} <= names
    assert all((exported / name).read_bytes() == (package / name).read_bytes() for name in code)
    assert not any(path.is_dir() for path in exported.iterdir())
    assert len({path.stat().st_mode for path in exported.iterdir()}) == 1
    assert len(list(exported.glob("model-*.safetensors"))) > 2
    auto_map = json.loads((exported / "config.json").read_text())["auto_map"]
    heads = ("", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification")
    assert set(auto_map) == {"AutoConfig", *(f"AutoModel{head}" for head in heads)}
    assert read_manifest(exported)["files"].keys() == names - {"manifest.json"}


def test_ids_without_token_are_not_generated(exported):
    """A padded vocabulary has rows that no token stands for; generation never picks one."""
    generation = GenerationConfig.from_pretrained(exported)
    assert generation.suppress_tokens == list(range(TOKENS, 97))
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 1, 0)
    model = EGMLAForCausalLM.from_pretrained(exported)
    prompt = torch.arange(2, 10).view(1, -1)
    assert (model.generate(prompt, max_new_tokens=40, do_sample=True, temperature=5.0) < TOKENS).all()
    plain = model.generate(prompt, max_new_tokens=40, do_sample=True, temperature=5.0, suppress_tokens=None)
    assert (plain >= TOKENS).any()


@pytest.mark.parametrize("kind", ["bfloat16", "add", "no gate", "groups", "AutoModel", "sequences", "tokens"])
def test_every_kind_of_model_is_verified(tmp_path, make_model, kind):
    """Export and verification hold for every head, gate and dtype."""
    classes = {
        "AutoModel": EGMLAModel,
        "sequences": EGMLAForSequenceClassification,
        "tokens": EGMLAForTokenClassification,
    }
    changes = {"add": {"kv_gate": "add"}, "no gate": {"kv_gate": "none"}, "groups": {"layer_group_size": 2}}
    model = make_model(classes.get(kind, EGMLAForCausalLM), **changes.get(kind, {})).train()
    if kind == "bfloat16":
        model.to(torch.bfloat16)
    tokenizer = tiny_tokenizer()
    folder = export_model(model, tmp_path / "model", tokenizer)
    assert model.training
    assert verify(folder).files == len(list(folder.iterdir())) - 1
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == tokenizer.get_vocab()


@pytest.mark.slow  # imports torch and transformers in a second process
def test_loads_where_the_package_is_absent(exported, tmp_path):
    """Offline, with an empty module cache and our package blocked, the folder loads and generates; saved again, its
    files and auto_map are all there, and it loads again."""
    script = """
        import json, pathlib, sys
        sys.modules["modeling_egmla"] = None
        import torch
        from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
        source, again = map(pathlib.Path, sys.argv[1:])
        model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=True)
        model.save_pretrained(again)
        tokenizer.save_pretrained(again)
        for name in ("configuration_egmla.py", "cache_egmla.py", "modeling_egmla.py"):
            assert (again / name).read_bytes() == (source / name).read_bytes(), name
        assert all(json.loads((again / file).read_text()) == json.loads((source / file).read_text())
                   for file in ("config.json", "generation_config.json", "tokenizer.json"))
        AutoModel.from_pretrained(source, trust_remote_code=True)
        AutoModelForSequenceClassification.from_pretrained(source, trust_remote_code=True)
        reloaded = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True)
        ids = torch.arange(2, 12).view(1, -1)
        assert torch.equal(model(ids).logits, reloaded(ids).logits)
        print(json.dumps([model(ids).logits[0, -1].tolist(), model.generate(ids, max_new_tokens=8).tolist()]))
    """
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": ""}
    command = [sys.executable, "-P", "-c", textwrap.dedent(script), str(exported), str(tmp_path / "saved-again.v2")]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    logits, generated = json.loads(result.stdout.splitlines()[-1])
    model = EGMLAForCausalLM.from_pretrained(exported)
    ids = torch.arange(2, 12).view(1, -1)
    torch.testing.assert_close(torch.tensor(logits), model(ids).logits[0, -1].detach(), atol=1e-5, rtol=0)
    assert generated == model.generate(ids, max_new_tokens=8).tolist()


def test_nothing_private_is_inside(tmp_path, make_model):
    """No folder, user or machine name gets out, whatever the source's files say; `_name_or_path` is not there."""
    source = tmp_path / "home" / "jane" / "run"
    model = make_model()
    model.config._name_or_path = str(source)
    model.save_pretrained(source)
    tiny_tokenizer().save_pretrained(source)
    edit_json(source / "tokenizer_config.json", name_or_path=str(source), is_local=True, local_files_only=True)
    (source / "training.json").write_text(
        json.dumps({"steps": 10, "command": f"egmla train {source}/recipe.yaml '{source}/my runs/b.yaml'"})
    )
    (source / "recipe.yaml").write_text(f"data:\n  files: [{source}/texts/*.txt]\n  length: 3\n")
    folder = export(source, tmp_path / "out")
    for path in folder.iterdir():
        assert b"jane" not in path.read_bytes(), path.name
        assert b"name_or_path" not in path.read_bytes() or path.suffix == ".py", path.name
    assert json.loads((folder / "training.json").read_text())["command"] == "egmla train recipe.yaml 'b.yaml'"
    assert yaml.safe_load((folder / "recipe.yaml").read_text()) == {"data": {"files": ["*.txt"], "length": 3}}
    assert (
        json.loads((folder / "tokenizer_config.json").read_text())
        .keys()
        .isdisjoint({"is_local", "local_files_only", "name_or_path"})
    )


def test_private_paths_are_found(folder):
    edit_json(
        folder / "generation_config.json",
        cache="/scratch/jane/cache",
        url="https://host/a/b",
        ratio="1/2/3",
        token="//",
        command="egmla train '/home/jane doe/recipe.yaml'",
    )
    for name in ("about.yaml", "chat_template.jinja", "code.py"):
        (folder / name).write_text(f"summary: {'hf_' + 34 * 'a'}")
    (folder / "README.md").write_text(f"---\n---\nMade in {Path.cwd()}/out")
    assert [problem.split(":")[0] for problem in check_privacy(folder)] == [
        f"README.md mentions {Path.cwd()}, a path of this machine",
        "about.yaml holds a token of the Hub",
        "chat_template.jinja holds a token of the Hub",
        "code.py holds a token of the Hub",
        "`cache` in generation_config.json is the path '/scratch/jane/cache'",
        """`command` in generation_config.json is the path "egmla train '/home/jane doe/recipe.yaml'\"""",
    ]


def flip_byte(path: Path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def set_weight(folder: Path, value: float):
    path = next(path for path in folder.glob("*.safetensors") if "model.norm.weight" in load_file(path))
    tensors = load_file(path)
    tensors["model.norm.weight"][0] = value
    save_file(tensors, path, metadata={"format": "pt"})
    accept_changes(folder)


def drop_weight(folder: Path):
    path = next(path for path in folder.glob("*.safetensors") if "model.norm.weight" in load_file(path))
    save_file({k: v for k, v in load_file(path).items() if k != "model.norm.weight"}, path, metadata={"format": "pt"})
    accept_changes(folder)


def edit_config(folder: Path, **changes):
    edit_json(folder / "config.json", **changes)
    accept_changes(folder)


SPOILED = {
    "one bit of the weights": (lambda f: flip_byte(next(f.glob("*.safetensors"))), "has changed"),
    "shortened": (lambda f: (f / "tokenizer.json").write_text("{}"), "bytes instead of"),
    "missing": (lambda f: (f / "generation_config.json").unlink(), "generation_config.json is missing"),
    "added": (lambda f: (f / "model.safetensors").write_bytes(b"x"), "model.safetensors is not in manifest.json"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "egmla export"),
    "no folder": (shutil.rmtree, "no such folder"),
    "manifest is a list": (lambda f: (f / "manifest.json").write_text("[]"), "does not hold a JSON object"),
    "manifest is empty": (lambda f: (f / "manifest.json").write_text("{}"), "not one that this version"),
    "manifest is not JSON": (lambda f: (f / "manifest.json").write_text("{"), "is not JSON"),
    "not a number": (lambda f: set_weight(f, float("nan")), "not finite"),
    "another number": (lambda f: set_weight(f, 50.0), "is not the one of the export"),
    "a tensor less": (drop_weight, "which is missing"),
    "another model": (lambda f: edit_config(f, model_type="llama"), "not an EG-MLA"),
    "attention from the Hub": (lambda f: edit_config(f, attn_implementation="evil/kernel"), "run it unasked"),
    "a config that cannot work": (lambda f: edit_config(f, eos_token_id=97), "`eos_token_id` is 97"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_spoiled_folder_is_refused(folder, how):
    """Whatever is wrong with a folder, verification says so, also where the manifest was changed along."""
    spoil, message = SPOILED[how]
    spoil(folder)
    with pytest.raises(VerificationError, match=message):
        verify(folder)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b", "*.py", "C:\\x"])
def test_manifest_lists_plain_names_only(folder, name):
    edit_json(folder / "manifest.json", files={name: {"sha256": "0", "bytes": 0}})
    with pytest.raises(VerificationError, match="not a plain file name"):
        verify(folder)


CODE = {
    "missing module": ("cache_egmla.py", None, "cache_egmla.py is missing"),
    "package": ("cache_egmla.py", "import modeling_egmla.plan", "imports modeling_egmla"),
    "package in a function": ("cache_egmla.py", "def f():\n    from configuration import x", "imports configuration"),
    "from dot": ("cache_egmla.py", "from . import x", "only `from .module import name`"),
    "two levels": ("cache_egmla.py", "from .a.b import x", "only `from .module import name`"),
    "other module": ("cache_egmla.py", "from .gate import x", "gate.py is missing"),
    "optional package": ("cache_egmla.py", "import triton", "imports triton unguarded"),
    "not Python": ("cache_egmla.py", "def", "is not Python"),
    "unused": ("extra.py", "", "extra.py is code that nothing here uses"),
}


@pytest.mark.parametrize("how", CODE)
def test_incomplete_code_is_found(folder, how):
    """The library copies and loads such code without complaint, or refuses only on another machine."""
    name, text, message = CODE[how]
    (folder / name).unlink() if text is None else (folder / name).write_text(text)
    assert any(message in problem for problem in check_code(folder))


def test_guarded_imports_are_fine(folder):
    code = "try:\n    import triton\nexcept ImportError:\n    triton = None\nimport torch, json\n"
    (folder / "cache_egmla.py").write_text(code)
    assert check_code(folder) == []


@pytest.mark.parametrize("reference", ["someone/else--modeling_egmla.EGMLAForCausalLM", "../x.Y", None])
def test_auto_map_names_code_in_the_folder(folder, reference):
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    edit_json(folder / "config.json", auto_map=auto_map | {"AutoModelForCausalLM": reference})
    assert "does not name code in this folder" in check_code(folder)[0]
    edit_json(folder / "config.json", auto_map={})
    assert "lacks AutoConfig, AutoModelForCausalLM" in check_code(folder)[0]


IDS = {
    "outside": ("config.json", {"eos_token_id": 97}, "eos_token_id"),
    "outside, generation": ("generation_config.json", {"pad_token_id": 97}, "outside the vocabulary of 97"),
    "tokenizer differs": ("config.json", {"eos_token_id": 5}, "the tokenizer's is 1"),
    "never stops": ("generation_config.json", {"eos_token_id": None}, "never stop"),
    "suppressed end": ("generation_config.json", {"suppress_tokens": [1, *range(60, 97)]}, "no text would end"),
    "not suppressed": ("generation_config.json", {"suppress_tokens": None}, "37 ids without a token"),
    "vocabulary too small": ("config.json", {"vocab_size": 50}, "The tokenizer has id 59"),
}


@pytest.mark.parametrize("how", IDS)
def test_special_ids_agree(folder, how):
    file, changes, message = IDS[how]
    assert check_special_ids(folder) == []
    edit_json(folder / file, **changes)
    assert any(message in problem for problem in check_special_ids(folder))


def test_tokenizer_code_is_not_run(folder, tmp_path):
    """A tokenizer that is code in the folder is refused, and its code not run."""
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\nclass Tokenizer: pass\n")
    auto_map = {"AutoTokenizer": ["evil.Tokenizer", None]}
    edit_json(folder / "tokenizer_config.json", tokenizer_class="Tokenizer", auto_map=auto_map)
    assert check_special_ids(folder) != [] and check_code(folder) != []
    assert not (tmp_path / "canary").exists()


def test_model_without_tokenizer(tmp_path, make_model):
    folder = export_model(make_model(), tmp_path / "model")
    assert verify(folder) and check_special_ids(folder) == []
    assert "AutoTokenizer" not in (folder / "README.md").read_text()


def test_existing_folders_are_not_lost(folder, tmp_path, make_model):
    """A folder is replaced only when asked, only if egmla wrote it, and only if nothing else lies in it."""
    with pytest.raises(FileExistsError, match="--overwrite"):
        export_model(make_model(), folder)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="not a folder that egmla wrote"):
        export_model(make_model(), other, overwrite=True)
    (folder / "notes.txt").touch()
    with pytest.raises(FileExistsError, match=r"notes\.txt, which would be lost"):
        export_model(make_model(), folder, overwrite=True)
    (folder / "notes.txt").unlink()
    export_model(make_model(seed=1), folder, overwrite=True)
    assert verify(folder) and not (folder / "tokenizer.json").exists()


@pytest.mark.parametrize(
    "step", ["conversion.export._write_model", "conversion.export.write_manifest", "files.publish"]
)
@pytest.mark.parametrize("exists", [False, True])
def test_crash_leaves_old_or_nothing(folder, tmp_path, make_model, monkeypatch, step, exists):
    """At whatever step an export breaks off, the name has the old folder or none, and nothing else is left over."""

    def crash(*args):
        raise KeyboardInterrupt

    target = folder if exists else tmp_path / "new"
    before = content(folder)
    monkeypatch.setattr(f"modeling_egmla.{step}", crash)
    with pytest.raises(KeyboardInterrupt):
        export_model(make_model(seed=1), target, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
    assert content(folder) == before


@pytest.mark.parametrize("exchange", [True, False])
def test_replacing_a_folder(tmp_path, monkeypatch, exchange):
    """Also where the system cannot exchange two names at once."""
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    files.publish(tmp_path / "new", tmp_path / "old")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old" / "file").read_text() == "new"


def test_export_again_keeps_all(folder, tmp_path):
    """From an exported folder comes the same folder, and onto itself with an edited card the edit stays."""
    again = export(folder, tmp_path / "again", max_shard_size="20KB")
    assert content(again).keys() >= {name for name in content(folder) if not name.startswith("model-")}
    assert content(export(again, tmp_path / "thrice", max_shard_size="20KB")) == content(again)
    (folder / "README.md").write_text((folder / "README.md").read_text() + "\nEdited.\n")
    export(folder, folder, overwrite=True)
    assert verify(folder) and (folder / "README.md").read_text().endswith("Edited.\n")
    with pytest.raises(ValueError, match="--new-card"):
        export(folder, tmp_path / "third", license="mit")
    with pytest.raises(
        ValueError, match="tells of float32, but the weights, which were stored in float32, would be in bf"
    ):
        export(folder, tmp_path / "third", dtype="bfloat16")
    third = export(folder, tmp_path / "third", license="mit", new_card=True, dtype="bfloat16")
    assert "license: mit" in (third / "README.md").read_text()
    assert json.loads((third / "config.json").read_text())["dtype"] == "bfloat16"


def test_weights_are_stored_as_they_were(tmp_path):
    """The embedded model, stored in bfloat16 and computed with in float32, is exported as just that, card and all."""
    again = export("egmla-sotu", tmp_path / "again")
    source = Path(modeling_egmla.preset_path())
    assert json.loads((again / "config.json").read_text())["dtype"] == "float32"
    for name, weight in load_file(source / "model.safetensors").items():
        exported = load_file(again / "model.safetensors")[name]
        assert exported.dtype == torch.bfloat16 and torch.equal(exported, weight)
    assert (again / "README.md").read_text() == (source / "README.md").read_text()
    with pytest.raises(ValueError, match=r"tells of bfloat16, .* would be in float32"):
        export("egmla-sotu", tmp_path / "wide", dtype="float32")


def test_places_that_cannot_be_replaced(folder, tmp_path, monkeypatch):
    """The folder that a user stands in, one above it, or a mount point is refused before any work."""
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(FileExistsError, match="folder you stand in"):
        export(folder, ".")
    monkeypatch.chdir("below")
    with pytest.raises(FileExistsError, match="folder you stand in"):
        export(folder, tmp_path / "here", overwrite=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files.os.path, "ismount", lambda path: Path(path).name == "here")
    with pytest.raises(FileExistsError, match="mount point"):
        export(folder, "here")
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["below"]


def test_incomplete_sources_are_refused(folder, tmp_path):
    """Weights that do not fit are never filled up with random ones, and other models are not exported."""
    drop_weight(folder)
    with pytest.raises(VerificationError, match=r"model\.norm\.weight, which is missing"):
        export(folder, tmp_path / "out")
    with pytest.raises(VerificationError, match="no such folder"):
        export(tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(VerificationError, match="no weights"):
        export("egmla-base-kv64-emb256", tmp_path / "out")
    with pytest.raises(TypeError, match="Linear"):
        export_model(torch.nn.Linear(1, 1), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_commands(folder, tmp_path):
    """`egmla export` and `egmla verify` say what they did, and fail with a message and exit code 1."""
    from modeling_egmla.commands.common import Commands
    from modeling_egmla.commands.export import export as export_command
    from modeling_egmla.commands.verify import verify as verify_command

    app = typer.Typer(cls=Commands)
    app.command()(export_command)
    app.command()(verify_command)
    run = CliRunner().invoke
    result = run(app, ["export", str(folder), str(tmp_path / "out"), "--max-shard-size", "20000"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    assert f"{len(read_manifest(tmp_path / 'out')['files'])} files" in result.output
    result = run(app, ["verify", str(tmp_path / "out")])
    assert result.exit_code == 0 and "all as exported" in result.output
    flip_byte(tmp_path / "out" / "config.json")
    result = run(app, ["verify", str(tmp_path / "out")])
    assert result.exit_code == 1 and "config.json has changed" in result.output
    result = run(app, ["export", str(folder), str(tmp_path / "out")])
    assert result.exit_code == 1 and "--overwrite" in result.output
