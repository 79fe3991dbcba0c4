"""
Exported folders to the Hub and back. What is sent is checked before, goes in one commit, and is compared after; what
comes takes its name only when it is complete and verified.
"""

import fnmatch
import http
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from ..files import publish
from .export import check_target
from .verify import (
    MANIFEST,
    VerificationError,
    Verified,
    check_card,
    check_code,
    check_files,
    check_forward,
    check_fresh_process,
    check_privacy,
    check_special_ids,
    read_manifest,
    verify,
)


ATTEMPTS = 5
FIRST_WAIT = 1.0  # seconds, doubled at each further attempt, unless the Hub says how long
LONGEST_WAIT = 300.0  # if the Hub asks for more, the user is told
TRANSIENT = (429, 500, 502, 503, 504)
# What loaders pick up by its name: left over from an earlier push, it would be mixed with the new model.
LOADED_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.py")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")  # the first of them that a repository has
CHECKPOINT_TEXTS = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "LICENSE*", "LICENCE*", "NOTICE*")

T = TypeVar("T")


class HubError(OSError):
    """The Hub did not do what was asked; the message says what to do."""


@dataclass(frozen=True)
class Pushed:
    """
    A push that is complete.

    Attributes:
        repo_id: `owner/name`.
        commit: id of the commit that holds the folder.
        url: of the commit or the pull request.
        private: whether only those with access see the repository.
        changed: whether there was anything to send.
    """

    repo_id: str
    commit: str
    url: str
    private: bool
    changed: bool


def files_to_push(folder: Path) -> dict[str, int]:
    """Files that a push sends, with their sizes in bytes."""
    sizes = {name: entry["bytes"] for name, entry in read_manifest(folder)["files"].items()}
    return {**sizes, MANIFEST: (folder / MANIFEST).stat().st_size}


def validate(folder: str | os.PathLike, trust_remote_code: bool = False) -> dict[str, int]:
    """
    Checks everything that can be checked without the Hub: files against the manifest, code, special ids, private
    paths, card, a forward pass, and a load with the folder's own code in a fresh process where this package is
    blocked.

    Args:
        folder: an exported folder.
        trust_remote_code: run that code even if it is not the installed package's.

    Returns:
        The files to push, with their sizes in bytes.

    Raises:
        VerificationError: something is wrong; all of it is listed.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    problems = check_files(folder, manifest) + check_code(folder)
    problems += check_special_ids(folder) + check_privacy(folder) + check_card(folder)
    if not trust_remote_code:
        problems += _code_of_others(folder)
    problems = problems or check_forward(folder, manifest) or check_fresh_process(folder, manifest)
    if problems:
        raise VerificationError(folder, problems)
    return files_to_push(folder)


def _code_of_others(folder: Path) -> list[str]:
    """Code that is not a copy of the installed package's, and so may not be run without being asked for."""
    import modeling_egmla

    installed = Path(modeling_egmla.__file__).parent
    return [
        f"{path.name} is not the installed package's: export again with this version, or, to run it for the check of "
        "loading, pass `--trust-remote-code`."
        for path in sorted(folder.glob("*.py"))
        if not (installed / path.name).is_file() or (installed / path.name).read_bytes() != path.read_bytes()
    ]


def check_arguments(repo_id: str, tag: str | None, pull_request: bool) -> None:
    """Raises a `ValueError` if [`push`] could not be called so."""
    if pull_request and tag:
        raise ValueError("A pull request cannot be tagged before it is merged: leave `--tag` out.")
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(str(error)) from error


