"""A Hugging Face Hub on this host, as far as the real client needs one to publish a model.

It keeps repositories in memory and refuses what the real one refuses: an unknown token, a commit that names a large
file whose content never arrived, or whose parent is not the head. Large files come over both of the client's ways: LFS
over HTTP, and Xet, whose client can write into a folder in place of its storage service.
"""

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import yaml

TOKEN = "hf_" + "Fake" * 8
LICENCES = ("apache-2.0", "mit", "gemma", "unknown", "other")
_PAGE = 10  # entries in a page of a listing


class Hub:
    """The server and its state; a context manager.

    `interfere(method, path)` is called before each request and may return an HTTP status to answer with.
    """

    def __init__(self, storage: Path) -> None:
        self.storage = storage  # of Xet
        self.role = "write"
        self.ignored: set[str] = set()  # paths that a .gitignore of the repository names
        self.repositories: dict[str, list[Commit]] = {}
        self.large: dict[str, int] = {}  # sha256 -> size of what arrived over LFS
        self.requests: list[str] = []
        self.interfere: Callable[[str, str], int | None] = lambda method, path: None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def count(self, pattern: str) -> int:
        """How many requests had such a method and path."""
        return sum(re.match(pattern, request) is not None for request in self.requests)

    def has_large(self, sha256: str) -> bool:
        return sha256 in self.large or self._has_xet(sha256)

    def _has_xet(self, sha256: str) -> bool:
        """Whether a registered shard names the file: Xet writes a digest as four little-endian numbers."""
        digest = bytes.fromhex(sha256)
        stored = b"".join(digest[start : start + 8][::-1] for start in range(0, 32, 8))
        return any(stored in shard.read_bytes() for shard in self.storage.glob("xet/xorbs/shards/*.mdb"))


class Commit:
    """A commit: path -> {"oid", "size"} and, of a large file, "lfs"."""

    def __init__(self, files: dict[str, dict], parent: str) -> None:
        self.files = files
        listing = json.dumps([parent, sorted((path, file["oid"]) for path, file in files.items())])
        self.oid = hashlib.sha1(listing.encode()).hexdigest()


class Refused(Exception):
    """An answer that is an error: status, message, and the Hub's code for it."""

    def __init__(self, status: int, message: str, code: str = "", **more: object) -> None:
        self.status, self.code = status, code
        self.answer = {"error": message, **more}


def blob(content: bytes) -> dict:
    return {"oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(), "size": len(content)}


def pointer(sha256: str, size: int) -> dict:
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    return {**blob(text), "size": size, "lfs": {"oid": sha256, "size": size, "pointerSize": len(text)}}


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_GET(self):
            self._answer()

        def do_POST(self):
            self._answer()

        def do_PUT(self):
            self._answer()

        def _answer(self):
            url = urlsplit(self.path)
            hub.requests.append(f"{self.command} {url.path}")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            try:
                status = hub.interfere(self.command, url.path)
                if status is not None:
                    # As some proxies do, it shows what it was asked.
                    raise Refused(status, f"refused: Authorization: {self.headers.get('Authorization')}")
                if not url.path.startswith("/storage/"):
                    self._authorize()
                answer, headers = route(hub, self.command, url.path, parse_qs(url.query), body)
                self._send(200, answer, headers)
            except Refused as refused:
                headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.answer["error"]}
                self._send(refused.status, refused.answer, headers)

        def _authorize(self):
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise Refused(401, "Invalid credentials in Authorization header")

        def _send(self, status: int, answer: object, headers: dict[str, str]):
            data = json.dumps(answer).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            with suppress(ConnectionError):  # a client that was killed
                self.end_headers()
                self.wfile.write(data)

    return Handler


def route(hub: Hub, method: str, path: str, query: dict, body: bytes) -> tuple[object, dict[str, str]]:
    """The answer to a request and its headers."""
    for pattern, action in _ROUTES.items():
        match = re.fullmatch(pattern, f"{method} {path}")
        if match:
            answer = action(hub, query=query, body=body, **match.groupdict())
            return answer if isinstance(answer, tuple) else (answer, {})
    raise Refused(404, f"no such endpoint: {method} {path}")


def _repository(hub: Hub, repo: str) -> list[Commit]:
    if repo not in hub.repositories:
        raise Refused(404, "Repository not found", "RepoNotFound")
    return hub.repositories[repo]


def whoami(hub: Hub, **_) -> object:
    return {"name": "tester", "type": "user", "auth": {"accessToken": {"displayName": "t", "role": hub.role}}}


def create(hub: Hub, body: bytes, **_) -> object:
    asked = json.loads(body)
    repo = f"{asked['organization']}/{asked['name']}"
    if repo in hub.repositories:
        raise Refused(409, "You already created this model repo", url=f"{hub.url}/{repo}")
    hub.repositories[repo] = [Commit({".gitattributes": blob(b"*.bin filter=lfs\n")}, "")]
    return {"url": f"{hub.url}/{repo}", "id": repo}


