"""Publishing and fetching, against a server on loopback that answers as the Hub does, and breaks as it may."""

import hashlib
import json
import logging
import shutil
import time
from pathlib import Path

import minihub
import pytest
import torch
import typer
from huggingface_hub import HfApi, ModelCard, constants
from minihub import TOKEN, File, MiniHub
from safetensors.torch import load_file
from tiny_export import accept_changes, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from typer.testing import CliRunner

from modeling_egmla import EGMLAForCausalLM
from modeling_egmla.commands.common import Commands
from modeling_egmla.commands.pull import pull as pull_command
from modeling_egmla.commands.push import push as push_command
from modeling_egmla.conversion import fresh_load
from modeling_egmla.conversion import hub as hub_module
from modeling_egmla.conversion.converter import convert
from modeling_egmla.conversion.export import export_model
from modeling_egmla.conversion.hub import ATTEMPTS, HubError, pull, push, validate
from modeling_egmla.conversion.verify import VerificationError, check_fresh_process, read_manifest


REPO = "tester/tiny"


@pytest.fixture(scope="module")
def exported(tmp_path_factory, make_model):
    folder = tmp_path_factory.mktemp("export") / "tiny"
    return export_model(make_model(), folder, tiny_tokenizer(), max_shard_size="20KB", license="apache-2.0")


@pytest.fixture
def folder(exported, tmp_path):
    """A copy to spoil."""
    return Path(shutil.copytree(exported, tmp_path / "copy"))


@pytest.fixture
def waits(monkeypatch):
    """Waiting takes no time here, and is written down."""
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


@pytest.fixture
def unchecked(monkeypatch):
    """Folders are pushed as they are: the checks take their time, and have tests of their own."""
    monkeypatch.setattr(hub_module, "validate", lambda folder, trust_remote_code: hub_module.files_to_push(folder))


@pytest.fixture
def hub(tmp_path, monkeypatch, waits):
    """A server that large files go to over LFS."""
    with MiniHub(tmp_path / "server") as server:
        minihub.use_hub(monkeypatch, server, tmp_path / "cache")
        yield server


@pytest.fixture
def published(hub, exported):
    hub.publish(REPO, exported)
    return hub


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def first_shard(hub: MiniHub) -> tuple[str, str]:
    """Name and hash of a weights file."""
    files = hub.repos[REPO].files
    name = min(name for name in files if name.endswith(".safetensors"))
    return name, files[name].sha256


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name not in ("server", "cache", "copy")]


@pytest.mark.parametrize("xet", [False, True])
def test_there_and_back(tmp_path, monkeypatch, exported, unchecked, xet):
    """What is pulled is what was pushed, byte for byte, over LFS and over xet; a new repository is private."""
    with MiniHub(tmp_path / "server", xet=xet) as server:
        minihub.use_hub(monkeypatch, server, tmp_path / "cache")
        pushed = push(exported, "tiny", branch="dev", tag="v1")
        assert (pushed.repo_id, pushed.private, pushed.changed) == (REPO, True, True)
        repo = server.repos[REPO]
        assert repo.refs["refs/tags/v1"] == repo.refs["refs/heads/dev"] == pushed.commit
        assert len(repo.commits) == 2 and repo.files.keys() == {".gitattributes"}
        commit, verified = pull(REPO, tmp_path / "got", revision="v1")
        assert commit == pushed.commit and verified.code == "the installed code"
        assert content(tmp_path / "got") == content(exported)
        assert not push(exported, REPO, branch="dev").changed
        assert len(repo.commits) == 2
        uploads = server.paths("PUT", "/_lfs/")
        assert bool(uploads) != xet and bool(server.paths("GET", "xet-read-token")) == xet
    assert leftovers(tmp_path) == ["got"]


def test_dry_run_sends_nothing(hub, exported, monkeypatch):
    """It lists every file with its size, and no request is made."""
    monkeypatch.setattr(hub_module, "check_fresh_process", lambda folder, manifest: [])
    app = typer.Typer(cls=Commands)
    app.command("push")(push_command)
    app.command("pull")(pull_command)
    result = CliRunner().invoke(app, ["push", str(exported), REPO, "--dry-run"])
    assert result.exit_code == 0, result.output
    assert all(path.name in result.output for path in exported.iterdir())
    assert f"{len(list(exported.iterdir()))} files for tester/tiny; nothing was sent" in result.output
    assert hub.requests == []


