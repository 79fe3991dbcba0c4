"""
A Hub on loopback: answers what `huggingface_hub` asks about model repositories, and fails when told to.

```python
with MiniHub(tmp_path) as hub:
    hub.fail("PUT", "/_lfs/", cut=True)  # the next upload breaks off
    HfApi(endpoint=hub.url, token=TOKEN).upload_folder(...)
```

Large files go over LFS, or with `xet=True` into a folder that hf_xet uses as its content store (its undocumented `local://`
addresses). Ids of files and commits are real: SHA-1 of Git blobs, SHA-256 of large files.
"""

import base64
import hashlib
import json
import re
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


TOKEN = "hf_loopback_only"
USER = "tester"
LARGE = (".safetensors", ".bin")
# The Hub's names for what was not found.
NO_REPO, NO_REVISION, NO_ENTRY = "RepoNotFound", "RevisionNotFound", "EntryNotFound"


@dataclass(frozen=True)
class File:
    """A file of a commit: content of a small one, hashes of a large one."""

    oid: str
    size: int
    content: bytes | None = None
    sha256: str | None = None
    xet_hash: str | None = None

    @classmethod
    def small(cls, content: bytes) -> "File":
        return cls(git_oid(content), len(content), content=content)

    @classmethod
    def large(cls, sha256: str, size: int, xet_hash: str | None) -> "File":
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
        return cls(git_oid(pointer), size, sha256=sha256, xet_hash=xet_hash)

    def entry(self, path: str) -> dict:
        entry = {"type": "file", "path": path, "size": self.size, "oid": self.oid}
        if self.sha256:
            entry["lfs"] = {"oid": self.sha256, "size": self.size, "pointerSize": 134}
        if self.xet_hash:
            entry["xetHash"] = self.xet_hash
        return entry


@dataclass(frozen=True)
class Commit:
    oid: str
    files: dict[str, File]
    title: str
    parent: str | None


@dataclass
class Repo:
    """A repository; `refs` are branches, tags and pull requests under their full names (`refs/heads/main`)."""

    private: bool
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)

    def commit(self, ref: str, files: dict[str, File], title: str, parent: str | None) -> Commit:
        names = {path: file.oid for path, file in files.items()}
        oid = hashlib.sha1(json.dumps([parent, names, title, len(self.commits)]).encode()).hexdigest()
        self.commits[oid] = Commit(oid, files, title, parent)
        self.refs[ref] = oid
        return self.commits[oid]

    def find(self, revision: str) -> Commit:
        for name in (revision, f"refs/heads/{revision}", f"refs/tags/{revision}"):
            if name in self.refs:
                return self.commits[self.refs[name]]
        if revision in self.commits:
            return self.commits[revision]
        raise Refusal(404, NO_REVISION, f"Invalid rev id: {revision}")

    @property
    def files(self) -> dict[str, File]:
        """Files at the head of main."""
        return self.find("main").files


class Refusal(Exception):
    """An answer other than success."""

    def __init__(self, status: int, code: str, message: str, **headers: str):
        self.status, self.code, self.message, self.headers = status, code, message, headers


@dataclass
class Fault:
    """
    What goes wrong with the next `times` requests that match.

    Attributes:
        status: answer so, without doing anything.
        headers: of that answer.
        cut: close the connection in the middle of the file that is sent, or received.
        short: send half of the file as if it were all.
        lost: do what is asked, and close the connection without an answer.
        before: called before the request is handled.
    """

    method: str
    pattern: str
    times: int = 1
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    short: bool = False
    lost: bool = False
    before: Callable[[], None] | None = None


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    status: int
    headers: dict[str, str]