def info(hub: Hub, repo: str, **_) -> object:
    return {"id": repo, "sha": _repository(hub, repo)[-1].oid, "siblings": [], "tags": []}


def preupload(hub: Hub, repo: str, body: bytes, **_) -> object:
    head, files = _repository(hub, repo)[-1], []
    for file in json.loads(body)["files"]:
        large = b"\0" in base64.b64decode(file["sample"]) or file["size"] > 100_000
        known = head.files.get(file["path"])
        oid = known and known.get("lfs", known)["oid"]
        mode = "lfs" if large else "regular"
        ignored = file["path"] in hub.ignored
        files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": ignored, "oid": oid})
    return {"files": files}


def validate(hub: Hub, body: bytes, **_) -> object:
    """The real Hub knows more licences, and looks at more of a card's head."""
    head = re.match(r"---\n(.*?)\n---\n", json.loads(body)["content"], re.DOTALL)
    licence = yaml.safe_load(head[1]).get("license") if head else None
    if licence not in LICENCES:
        message = f'"license" must be one of [{", ".join(LICENCES)}]'
        raise Refused(400, "Invalid metadata", errors=[{"message": message}], warnings=[])
    return {"errors": [], "warnings": []}


def lfs_batch(hub: Hub, repo: str, body: bytes, **_) -> object:
    _repository(hub, repo)
    objects = []
    for wanted in json.loads(body)["objects"]:
        if wanted["oid"] not in hub.large:
            wanted["actions"] = {"upload": {"href": f"{hub.url}/storage/{wanted['oid']}"}}
        objects.append(wanted)
    return {"transfer": "basic", "objects": objects}


def store(hub: Hub, sha256: str, body: bytes, **_) -> object:
    if hashlib.sha256(body).hexdigest() != sha256:
        raise Refused(400, "the content has another digest")
    hub.large[sha256] = len(body)
    return {}


def xet_token(hub: Hub, repo: str, **_) -> object:
    _repository(hub, repo)
    url, end = f"local://{hub.storage}", int(time.time()) + 3600
    headers = {
        "X-Xet-Cas-Url": url,
        "X-Xet-Access-Token": "storage-only",
        "X-Xet-Token-Expiration": str(end),
    }
    return {"casUrl": url, "accessToken": "storage-only", "exp": end}, headers


def commit(hub: Hub, repo: str, body: bytes, **_) -> object:
    commits = _repository(hub, repo)
    files = dict(commits[-1].files)
    for line in map(json.loads, body.splitlines()):
        value = line["value"]
        if line["key"] == "header":
            if value.get("parentCommit") not in (None, commits[-1].oid):
                raise Refused(412, "A commit has happened since. Please refresh and try again.")
        elif line["key"] == "file":
            files[value["path"]] = blob(base64.b64decode(value["content"]))
        elif line["key"] == "lfsFile":
            if not hub.has_large(value["oid"]):
                raise Refused(400, f"the content of {value['path']} never arrived")
            files[value["path"]] = pointer(value["oid"], value["size"])
        else:
            raise Refused(400, f"unknown operation {line['key']}")
    commits.append(Commit(files, commits[-1].oid))
    return {
        "success": True,
        "commitOid": commits[-1].oid,
        "commitUrl": f"{hub.url}/{repo}/commit/{commits[-1].oid}",
    }


def tree(hub: Hub, repo: str, revision: str, query: dict, **_) -> object:
    at = next(entry for entry in _repository(hub, repo) if entry.oid == revision)
    entries = [{"type": "file", "path": path, **file} for path, file in sorted(at.files.items())]
    start = int(query.get("cursor", ["0"])[0])
    after = start + _PAGE
    following = f'<{hub.url}/api/models/{repo}/tree/{revision}?recursive=true&cursor={after}>; rel="next"'
    return entries[start:after], ({"Link": following} if after < len(entries) else {})


_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
_ROUTES: dict[str, Callable[..., object]] = {
    "GET /api/whoami-v2": whoami,
    "POST /api/repos/create": create,
    "POST /api/validate-yaml": validate,
    rf"GET /api/models/{_REPO}": info,
    rf"GET /api/models/{_REPO}/revision/main": info,
    rf"POST /api/models/{_REPO}/preupload/main": preupload,
    rf"GET /api/models/{_REPO}/xet-write-token/main": xet_token,
    rf"POST /api/models/{_REPO}/commit/main": commit,
    rf"GET /api/models/{_REPO}/tree/(?P<revision>[0-9a-f]{{40}})": tree,
    rf"POST /{_REPO}\.git/info/lfs/objects/batch": lfs_batch,
    r"PUT /storage/(?P<sha256>[0-9a-f]{64})": store,
}