def spoil_code(folder: Path):
    with (folder / "modeling_egmla.py").open("a") as file:
        file.write("\nopen('/proc/self/environ').read()\n")


UNFIT = {
    "weights": (lambda f: next(f.glob("*.safetensors")).write_bytes(b""), "bytes instead of"),
    "card": (lambda f: (f / "README.md").write_text("no metadata"), "gives no `license`"),
    "special ids": (
        lambda f: (f / "generation_config.json").write_text('{"eos_token_id": 3}'),
        "the tokenizer's is 1",
    ),
    "private path": (lambda f: (f / "training.json").write_text('{"log": "/home/jane/log"}'), "/home/jane/log"),
    "code": (lambda f: (f / "cache_egmla.py").write_text("import modeling_egmla"), "imports modeling_egmla"),
    "strange code": (spoil_code, "is not the installed package's"),
}


@pytest.mark.parametrize("how", UNFIT)
def test_unfit_folders_are_not_sent(hub, folder, how):
    """Everything is checked before the first request."""
    spoil, message = UNFIT[how]
    spoil(folder)
    if how != "weights":
        accept_changes(folder)
    with pytest.raises(VerificationError, match=message):
        push(folder, REPO)
    assert hub.requests == []


@pytest.mark.slow  # imports torch and transformers in a second process
def test_validation_loads_in_a_fresh_process(exported):
    """Before a push the folder is loaded with its own code where the package is blocked."""
    assert sum(validate(exported).values()) == sum(path.stat().st_size for path in exported.iterdir())


def test_fresh_process_has_no_token(exported, tmp_path, monkeypatch):
    """Code of a folder cannot take the login along; what goes wrong there is said."""
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nsys.exit(f'{sys.argv[2]}, {[k for k in os.environ if \"TOKEN\" in k]}')")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setattr(fresh_load, "__file__", str(script))
    assert check_fresh_process(exported, read_manifest(exported)) == [
        "The folder does not load where the package is not installed: AutoModelForCausalLM, []"
    ]


def test_public_only_when_asked(hub, unchecked, exported):
    """An existing public repository is not written to without `--public`."""
    hub.create(REPO, private=False)
    with pytest.raises(HubError, match="is public"):
        push(exported, REPO)
    assert hub.repos[REPO].files.keys() == {".gitattributes"} and not hub.paths("PUT")
    assert not push(exported, REPO, public=True).private
    assert push(exported, "tester/other", public=True) and not hub.repos["tester/other"].private


def test_pull_request(published, unchecked, folder, make_model):
    """The repository stays as it is; the proposal holds the folder. It needs a repository, and cannot be tagged."""
    before = dict(published.repos[REPO].files)
    export_model(make_model(seed=1), folder, tiny_tokenizer(), overwrite=True, license="mit")
    pushed = push(folder, REPO, pull_request=True)
    assert pushed.url.endswith("/discussions/1") and pushed.commit == "refs/pr/1"
    assert published.repos[REPO].files == before
    proposed = published.repos[REPO].find("refs/pr/1").files
    assert proposed.keys() - {".gitattributes"} == {path.name for path in folder.iterdir()}
    assert not push(folder, REPO, branch="refs/pr/1").changed
    with pytest.raises(ValueError, match="--tag"):
        push(folder, REPO, pull_request=True, tag="v1")
    with pytest.raises(HubError, match="no tester/none"):
        push(folder, "tester/none", pull_request=True)


def test_leftovers_of_the_last_push_are_removed(published, unchecked, folder, make_model, tmp_path):
    """Old shards and code would be loaded with the new weights; what others put beside them stays."""
    repo = published.repos[REPO]
    others = {"figure.png": File.small(b"png"), "model.bin": File.small(b"old"), "demo/app.py": File.small(b"app")}
    repo.commit("refs/heads/main", {**repo.files, **others}, "by hand", repo.refs["refs/heads/main"])
    export_model(make_model(seed=1), folder, overwrite=True, license="mit")
    push(folder, REPO)
    assert repo.files.keys() == {path.name for path in folder.iterdir()} | {
        ".gitattributes",
        "figure.png",
        "demo/app.py",
    }
    pull(REPO, tmp_path / "got")
    assert content(tmp_path / "got") == content(folder)


