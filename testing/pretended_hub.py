"""A Hub on the loopback that takes repositories, as huggingface_hub uploads them without Xet, and keeps what was sent."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

WRITES, READS = "hf_writes", "hf_reads"  # tokens; any other is unknown
LARGE = (".safetensors", ".gguf")


@dataclass
class PretendedHub:
    """repositories: name -> path -> content; private: names of those created so; blobs: large files by their SHA-256"""

    address: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    blobs: dict[str, bytes] = field(default_factory=dict)

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, Any, dict[str, str]]:
        """Return status, body (JSON or bytes) and headers."""
        if method == "PUT":
            self.blobs[path.rpartition("/")[2]] = body
            return 200, {}, {}
        if token not in (WRITES, READS):
            return 401, {}, {"X-Error-Message": "Invalid credentials in Authorization header"}
        if path == "/api/whoami-v2":
            return 200, {"name": "me", "type": "user"}, {}
        if method == "GET" and path.startswith("/api/models/"):
            name = path.removeprefix("/api/models/").partition("/tree/main")[0]
            if name not in self.repositories:
                return 404, {}, {"X-Error-Code": "RepoNotFound"}
            if not path.endswith(name):
                sizes = {file: len(content) for file, content in self.repositories[name].items()}
                files = [{"type": "file", "path": file, "size": size, "oid": "0"} for file, size in sizes.items()]
                return 200, files, {}
            return 200, {"id": name, "private": name in self.private}, {}
        if method in ("GET", "HEAD"):
            name, _, file = path.strip("/").partition("/resolve/main/")
            if name not in self.repositories:
                return 404, {}, {"X-Error-Code": "RepoNotFound"}
            if file not in self.repositories[name]:
                return 404, {}, {"X-Error-Code": "EntryNotFound"}
            content = self.repositories[name][file]
            digest = hashlib.sha1(content).hexdigest()
            return 200, content, {"ETag": f'"{digest}"', "X-Repo-Commit": digest}
        if token == READS:
            return 403, {"error": "this token may not write"}, {}
        return 200, self._written(path, body), {}

    def _written(self, path: str, body: bytes) -> Any:
        if path == "/api/validate-yaml":  # of the model card
            return {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            self.repositories.setdefault(name, {})
            if asked.get("private") or asked.get("visibility") == "private":
                self.private.add(name)
            return {"url": f"{self.address}/{name}"}
        if path.endswith("/preupload/main"):
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = {True: "lfs", False: "regular"}
            return {
                "files": [
                    {"path": file, "uploadMode": modes[file.endswith(LARGE)], "shouldIgnore": False} for file in files
                ]
            }
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for each in objects:
                each["actions"] = {"upload": {"href": f"{self.address}/lfs/{each['oid']}"}}
            return {"transfer": "basic", "objects": objects}
        name = path.removeprefix("/api/models/").removesuffix("/commit/main")
        for entry in map(json.loads, body.splitlines()):
            value = entry["value"]
            if entry["key"] == "file":
                self.repositories[name][value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "deletedFile":
                del self.repositories[name][value["path"]]
            elif entry["key"] == "lfsFile":
                self.repositories[name][value["path"]] = self.blobs[value["oid"]]
        return {"commitUrl": f"{self.address}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40}


@contextmanager
def pretended_hub() -> Iterator[PretendedHub]:
    """Serve an empty Hub until the block ends."""
    hub = PretendedHub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            status, answer, headers = hub.answer(
                self.command, self.path.partition("?")[0], token, self.rfile.read(length)
            )
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_HEAD = do_POST = do_PUT = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield hub
        server.shutdown()
