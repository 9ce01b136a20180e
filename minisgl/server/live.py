"""The page at ``/``: a chat, and the engine's batch, pages and radix tree while they change.

Chapter 1 shows it. Three files that ask nobody but this server for anything; what they show they fetch from the same
routes as any client, with the key that the reader types in. The files themselves hold no secret, so they are open.
"""

from __future__ import annotations

from importlib import resources

from fastapi import FastAPI, Response

_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
# No script, style or connection but this origin's own, and no frame around it: should model text ever be taken for
# markup, it still could not run or send anything.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Serve the page's files. `minisgl.server.security.OPEN_PATHS` names their paths."""
    folder = resources.files("minisgl.server") / "page"
    for path, (name, media_type) in _FILES.items():
        _add_file(app, path, (folder / name).read_bytes(), media_type)


def _add_file(app: FastAPI, path: str, body: bytes, media_type: str) -> None:
    @app.get(path, include_in_schema=False)
    async def file() -> Response:
        return Response(body, media_type=media_type, headers=_HEADERS)