def test_broken_upload_goes_on(hub, unchecked, exported, waits):
    """A connection that breaks in the middle of a file is taken up again, and nothing is there until all is."""
    hub.fail("PUT", "/_lfs/", cut=True, times=2)
    assert push(exported, REPO).changed
    shards = len(list(exported.glob("*.safetensors")))
    assert len(hub.paths("PUT")) == shards and len(hub.repos[REPO].commits) == 2


def test_push_resumes_in_a_later_call(hub, unchecked, exported, monkeypatch):
    """After giving up, the branch is as before; the next push sends only what is missing."""
    stuck = next(exported.glob("*.safetensors")).read_bytes()
    pattern = f"/_lfs/{hashlib.sha256(stuck).hexdigest()}"
    hub.fail("PUT", pattern, cut=True, times=1000)
    with pytest.raises(HubError, match="continues where it stopped"):
        push(exported, REPO)
    assert hub.repos[REPO].files.keys() == {".gitattributes"}
    before = len(hub.paths("PUT"))
    hub.faults.clear()
    push(exported, REPO)
    assert hub.paths("PUT")[before:] == [pattern]


def test_lost_answer_makes_one_commit(hub, unchecked, exported):
    """The commit was made but its answer lost: that is found out, and there is no second commit, no false alarm."""
    hub.fail("POST", "/commit/", lost=True)
    pushed = push(exported, REPO)
    assert [c.title for c in hub.repos[REPO].commits.values()] == ["initial commit", "Upload EG-MLA model"]
    assert pushed.commit == hub.repos[REPO].refs["refs/heads/main"] and pushed.changed


def test_pull_requests_are_not_repeated(published, unchecked, folder, make_model):
    """An answer that is lost is an error here: a second attempt could open a second request."""
    export_model(make_model(seed=1), folder, tiny_tokenizer(), overwrite=True, license="mit")
    published.fail("POST", "/commit/", lost=True)
    with pytest.raises(HubError, match="connection to the Hub broke"):
        push(folder, REPO, pull_request=True)
    assert [ref for ref in published.repos[REPO].refs if "pr" in ref] == ["refs/pr/1"]


def test_commit_of_another_in_between(hub, unchecked, exported):
    """A commit that somebody makes during the upload is neither overwritten nor mixed with ours."""
    hub.create(REPO, private=True)
    repo = hub.repos[REPO]

    def other_commit():
        repo.commit("refs/heads/main", {"note.txt": File.small(b"mine")}, "other", repo.refs["refs/heads/main"])

    hub.fail("POST", "/commit/", before=other_commit)
    with pytest.raises(HubError, match="Somebody else changed tester/tiny"):
        push(exported, REPO)
    assert repo.files.keys() == {"note.txt"}


STATUS = {
    401: "hf auth login",
    403: "may not write to",
    404: "There is no tester/tiny",
    409: "conflicts with what is there",
    412: "Somebody else changed",
    429: "wait 7 seconds",
    500: "has trouble",
}


REFUSED = [
    *((status, "/commit/") for status in STATUS),
    *((status, "/preupload/") for status in (401, 403, 404)),
    *((status, "/repos/create") for status in (404, 429, 500)),
]


@pytest.mark.parametrize(("status", "where"), REFUSED)
def test_push_refused(hub, unchecked, exported, waits, status, where):
    """Each refusal says what to do, wherever it comes; nothing is shown as done; what is temporary was retried."""
    hub.fail("POST", where, status=status, headers={"Retry-After": "7"} if status == 429 else {}, times=1000)
    with pytest.raises(HubError, match=STATUS[status]):
        push(exported, REPO, tag="v1")
    repo = hub.repos.get(REPO)
    assert repo is None or (repo.files.keys() == {".gitattributes"} and "refs/tags/v1" not in repo.refs)
    tries = [request for request in hub.requests if where in request.path]
    assert len(tries) == (ATTEMPTS if status in (429, 500) else 1)
    assert waits == ([7] * 4 if status == 429 else [1, 2, 4, 8] if status == 500 else [])