def push(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    branch: str | None = None,
    tag: str | None = None,
    pull_request: bool = False,
    public: bool = False,
    message: str = "Upload EG-MLA model",
    trust_remote_code: bool = False,
    api: HfApi | None = None,
) -> Pushed:
    """
    Publishes an exported folder, after [`validate`], as one commit. Of what the repository held before, weights, code
    and the files of the last push that this folder does not have are removed in the same commit; other files stay.

    A broken connection is retried; what was sent is not sent again, also not by a later call. Another person's commit
    in between is an error. At the end the repository's hashes are compared with the folder's.

    Args:
        folder: an exported folder.
        repo_id: `owner/name`, or `name` under your own.
        branch: to commit to, made from `main` if there is none of that name; or a pull request, e.g. `refs/pr/1`.
        tag: name for the commit; it must be new.
        pull_request: propose the commit instead of making it.
        public: make a new repository public, or allow an existing public one.
        message: of the commit.
        trust_remote_code: as in [`validate`].
        api: another endpoint or login than that of the environment.

    Raises:
        VerificationError: the folder is not fit to be published; nothing was sent.
        HubError: the Hub refuses, or cannot be reached.
        ValueError: the arguments do not go together, or `repo_id` is no name.
    """
    check_arguments(repo_id, tag, pull_request)
    folder = Path(folder)
    sizes = validate(folder, trust_remote_code)
    api = api or HfApi()

    with plain_errors(f"write to {repo_id}", repo_id, branch):
        if not pull_request:
            repo_id = retried(lambda: api.create_repo(repo_id, private=not public, exist_ok=True).repo_id)
        info = retried(lambda: api.repo_info(repo_id))
        if not info.private and not public:
            raise HubError(f"{repo_id} is public. To publish there, pass `--public`.")
        if tag and tag in [ref.name for ref in retried(lambda: api.list_repo_refs(repo_id)).tags]:
            raise HubError(f"{repo_id} already has a tag {tag}: choose another name.")
        if branch and not branch.startswith("refs/") and not pull_request:
            retried(lambda: api.create_branch(repo_id, branch=branch, exist_ok=True))

        head = retried(lambda: api.repo_info(repo_id, revision=branch)).sha
        state = _compare(api, repo_id, head, folder)
        changed = not state.complete
        if changed:
            commit, url = _commit(api, repo_id, branch, head, state.stale, folder, sizes, message, pull_request)
            state = _compare(api, repo_id, commit, folder)
        else:
            commit, url = head, f"{api.endpoint}/{repo_id}/commit/{head}"
        if not state.complete:
            raise HubError(
                f"{repo_id} is not what was sent: {', '.join(state.different + state.stale)} differ at {commit}: "
                "push again."
            )
    if tag:
        try:
            with plain_errors(f"tag {repo_id}", repo_id, commit):
                api.create_tag(repo_id, tag=tag, revision=commit)
        except HubError as error:
            raise HubError(f"The commit {commit} is complete, but was not tagged {tag}: {error}") from error
    return Pushed(repo_id, commit, url, info.private, changed)


@dataclass(frozen=True)
class RemoteState:
    """How a revision differs from a folder: files to send, and files to remove."""

    different: list[str]
    stale: list[str]

    @property
    def complete(self) -> bool:
        return not self.different and not self.stale


def _compare(api: HfApi, repo_id: str, revision: str, folder: Path) -> RemoteState:
    """Compares the hashes that the Hub has of a revision with those of a folder's files."""
    found = retried(lambda: api.verify_repo_checksums(repo_id, revision=revision, local_dir=folder))
    not_ours = {".gitattributes"}
    different = {entry["path"] for entry in found.mismatches} | set(found.extra_paths)
    remote_only = set(found.missing_paths) - not_ours
    loaded = [name for name in remote_only if "/" not in name]  # of folders, nothing is picked up
    stale = {name for name in loaded if any(fnmatch.fnmatch(name, pattern) for pattern in LOADED_FILES)}
    if remote_only:
        stale |= remote_only & _files_of_last_push(api, repo_id, revision)
    return RemoteState(sorted(different - not_ours), sorted(stale))


