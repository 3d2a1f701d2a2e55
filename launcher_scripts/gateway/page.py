"""The pages at `/` (what is served, by whom, and a box to ask it) and `/docs`."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

_FILE = Path(__file__).with_name("page.html")
_DOCS = Path(__file__).with_name("docs.html")
# A page is one file: nothing comes from elsewhere, and nothing is sent elsewhere.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


async def show_page(_: Request) -> Response:
    """GET /"""
    return HTMLResponse(_FILE.read_bytes(), headers=_HEADERS)


async def show_docs(_: Request) -> Response:
    """GET /docs: the page that shows /openapi.json."""
    return HTMLResponse(_DOCS.read_bytes(), headers=_HEADERS)