@pytest.mark.parametrize("status", [429, 500])
@pytest.mark.parametrize("where", ["/repos/create", "/preupload/", "/objects/batch", "/_lfs/", "/commit/"])
def test_push_survives_trouble(hub, unchecked, exported, status, where):
    """Rate limits and server errors that pass are waited out."""
    for method in ("POST", "PUT"):
        hub.fail(method, where, status=status, headers={"Retry-After": "1"}, times=2)
    assert push(exported, REPO).changed


@pytest.fixture
def xet(tmp_path, monkeypatch, waits):
    """A server that large files go to and come from over xet."""
    with MiniHub(tmp_path / "server", xet=True) as server:
        minihub.use_hub(monkeypatch, server, tmp_path / "cache")
        yield server


XET_REFUSED = [
    *((status, "/xet-write-token/") for status in STATUS if status != 412),
    *((status, "/content/") for status in (403, 404, 500)),
    (412, "/commit/"),
]


@pytest.mark.parametrize(("status", "where"), XET_REFUSED)
def test_push_over_xet_refused(xet, unchecked, exported, status, where):
    """Refusals that xet's own client meets are told as all others are, and what is final is not tried again."""
    if where == "/content/":
        xet.content_url = f"{xet.url}/content"
    retry_after = {"Retry-After": "7"} if status == 429 else {}
    for method in ("GET", "POST"):
        xet.fail(method, where, status=status, headers=retry_after, times=1000)
    with pytest.raises(HubError, match="The Hub limits how often" if status == 429 else STATUS[status]):
        push(exported, REPO, tag="v1")
    repo = xet.repos[REPO]
    assert repo.files.keys() == {".gitattributes"} and "refs/tags/v1" not in repo.refs
    assert len(xet.paths("POST", "/preupload/")) == (ATTEMPTS if status in (429, 500) else 1)
    assert any(fault.times < 1000 for fault in xet.faults)


@pytest.mark.parametrize("fault", [{"status": 500}, {"status": 429}, {"cut": True}, {"lost": True}], ids=str)
@pytest.mark.parametrize("where", ["/xet-write-token/", "/preupload/", "/commit/"])
def test_push_over_xet_survives_trouble(xet, unchecked, exported, fault, where):
    """Trouble that passes is waited out, and one commit is made."""
    for method in ("GET", "POST"):
        xet.fail(method, where, times=2, **fault)
    assert push(exported, REPO).changed
    assert len(xet.repos[REPO].commits) == 2


def test_broken_upload_over_xet_leaves_nothing(xet, unchecked, exported, tmp_path):
    """A connection that breaks in the middle of the content, each time, ends in an error; a later push completes."""
    there, xet.content_url = xet.content_url, f"{xet.url}/content"
    xet.fail("POST", "/content/", cut=True, times=1000)
    with pytest.raises(HubError, match="continues where it stopped"):
        push(exported, REPO)
    assert xet.repos[REPO].files.keys() == {".gitattributes"}
    assert xet.faults[0].times < 1000
    xet.content_url = there
    assert push(exported, REPO).changed
    pull(REPO, tmp_path / "got")
    assert content(tmp_path / "got") == content(exported)


def test_long_waits_are_left_to_the_user(hub, unchecked, exported, waits):
    hub.fail("POST", "/commit/", status=429, headers={"Retry-After": "3600"})
    with pytest.raises(HubError, match="wait 3600 seconds"):
        push(exported, REPO)
    assert waits == []


def test_failed_tag_is_said(hub, unchecked, exported):
    """The commit stands, and the message says that it has no tag; a tag that exists is found before the upload."""
    hub.fail("POST", "/tag/", status=403)
    with pytest.raises(HubError, match="is complete, but was not tagged v1: Your login may not tag"):
        push(exported, REPO, tag="v1")
    hub.repos[REPO].refs["refs/tags/v1"] = "0"
    with pytest.raises(HubError, match="already has a tag v1"):
        push(exported, REPO, tag="v1")