class MiniHub:
    """The server; a context manager. `requests` lists what it was asked, `repos` holds what it has."""

    def __init__(self, folder: Path, xet: bool = False):
        self.large_files = Path(folder) / "lfs"
        self.content_store = Path(folder) / "xet" if xet else None
        for path in (self.large_files, self.content_store):
            if path is not None:
                path.mkdir(parents=True, exist_ok=True)
        self.content_url = f"local://{self.content_store}"  # or an address, e.g. below `url`, which faults can match
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "MiniHub":
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fail(self, method: str, pattern: str, **fault) -> None:
        """Adds a [`Fault`] for requests of `method` whose path has a match of `pattern`."""
        self.faults.append(Fault(method, pattern, **fault))

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times and fault.method == method and re.search(fault.pattern, path):
                    fault.times -= 1
                    return fault
        return None

    def paths(self, method: str, pattern: str = "") -> list[str]:
        """Paths of the requests of `method` that were answered with success."""
        return [
            r.path for r in self.requests if r.method == method and 0 < r.status < 400 and re.search(pattern, r.path)
        ]

    def create(self, repo_id: str, private: bool) -> Repo:
        repo = self.repos[repo_id] = Repo(private)
        attributes = File.small(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
        repo.commit("refs/heads/main", {".gitattributes": attributes}, "initial commit", None)
        return repo

    def publish(self, repo_id: str, folder: Path) -> Repo:
        """Puts a folder into a new private repository, as a push would."""
        files = {}
        for path in folder.iterdir():
            content = path.read_bytes()
            if path.suffix in LARGE:
                sha256 = hashlib.sha256(content).hexdigest()
                (self.large_files / sha256).write_bytes(content)
                files[path.name] = File.large(sha256, len(content), None)
            else:
                files[path.name] = File.small(content)
        repo = self.create(repo_id, private=True)
        repo.commit("refs/heads/main", repo.files | files, "publish", repo.refs["refs/heads/main"])
        return repo


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def xet_hash(store: Path, sha256: str) -> str | None:
    """Hash under which hf_xet stored a file, from the shards that it wrote (file section of the MDB format)."""

    def as_hex(words: bytes) -> str:
        return "".join(f"{word:016x}" for word in struct.unpack("<4Q", words))

    for shard in store.rglob("*.mdb"):
        data, position = shard.read_bytes(), 48  # after magic, version and size of the footer
        while position + 48 <= len(data):
            name = data[position : position + 32]
            flags, entries = struct.unpack("<II", data[position + 32 : position + 40])
            if name == b"\xff" * 32:
                break
            position += 48 + 48 * entries * (2 if flags & (1 << 31) else 1)
            if flags & (1 << 30):
                if as_hex(data[position : position + 32]) == sha256:
                    return as_hex(name)
                position += 48
    return None


ROUTES: list[tuple[str, re.Pattern, Callable]] = []
REPO = r"(?P<repo_id>[^/]+/[^/]+)"
MODEL = rf"/api/models/{REPO}"


def route(methods: str, pattern: str):
    def add(handle: Callable) -> Callable:
        ROUTES.extend((method, re.compile(pattern), handle) for method in methods.split())
        return handle

    return add


class Handler(BaseHTTPRequestHandler):
    """One connection. Routes answer with `send`, or raise a [`Refusal`]."""

    hub: MiniHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def handle_request(self) -> None:
        parts = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(parts.query))
        self.status = 0
        self.fault = self.hub.take_fault(self.command, self.path) or Fault(self.command, "")
        path = urllib.parse.unquote(parts.path)
        try:
            if self.fault.before:
                self.fault.before()
            self.body = self.read_body()
            if self.fault.status:
                raise Refusal(self.fault.status, "", "told to fail", **self.fault.headers)
            for method, pattern, handle in ROUTES:
                match = pattern.fullmatch(path) if method == self.command else None
                if match:
                    with self.hub.lock:
                        handle(self, **match.groupdict())
                    break
            else:
                raise Refusal(404, "", f"no such route {self.command} {path}")
        except Refusal as refusal:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message, **refusal.headers}
            self.send({"error": refusal.message}, refusal.status, **headers)
        except ConnectionError:
            self.close_connection = True
        self.hub.requests.append(Request(self.command, self.path, self.status, dict(self.headers)))

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            return b"".join(self._chunks())
        length = int(self.headers.get("Content-Length") or 0)
        if self.fault.cut and self.command in ("PUT", "POST"):
            self.rfile.read(length // 2)
            self.connection.close()
            raise ConnectionError
        return self.rfile.read(length)

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def send(self, body: bytes | dict | list = b"", status: int = 200, **headers: str) -> None:
        if self.fault.lost:
            self.connection.close()
            raise ConnectionError
        is_file = isinstance(body, bytes)
        body = body if is_file else json.dumps(body).encode()
        self.status = status
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream" if is_file else "application/json")
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault.cut:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.connection.close()
            raise ConnectionError
        self.wfile.write(body)

    def send_file(self, content: bytes, etag: str, **headers: str) -> None:
        headers |= {"ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if self.fault.short:
            content = content[: len(content) // 2]
        wanted = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not wanted:
            return self.send(content, **headers)
        first, last = int(wanted[1]), int(wanted[2] or len(content) - 1)
        return self.send(
            content[first : last + 1], 206, Content_Range=f"bytes {first}-{last}/{len(content)}", **headers
        )

    def need_login(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refusal(401, "", "Invalid username or password.")

    def repo(self, repo_id: str) -> Repo:
        repo = self.hub.repos.get(repo_id)
        is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or (repo.private and not is_known):
            raise Refusal(404 if is_known else 401, NO_REPO, "Repository not found")
        return repo

    @route("GET", "/api/whoami-v2")
    def whoami(self) -> None:
        self.need_login()
        self.send({"type": "user", "id": "1", "name": USER, "orgs": [], "auth": {"type": "access_token"}})

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self) -> None:
        self.send({"errors": [], "warnings": []})

    @route("POST", "/api/repos/create")
    def create(self) -> None:
        self.need_login()
        wanted = json.loads(self.body)
        repo_id = f"{wanted.get('organization') or USER}/{wanted['name']}"
        address = {"url": f"{self.hub.url}/{repo_id}", "name": repo_id, "id": "1"}
        if repo_id in self.hub.repos:
            return self.send({"error": "You already created this model repo", **address}, 409)
        self.hub.create(repo_id, private=wanted.get("visibility") == "private")
        return self.send(address)

    @route("GET", MODEL)
    def info(self, repo_id: str, revision: str = "main") -> None:
        repo = self.repo(repo_id)
        commit = repo.find(revision)
        self.send(
            {
                "_id": "1",
                "id": repo_id,
                "sha": commit.oid,
                "private": repo.private,
                "gated": False,
                "disabled": False,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "siblings": [{"rfilename": path} for path in sorted(commit.files)],
            }
        )

    @route("GET", rf"{MODEL}/revision/(?P<revision>.+)")
    def info_at(self, repo_id: str, revision: str) -> None:
        self.info(repo_id, revision)

    @route("GET", rf"{MODEL}/refs")
    def refs(self, repo_id: str) -> None:
        refs = self.repo(repo_id).refs
        kinds = {"branches": "refs/heads/", "tags": "refs/tags/"}
        self.send(
            {
                kind: [
                    {"name": ref.removeprefix(prefix), "ref": ref, "targetCommit": oid}
                    for ref, oid in refs.items()
                    if ref.startswith(prefix)
                ]
                for kind, prefix in kinds.items()
            }
            | {"converts": []}
        )

    @route("GET", rf"{MODEL}/commits/(?P<revision>.+)")
    def commits(self, repo_id: str, revision: str) -> None:
        repo, found = self.repo(repo_id), []
        commit = repo.find(revision)
        while commit:
            date = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(0))
            found.append({"id": commit.oid, "title": commit.title, "message": "", "authors": [], "date": date})
            commit = repo.commits.get(commit.parent)
        self.send(found)

    @route("GET", rf"{MODEL}/discussions")
    def discussions(self, repo_id: str) -> None:
        self.send({"discussions": [], "count": 0, "start": 0})

    @route("POST", rf"{MODEL}/branch/(?P<name>.+)")
    def create_branch(self, repo_id: str, name: str) -> None:
        self._create_ref(repo_id, f"refs/heads/{name}", json.loads(self.body or b"{}").get("startingPoint", "main"))

    @route("POST", rf"{MODEL}/tag/(?P<revision>.+)")
    def create_tag(self, repo_id: str, revision: str) -> None:
        self._create_ref(repo_id, f"refs/tags/{json.loads(self.body)['tag']}", revision)

    def _create_ref(self, repo_id: str, ref: str, revision: str) -> None:
        self.need_login()
        repo = self.repo(repo_id)
        if ref in repo.refs:
            raise Refusal(409, "", "Reference already exists")
        repo.refs[ref] = repo.find(revision).oid
        self.send({})

    @route("GET", rf"{MODEL}/tree/(?P<revision>[^/]+|refs/pr/\d+)")
    def tree(self, repo_id: str, revision: str) -> None:
        files = self.repo(repo_id).find(revision).files
        self.send([file.entry(path) for path, file in sorted(files.items())])

    @route("POST", rf"{MODEL}/paths-info/(?P<revision>.+)")
    def paths_info(self, repo_id: str, revision: str) -> None:
        files = self.repo(repo_id).find(revision).files
        if self.body.startswith(b"{"):
            wanted = json.loads(self.body)["paths"]
        else:
            wanted = urllib.parse.parse_qs(self.body.decode())["paths"]
        self.send([files[path].entry(path) for path in wanted if path in files])

    @route("POST", rf"{MODEL}/preupload/(?P<revision>.+)")
    def preupload(self, repo_id: str, revision: str) -> None:
        self.need_login()
        files = self.repo(repo_id).find(revision).files
        answers = []
        for wanted in json.loads(self.body)["files"]:
            known = files.get(wanted["path"])
            mode = "lfs" if wanted["path"].endswith(LARGE) else "regular"
            oid = (known.sha256 or known.oid) if known else None
            answers.append({"path": wanted["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.send({"files": answers})

    @route("GET", rf"{MODEL}/xet-(write|read)-token/.+")
    def xet_token(self, repo_id: str) -> None:
        store, expires = self.hub.content_url, int(time.time()) + 3600
        headers = {"X-Xet-Cas-Url": store, "X-Xet-Access-Token": "xet", "X-Xet-Token-Expiration": str(expires)}
        self.send({"casUrl": store, "exp": expires, "accessToken": "xet"}, **headers)

    @route("POST", rf"/{REPO}\.git/info/lfs/objects/batch")
    def lfs_batch(self, repo_id: str) -> None:
        self.need_login()
        answers = []
        for wanted in json.loads(self.body)["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"], "authenticated": True}
            if not (self.hub.large_files / wanted["oid"]).exists():
                answer["actions"] = {"upload": {"href": f"{self.hub.url}/_lfs/{wanted['oid']}", "header": {}}}
            answers.append(answer)
        self.send({"transfer": "basic", "objects": answers})

    @route("PUT", r"/_lfs/(?P<sha256>[0-9a-f]{64})")
    def put_large(self, sha256: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != sha256:
            raise Refusal(400, "", "The content does not have this hash")
        (self.hub.large_files / sha256).write_bytes(self.body)
        self.send(b"", ETag=f'"{sha256}"')

    @route("GET", r"/_lfs/(?P<sha256>[0-9a-f]{64})")
    def get_large(self, sha256: str) -> None:
        self.send_file((self.hub.large_files / sha256).read_bytes(), sha256)

    @route("POST", rf"{MODEL}/commit/(?P<revision>.+)")
    def commit(self, repo_id: str, revision: str) -> None:
        self.need_login()
        repo = self.repo(repo_id)
        parent = repo.find(revision)
        files, header = dict(parent.files), {}
        for line in self.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            match operation["key"]:
                case "header":
                    header = value
                case "file":
                    files[value["path"]] = File.small(base64.b64decode(value["content"]))
                case "lfsFile":
                    files[value["path"]] = self._large_file(value["oid"], value["size"])
                case "deletedFile":
                    del files[value["path"]]
                case other:
                    raise Refusal(400, "", f"unknown operation {other}")
        if header.get("parentCommit", parent.oid) != parent.oid:
            raise Refusal(412, "", "A commit has happened since. Please refresh and try again.")
        answer = {"success": True, "hookOutput": ""}
        if self.query.get("create_pr"):
            number = 1 + sum(ref.startswith("refs/pr/") for ref in repo.refs)
            ref = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.hub.url}/{repo_id}/discussions/{number}"
        else:
            ref = revision if revision.startswith("refs/") else f"refs/heads/{revision}"
        made = repo.commit(ref, files, header["summary"], parent.oid)
        self.send(answer | {"commitOid": made.oid, "commitUrl": f"{self.hub.url}/{repo_id}/commit/{made.oid}"})

    def _large_file(self, sha256: str, size: int) -> File:
        stored = xet_hash(self.hub.content_store, sha256) if self.hub.content_store else None
        if stored is None and not (self.hub.large_files / sha256).exists():
            raise Refusal(400, "", f"Large file {sha256} was not uploaded")
        return File.large(sha256, size, stored)

    @route("GET HEAD", rf"/(?:api/resolve-cache/models/)?{REPO}/resolve/(?P<rest>.+)")
    def resolve(self, repo_id: str, rest: str) -> None:
        match = re.fullmatch(r"(refs/pr/\d+|[^/]+)/(.+)", rest)
        revision, path = match[1], match[2]
        commit = self.repo(repo_id).find(revision)
        if path not in commit.files:
            raise Refusal(404, NO_ENTRY, "Entry not found", X_Repo_Commit=commit.oid)
        file = commit.files[path]
        headers = {"X-Repo-Commit": commit.oid}
        if file.sha256 is None:
            return self.send_file(file.content, file.oid, **headers)
        headers |= {"X-Linked-Size": str(file.size), "X-Linked-ETag": f'"{file.sha256}"'}
        if file.xet_hash:
            token = f"{self.hub.url}/api/models/{repo_id}/xet-read-token/{commit.oid}"
            headers |= {"X-Xet-Hash": file.xet_hash, "Link": f'<{token}>; rel="xet-auth"'}
        # To another host name, or the client would follow before it reads these headers.
        host = f"http://localhost:{self.server.server_port}"
        return self.send(b"", 302, Location=f"{host}/_lfs/{file.sha256}", **headers)


def use_hub(monkeypatch, hub: MiniHub, cache: Path) -> None:
    """Points the client libraries of this process, which have read their environment already, at `hub`."""
    import huggingface_hub.hf_api
    import transformers.dynamic_module_utils
    import transformers.utils.hub
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", hub.content_store is None)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.url)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(cache / "modules"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
