"""A stand-in of the hub's HTTP API on localhost: repositories are dictionaries of files in memory."""

import base64
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


class Hub(ThreadingHTTPServer):
    """`repos`: id → branch → file name → content. `log`: (method, path) of every request. `tokens`: those it saw."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.commits: list[dict] = []
        self.log: list[tuple[str, str]] = []
        self.tokens: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args):
        pass

    def answer(self, status: int, body: dict | bytes = b"", **headers: str) -> None:
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def note(self) -> bytes:
        self.server.log.append((self.command, self.path))
        self.server.tokens.add(self.headers.get("Authorization"))
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_POST(self):
        body = self.note()
        if self.path == "/api/repos/create":
            values = json.loads(body)
            name = "/".join(part for part in (values.get("organization") or "user", values["name"]) if part)
            self.server.private[name] = values.get("private") or values.get("visibility") == "private"
            self.server.repos.setdefault(name, {"main": {}})
            return self.answer(200, {"url": f"{self.server.url}/{name}", "id": name})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/branch/(\w+)", self.path):
            self.server.repos[found[1]][found[2]] = dict(self.server.repos[found[1]]["main"])
            return self.answer(200, {})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/([\w%]+)(?:\?create_pr=1)?", self.path):
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": files})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/([\w%]+)(?:\?create_pr=1)?", self.path):
            return self.commit(found[1], unquote(found[2]), body)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/discussions", self.path):
            self.server.repos[found[1]]["refs/pr/1"] = {}
            return self.answer(200, {"num": 1})
        if self.path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        return self.answer(404)

    def commit(self, repo: str, branch: str, body: bytes) -> None:
        lines = [json.loads(line) for line in body.splitlines()]
        for line in lines:
            if line["key"] == "file":
                value = line["value"]
                self.server.repos[repo][branch][value["path"]] = base64.b64decode(value["content"])
        self.server.commits.append(lines[0]["value"] | {"branch": branch})
        self.answer(200, {"commitUrl": f"{self.server.url}/{repo}/commit/1", "commitOid": "1", "pullRequestUrl": ""})

    def do_GET(self):
        self.note()
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/discussions/1\?diff=1", self.path):
            pull_request = {"num": 1, "isPullRequest": True, "changes": {"base": "main"}, "events": [], "title": ""}
            more = {"filesWithConflicts": [], "createdAt": "2026-01-01T00:00:00.000Z", "status": "draft"}
            return self.answer(200, pull_request | more | {"repo": {"name": found[1], "type": "model"}})
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/(\w+)/(.+)", self.path)
        content = found and self.server.repos.get(found[1], {}).get(found[2], {}).get(found[3])
        if content is None:
            return self.answer(404, X_Error_Code="EntryNotFound")
        return self.answer(200, content, ETag='"1"', X_Repo_Commit="1" * 40)

    do_HEAD = do_GET


@contextmanager
def serving():
    """A running hub."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