def test_wrong_upload_is_noticed(hub, unchecked, exported, monkeypatch):
    """Success is what the repository's hashes say, not the answer to the commit."""
    commit = minihub.Repo.commit

    def drop_a_file(self, ref, files, *rest):
        files.pop("config.json", None)
        return commit(self, ref, files, *rest)

    monkeypatch.setattr(minihub.Repo, "commit", drop_a_file)
    with pytest.raises(HubError, match=r"is not what was sent: config\.json"):
        push(exported, REPO)


def test_broken_download_goes_on(published, exported, tmp_path, monkeypatch):
    """The file is taken up where it broke off, with a Range, and arrives whole."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 256)  # a chunk that breaks off is asked for again
    published.fail("GET", "/_lfs/", cut=True, times=2)
    published.fail("GET", "/resolve/.*README", cut=True)
    pull(REPO, tmp_path / "got")
    assert content(tmp_path / "got") == content(exported)
    assert [r.status for r in published.requests].count(206) == 3


def test_pull_resumes_in_a_later_call(published, exported, tmp_path):
    """After giving up there is no folder; the next pull fetches only what is missing."""
    _, stuck = first_shard(published)
    published.fail("GET", stuck, cut=True, times=1000)
    with pytest.raises(HubError, match="continues where it stopped"):
        pull(REPO, tmp_path / "got")
    assert not (tmp_path / "got").exists()
    published.faults.clear()
    published.requests.clear()
    pull(REPO, tmp_path / "got")
    assert published.paths("GET", "/_lfs/") == [f"/_lfs/{stuck}"]
    assert content(tmp_path / "got") == content(exported) and leftovers(tmp_path) == ["got"]


def test_truncated_download(published, exported, tmp_path):
    """A file that comes short, though the server says that it is whole, is fetched again, and else never shown."""
    published.fail("GET", "/_lfs/", short=True, times=2)
    pull(REPO, tmp_path / "got")
    assert content(tmp_path / "got") == content(exported)
    published.fail("GET", "/_lfs/", short=True, times=1000)
    with pytest.raises(HubError):
        pull(REPO, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_damaged_download(published, exported, tmp_path):
    """Bytes that changed on the way are noticed by their hash, and fetched anew by the next pull."""
    name, sha256 = first_shard(published)
    stored = published.large_files / sha256
    whole = stored.read_bytes()
    stored.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(HubError, match=f"{name} arrived damaged"):
        pull(REPO, tmp_path / "got")
    assert not (tmp_path / "got").exists()
    stored.write_bytes(whole)
    pull(REPO, tmp_path / "got")
    assert content(tmp_path / "got") == content(exported)


@pytest.mark.parametrize("damage", ["short", "changed", "gone"])
def test_damaged_download_over_xet(xet, unchecked, exported, tmp_path, damage):
    """Content that arrives short, changed or not at all gives no folder; once it is whole, the same pull works."""
    push(exported, REPO)
    (stored,) = (path for path in xet.content_store.rglob("default.*") if path.suffix != ".tagset")
    whole = stored.read_bytes()
    stored.unlink()
    if damage != "gone":
        middle = len(whole) // 2
        rest = b"" if damage == "short" else bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        stored.write_bytes(whole[:middle] + rest)
    with pytest.raises(HubError):
        pull(REPO, tmp_path / "got")
    assert not (tmp_path / "got").exists()
    stored.write_bytes(whole)
    pull(REPO, tmp_path / "got")
    assert content(tmp_path / "got") == content(exported)


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500])
def test_pull_over_xet_refused(xet, unchecked, exported, tmp_path, status):
    """No folder appears, and the message says why, also if a refusal comes when the content is asked for."""
    push(exported, REPO)
    retry_after = {"Retry-After": "7"} if status == 429 else {}
    xet.fail("GET", "/xet-read-token/", status=status, headers=retry_after, times=1000)
    with pytest.raises(HubError, match=PULL_STATUS[status]):
        pull(REPO, tmp_path / "got")
    assert not (tmp_path / "got").exists()


PULL_STATUS = {status: STATUS[status] for status in (401, 404, 429, 500)} | {403: "may not read tester/tiny"}


@pytest.mark.parametrize("where", ["/api/models/tester/tiny/revision", "/tree/", "/resolve/"])
@pytest.mark.parametrize("status", PULL_STATUS)
def test_pull_refused(published, tmp_path, status, where):
    """No folder appears, and the message says why."""
    for method in ("GET", "HEAD"):
        published.fail(method, where, status=status, headers={"Retry-After": "7"} if status == 429 else {}, times=1000)
    with pytest.raises(HubError) as error:
        pull(REPO, tmp_path / "got", revision="main")
    assert not (tmp_path / "got").exists()
    if where != "/resolve/":
        assert error.match(PULL_STATUS[status])


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_convert_from_the_hub(hub, make_model, tmp_path, kind):
    """`egmla convert OWNER/NAME` takes safetensors where there are any, else .bin, at a revision, and never code."""
    source = tmp_path / "copy"
    make_model(kv_gate="none").save_pretrained(source)
    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    (source / "consolidated.safetensors").write_bytes(b"the same once more")
    for path in source.glob("*.safetensors" if kind == "bin" else "nothing"):
        path.unlink()
    hub.publish(REPO, source)
    repo = hub.repos[REPO]
    repo.refs["refs/tags/v1"] = repo.refs["refs/heads/main"]
    repo.commit("refs/heads/main", {"README.md": File.small(b"empty")}, "emptied", repo.refs["refs/heads/main"])
    report = convert(REPO, tmp_path / "got", revision="v1", to="deepseek_v3", rope_layout="halves")
    assert report.comparison.passed and type(report.comparison.threshold) is float
    taken = {path.rsplit("/", 1)[-1] for path in hub.paths("HEAD", "/resolve/")}
    weights = {"model.safetensors"} if kind == "safetensors" else {"pytorch_model.bin"}
    assert taken == weights | {"config.json", "generation_config.json"}
    with pytest.raises(HubError, match="holds no weights"):
        convert(REPO, tmp_path / "got2")
    with pytest.raises(HubError, match="There is no tester/other"):
        convert("tester/other", tmp_path / "got2")
    hub.fail("GET", "/_lfs/", short=True, times=1000)
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(HubError):
        convert(REPO, tmp_path / "got2", revision="v1")
    assert leftovers(tmp_path) == ["got"]


def test_pull_says_what_is_not_there(published, exported, tmp_path):
    with pytest.raises(HubError, match="has no branch, tag or commit v9"):
        pull(REPO, tmp_path / "got", revision="v9")
    with pytest.raises(HubError, match="There is no tester/other"):
        pull("tester/other", tmp_path / "got")
    published.create("tester/plain", private=True)
    with pytest.raises(HubError, match=r"has no manifest\.json"):
        pull("tester/plain", tmp_path / "got")
    with pytest.raises(FileExistsError, match="--overwrite"):
        pull(REPO, exported)
    assert leftovers(tmp_path) == []


def test_offline_is_said(published, exported, tmp_path, monkeypatch, waits):
    """At once, since waiting would not help."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
        pull(REPO, tmp_path / "got")
    assert not waits


