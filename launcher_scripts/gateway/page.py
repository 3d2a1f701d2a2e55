"""The gateway's pages, and its OpenAPI document.

The gateway's interface as an OpenAPI document, and a page that shows it.

https://spec.openapis.org/oas/v3.1.0: schemas are JSON schemas, as pydantic makes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from launcher_scripts.gateway.messages import ConversationBody, MessagesBody
from launcher_scripts.gateway.responses_schemas import ResponsesBody
from launcher_scripts.gateway.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingsBody,
    LoadLoRABody,
    StrictBody,
    TokenizeBody,
    TokenizeChatBody,
    UnloadLoRABody,
    WeightsBody,
)

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


_SCHEMAS = "#/components/schemas/"
# Path -> the classes of which its request is one.
_BODIES: dict[str, tuple[type[StrictBody], ...]] = {
    "/v1/completions": (CompletionBody,),
    "/v1/completions/render": (CompletionBody,),
    "/v1/chat/completions": (ChatBody,),
    "/v1/chat/completions/render": (ChatBody,),
    "/v1/responses": (ResponsesBody,),
    "/v1/messages": (MessagesBody,),
    "/v1/messages/count_tokens": (ConversationBody,),
    "/v1/embeddings": (EmbeddingsBody,),
    "/tokenize": (TokenizeBody, TokenizeChatBody),
    "/detokenize": (DetokenizeBody,),
    "/admin/weights": (WeightsBody,),
    "/v1/load_lora_adapter": (LoadLoRABody,),
    "/v1/unload_lora_adapter": (UnloadLoRABody,),
}


def openapi(routes: Iterable[Route], version: str) -> dict[str, Any]:
    """Return the document."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        operation: dict[str, Any] = {
            "summary": (inspect.getdoc(route.endpoint) or "").split("\n")[0],
            "responses": {
                "200": {"description": "the response"},
                "4XX": {"description": "an error in the form of OpenAI and Anthropic"},
            },
        }
        if names := route.param_convertors:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in names
            ]
        if kinds := _BODIES.get(route.path, ()):
            references = [{"$ref": _add(schemas, kind)} for kind in kinds]
            schema = references[0] if len(references) == 1 else {"anyOf": references}
            content = {"application/json": {"schema": schema}}
            operation["requestBody"] = {"required": True, "content": content}
        methods = sorted((route.methods or set()) - {"HEAD"})
        paths.setdefault(path, {}).update({method.lower(): operation for method in methods})
    return {
        "openapi": "3.1.0",
        "info": {"title": "gateway", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _add(schemas: dict[str, Any], kind: type[StrictBody]) -> str:
    """Add a body's schema and those it refers to; return its reference."""
    schema = kind.model_json_schema(ref_template=_SCHEMAS + "{model}")
    for name, definition in schema.pop("$defs", {}).items():
        # Two modules may have a class of one name.
        if schemas.setdefault(name, definition) != definition:
            raise ValueError(f"two schemas are called {name}")
    schemas[kind.__name__] = schema
    return _SCHEMAS + kind.__name__
