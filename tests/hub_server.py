"""A small Hugging Face hub on loopback: the endpoints that `snapshot_download` needs, and its kinds of refusal."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """Serves folders as models, or as datasets (`datasets/owner/name`); `requests` records every path asked for."""

    def __init__(self, models: dict[str, Path]) -> None:
        self.models, self.gated, self.requests = models, set[str](), list[str]()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, to: BaseHTTPRequestHandler, body: bool) -> None:
        """Reply to one request."""
        path = unquote(urlsplit(to.path).path)
        self.requests.append(path)
        api = re.fullmatch(r"/api/(?:models/)?((?:datasets/)?[^/]+/[^/]+)/(revision|tree)/([^/]+)/?", path)
        file = re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = api or file
        model = found[1] if found else ""
        revision = (api[3] if api else file[2] if file else "") if found else ""
        if model not in self.models:
            # What the hub says to a visitor without a token, who must not learn which private models exist.
            return self.send(to, 401, {"X-Error-Code": "RepoNotFound"}, b"{}", body)
        if revision not in ("main", COMMIT):
            return self.send(to, 404, {"X-Error-Code": "RevisionNotFound"}, b"{}", body)
        folder = self.models[model]
        if api:
            files = [
                {"type": "file", "path": name, "rfilename": name, "size": p.stat().st_size, "oid": self.etag(p)}
                for p in sorted(folder.rglob("*"))
                if p.is_file() and (name := p.relative_to(folder).as_posix())
            ]
            info = {
                "id": model.removeprefix("datasets/"),
                "sha": COMMIT,
                "siblings": files,
                "private": False,
                "gated": model in self.gated,
            }
            return self.send(to, 200, {}, json.dumps(files if api[2] == "tree" else info).encode(), body)
        if model in self.gated:  # the list of files is public, their contents are not
            return self.send(to, 401, {"X-Error-Code": "GatedRepo"}, b"{}", body)
        assert file is not None
        wanted = folder / file[3]
        if not wanted.is_file():
            return self.send(to, 404, {"X-Error-Code": "EntryNotFound"}, b"{}", body)
        headers = {"ETag": f'"{self.etag(wanted)}"', "X-Repo-Commit": COMMIT}
        return self.send(to, 200, headers, wanted.read_bytes(), body)

    @staticmethod
    def etag(path: Path) -> str:
        return hashlib.sha1(path.read_bytes()).hexdigest()

    @staticmethod
    def send(to: BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes, body: bool) -> None:
        to.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            to.send_header(name, value)
        to.end_headers()
        if body:
            to.wfile.write(content)