def _files_of_last_push(api: HfApi, repo_id: str, revision: str) -> set[str]:
    """Names in the manifest that a revision holds; none if it holds none that can be read."""
    try:
        path = api.hf_hub_download(repo_id, MANIFEST, revision=revision)
        return set(json.loads(Path(path).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _commit(
    api: HfApi,
    repo_id: str,
    branch: str | None,
    head: str,
    stale: list[str],
    folder: Path,
    sizes: dict[str, int],
    message: str,
    pull_request: bool,
) -> tuple[str, str]:
    """
    Makes the commit, or finds that an attempt whose answer was lost had made it. Returns its id, or a pull request's
    revision, and its address.
    """

    def attempt() -> tuple[str, str]:
        # The library changes these as it sends them, so each attempt needs new ones.
        operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in sizes]
        operations += [CommitOperationDelete(path_in_repo=name) for name in stale]
        commit = api.create_commit(
            repo_id,
            operations,
            commit_message=message,
            revision=branch,
            create_pr=pull_request,
            parent_commit=None if pull_request else head,
        )
        return (commit.pr_revision, commit.pr_url) if pull_request else (commit.oid, commit.commit_url)

    def made_before() -> tuple[str, str] | None:
        now = api.repo_info(repo_id, revision=branch).sha
        is_ours = now != head and _compare(api, repo_id, now, folder).complete
        return (now, f"{api.endpoint}/{repo_id}/commit/{now}") if is_ours else None

    # A pull request is tried once: a second attempt could open a second one.
    return attempt() if pull_request else retried(attempt, before_retry=made_before)


def pull(
    repo_id: str,
    folder: str | os.PathLike,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    api: HfApi | None = None,
) -> tuple[str, Verified]:
    """
    Fetches a model that was published with [`push`], and verifies it. The files are collected beside `folder`, in
    `.<name>.<commit>.partial`, from where a later call continues if this one is interrupted, and take the name when
    all of them are there and right. No code of the repository is run unless asked for.

    Args:
        repo_id: `owner/name`.
        folder: where to.
        revision: branch, tag or commit; by default `main`.
        trust_remote_code: also run the model with the repository's code, as in [`verify`].
        overwrite: replace a folder that `egmla` wrote before.
        api: another endpoint or login than that of the environment.

    Returns:
        The commit, and what was verified.

    Raises:
        FileExistsError: the folder exists, and not `overwrite`.
        HubError: the Hub refuses, or cannot be reached.
        VerificationError: what came is not what its manifest says.
    """
    folder = Path(folder).absolute()
    check_target(folder, overwrite)
    api = api or HfApi()
    with plain_errors(f"read {repo_id}", repo_id, revision):
        commit = retried(lambda: api.repo_info(repo_id, revision=revision).sha)
        if not retried(lambda: api.file_exists(repo_id, MANIFEST, revision=commit)):
            raise HubError(
                f"{repo_id} has no {MANIFEST}, so it was not published with `egmla push` and cannot be verified. To "
                "load it as it is, use `from_pretrained`."
            )
        staging = folder.with_name(f".{folder.name}.{commit[:12]}.partial")
        staging.mkdir(parents=True, exist_ok=True)
        retried(lambda: api.hf_hub_download(repo_id, MANIFEST, revision=commit, local_dir=staging))
        names = [*read_manifest(staging)["files"], MANIFEST]
        retried(lambda: api.snapshot_download(repo_id, revision=commit, local_dir=staging, allow_patterns=names))
        found = retried(lambda: api.verify_repo_checksums(repo_id, revision=commit, local_dir=staging))
    for entry in found.mismatches:
        (staging / entry["path"]).unlink()
    if found.mismatches:
        names = ", ".join(entry["path"] for entry in found.mismatches)
        raise HubError(f"{names} arrived damaged and was removed: run the command again to fetch it anew.")
    shutil.rmtree(staging / ".cache", ignore_errors=True)
    try:
        verified = verify(staging, trust_remote_code)
    except VerificationError as error:
        # All of it arrived as it is on the Hub, so a further download would not help.
        shutil.rmtree(staging)
        raise VerificationError(Path(f"{repo_id} at {commit}"), error.problems) from error
    publish(staging, folder)
    return commit, verified


def fetch_checkpoint(
    repo_id: str, revision: str | None = None, config_only: bool = False, api: HfApi | None = None
) -> Path:
    """
    Fetches a checkpoint in whatever layout into the cache that all Hugging Face libraries share: weights, as
    safetensors where there are any, and what lies beside them in files of text. Code stays where it is.

    Args:
        repo_id: `owner/name`.
        revision: branch, tag or commit; by default `main`.
        config_only: fetch the config.json and nothing else.
        api: another endpoint or login than that of the environment.

    Returns:
        The folder.

    Raises:
        HubError: the Hub refuses or cannot be reached; nothing is fetched in part and used.
        ValueError: `repo_id` is no name.
    """
    check_arguments(repo_id, None, False)
    api = api or HfApi()
    with plain_errors(f"read {repo_id}", repo_id, revision):
        info = retried(lambda: api.repo_info(repo_id, revision=revision))
        if config_only:
            return Path(retried(lambda: api.hf_hub_download(repo_id, "config.json", revision=info.sha))).parent
        names = [sibling.rfilename for sibling in info.siblings if "/" not in sibling.rfilename]
        kinds = [[name for name in names if fnmatch.fnmatch(name, f"*{suffix}")] for suffix in WEIGHT_SUFFIXES]
        weights = next((kind for kind in kinds if kind), None)
        if weights is None:
            raise HubError(f"{repo_id} holds no weights: no {', '.join(WEIGHT_SUFFIXES)} file beside its config.json.")
        # Some repositories hold the same weights once more, under a name that the library does not read.
        weights = [name for name in weights if name.startswith(("model", "pytorch_model"))] or weights
        wanted = [*weights, *CHECKPOINT_TEXTS]
        return Path(retried(lambda: api.snapshot_download(repo_id, revision=info.sha, allow_patterns=wanted)))


def retried(call: Callable[[], T], before_retry: Callable[[], T | None] = lambda: None) -> T:
    """
    Result of `call`, which is tried again after a lost connection, a rate limit or a server error, waiting as long as
    the Hub says or twice as long each time; or of `before_retry`, if it finds that nothing is left to be done.
    """
    wait = FIRST_WAIT
    for attempts_left in reversed(range(ATTEMPTS)):
        try:
            return call()
        except (HTTPError, OSError, RuntimeError) as error:
            cause = _cause(error)
            pause = _retry_after(cause) or wait
            if not attempts_left or not _is_transient(cause) or pause > LONGEST_WAIT:
                raise
            time.sleep(pause)
            wait *= 2
        done = before_retry()
        if done is not None:
            return done
    raise AssertionError("unreachable")


def _cause(error: BaseException) -> BaseException:
    """The Hub's answer, which downloads wrap in an error about their cache, and uploads in one about the file."""
    is_wrapper = isinstance(error, LocalEntryNotFoundError | RuntimeError) and error.__cause__ is not None
    return error.__cause__ if is_wrapper else error


def _status(error: BaseException) -> int | None:
    """The status that the Hub answered with; hf_xet only tells it in the words of a connection error."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code
    told = re.search(r"HTTP status (?:client|server) error \((\d{3})\b", str(error))
    return int(told[1]) if told else None


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, OfflineModeIsEnabled):
        return False
    status = _status(error)
    if status is not None:
        return status in TRANSIENT
    # A download that came out too short is a plain OSError, without the number of an error of the system.
    too_short = type(error) is OSError and error.errno is None
    return isinstance(error, HTTPError | ConnectionError | TimeoutError) or too_short


def _retry_after(error: BaseException) -> float | None:
    """Seconds that the Hub asks to wait."""
    value = error.response.headers.get("Retry-After", "") if isinstance(error, HfHubHTTPError) else ""
    return float(value) if value.isdigit() else None


@contextmanager
def plain_errors(action: str, repo_id: str, revision: str | None) -> Iterator[None]:
    """Turns the errors of the Hub's client into a [`HubError`] that says what happened and what to do."""
    try:
        yield
    except HubError:
        raise
    except OfflineModeIsEnabled as error:
        raise HubError("HF_HUB_OFFLINE is set, which switches the Hub off: unset it.") from error
    except (HTTPError, OSError, RuntimeError) as error:
        raise HubError(_explain(_cause(error), action, repo_id, revision)) from error


def _explain(error: BaseException, action: str, repo_id: str, revision: str | None) -> str:
    status = _status(error)
    if status is None and _is_transient(error):
        return f"The connection to the Hub broke ({error}). Run the command again: it continues where it stopped."
    if status is None:
        return f"Could not {action}: {error}"
    response = getattr(error, "response", None)
    reason = http.HTTPStatus(status).phrase if response is None else response.reason_phrase
    if response is not None:
        reason = response.headers.get("X-Error-Message") or reason
    if status == 401:
        return (
            f"The Hub does not know you, or has no {repo_id} that you can see: check the name, and log in with "
            "`hf auth login` or HF_TOKEN."
        )
    if status == 403:
        return f"Your login may not {action} ({reason}): ask its owner for access, or use a token that has the right."
    if isinstance(error, RevisionNotFoundError):
        return f"{repo_id} has no branch, tag or commit {revision or 'main'}."
    if isinstance(error, RemoteEntryNotFoundError):
        return f"Could not {action}: it has no {error.response.url.path.rsplit('/', 1)[-1]}."
    if status == 404:
        return f"There is no {repo_id} that you can see: check the name; private ones need a login."
    if status == 409:
        return f"The Hub could not {action}, since it conflicts with what is there ({reason})."
    if status == 412:
        return f"Somebody else changed {repo_id} meanwhile: look at the change, then run the command again."
    if status == 429:
        wait = _retry_after(error)
        return f"The Hub limits how often you may ask: wait {f'{wait:.0f} seconds' if wait else 'a while'}."
    if status >= 500:
        return f"The Hub has trouble ({status}, {reason}). Run the command again later: it continues where it stopped."
    return f"The Hub refused to {action} ({status}, {reason})."