def test_pulling_onto_a_link_is_refused(published, tmp_path):
    """A link to a folder elsewhere is neither replaced nor found out about after the whole download."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "got").symlink_to(tmp_path / "disk")
    with pytest.raises(FileExistsError, match="choose another name"):
        pull(REPO, tmp_path / "got")
    assert {path.name for path in tmp_path.iterdir()} >= {"got", "disk"} and not list(tmp_path.glob(".got*"))


def test_a_repository_without_a_config(hub):
    """What is missing is the file, and not the repository."""
    HfApi().create_repo(REPO)
    with pytest.raises(HubError, match=r"has no config\.json"):
        hub_module.fetch_checkpoint(REPO, config_only=True)


def test_pull_runs_no_code(published, tmp_path):
    """Code in a repository that is not ours, with hashes that fit, is fetched and read, and not run."""
    repo = published.repos[REPO]
    canary = tmp_path / "canary"
    code = repo.files["modeling_egmla.py"].content + f"\nopen({str(canary)!r}, 'w')\n".encode()
    manifest = json.loads(repo.files["manifest.json"].content)
    entry = {"sha256": hashlib.sha256(code).hexdigest(), "bytes": len(code)}
    manifest["files"]["modeling_egmla.py"] = entry
    changed = {"modeling_egmla.py": File.small(code), "manifest.json": File.small(json.dumps(manifest).encode())}
    repo.commit("refs/heads/main", {**repo.files, **changed}, "hostile", repo.refs["refs/heads/main"])
    pull(REPO, tmp_path / "got")
    assert not canary.exists()
    with pytest.raises(VerificationError, match="is not the installed package's"):
        validate(tmp_path / "got")
    assert not canary.exists()


def test_pull_replaces_only_with_what_is_right(published, folder, exported, tmp_path):
    """With `--overwrite`, the old folder stays until the new one is verified."""
    repo = published.repos[REPO]
    before = content(folder)
    spoiled = {**repo.files, "config.json": File.small(b"{}")}
    repo.commit("refs/heads/main", spoiled, "spoiled", repo.refs["refs/heads/main"])
    with pytest.raises(VerificationError, match=r"tester/tiny at \w+ cannot be used(.|\n)*config\.json"):
        pull(REPO, folder, overwrite=True)
    assert content(folder) == before and leftovers(tmp_path) == []


def test_token_is_neither_shown_nor_stored(published, unchecked, tmp_path, capfd, caplog, monkeypatch):
    """Not in messages, logs or files, also not when the Hub refuses."""
    caplog.set_level(logging.DEBUG)
    app = typer.Typer(cls=Commands)
    app.command("pull")(pull_command)
    app.command("push")(push_command)
    run = CliRunner().invoke
    good = run(app, ["pull", REPO, str(tmp_path / "got")])
    assert good.exit_code == 0 and "as published" in good.output, good.output
    again = run(app, ["push", str(tmp_path / "got"), REPO])
    assert again.exit_code == 0 and "already held this folder" in again.output
    published.fail("GET", "/api/models", status=403, times=1000)
    bad = run(app, ["pull", REPO, str(tmp_path / "got2")])
    assert bad.exit_code == 1 and "may not read" in bad.output
    output = "".join([*capfd.readouterr(), caplog.text, good.output, again.output, bad.output])
    assert TOKEN not in output
    stored = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert stored and not [path for path in stored if TOKEN.encode() in path.read_bytes()]


def test_library_pushes_and_loads(hub, make_model, tmp_path):
    """`push_to_hub` and `from_pretrained` of the library work, with the package and with the repository's code."""
    model, tokenizer = make_model(), tiny_tokenizer()
    model.push_to_hub("plain", private=True)
    tokenizer.push_to_hub("plain")
    ModelCard("---\nlicense: mit\n---\n# Tiny\n").push_to_hub("tester/plain")
    HfApi().create_tag("tester/plain", tag="v1")
    model.config.push_to_hub("plain")
    assert {"modeling_egmla.py", "cache_egmla.py", "config.json"} <= hub.repos["tester/plain"].files.keys()
    loaded = AutoModelForCausalLM.from_pretrained("tester/plain")
    assert type(loaded) is EGMLAForCausalLM
    remote = AutoModelForCausalLM.from_pretrained("tester/plain", revision="v1", trust_remote_code=True)
    ids = torch.arange(2, 9).view(1, -1)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    torch.testing.assert_close(remote(ids).logits, model(ids).logits)
    assert AutoTokenizer.from_pretrained("tester/plain").get_vocab() == tokenizer.get_vocab()


def test_trainer_pushes(hub, make_model, tmp_path):
    """`Trainer(push_to_hub=True)` leaves a repository that loads, private if asked, with the trained weights."""
    rows = [{"input_ids": list(range(2, 12)), "labels": list(range(2, 12))}] * 2
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=1,
        use_cpu=True,
        push_to_hub=True,
        hub_model_id="trained",
        hub_private_repo=True,
        report_to=[],
        save_strategy="no",
    )
    trainer = Trainer(make_model(), arguments, train_dataset=rows, processing_class=tiny_tokenizer())
    trainer.train()
    trainer.push_to_hub()
    assert hub.repos["tester/trained"].private
    loaded = AutoModelForCausalLM.from_pretrained("tester/trained")
    ids = torch.arange(2, 9).view(1, -1)
    torch.testing.assert_close(loaded(ids).logits, trainer.model.eval()(ids).logits)
