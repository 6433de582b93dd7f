# SPDX-License-Identifier: Apache-2.0
"""Two routes about the routes: GET / is a page that links them, and GET /openapi.json describes them for tools.

Both are made from the table of routes: the text about a route is the docstring of its handler. They contain nothing
about the model, so they need no key.
"""

import html
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from quire_server.openai.http.message import HttpRequest, Reply, Response
from quire_server.version import VERSION

Routes = Mapping[str, Mapping[str, Callable[[HttpRequest], Awaitable[Reply]]]]
"""The handler of each method of each path. A path that ends with a slash has an argument after it."""

_ROUTE_PREFIX = re.compile(r"^(?:(?:GET|POST|DELETE) )?/\S*(?: and /\S+)?[:.]? *")
"""The route at the start of a docstring."""
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Quire</title>
<h1>Quire {version}</h1>
<ul>
{items}
</ul>
"""


class RouteIndex:
    """The routes."""

    def __init__(self, routes: Routes, bodies: Mapping[str, type[msgspec.Struct]]) -> None:
        """`bodies` has the type of the request of some paths."""
        self._page = _page(routes)
        self._document = msgspec.json.encode(_document(routes, bodies))

    async def page(self, request: HttpRequest) -> Reply:
        """GET /: return a page that links the other routes."""
        headers = [(b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")]
        return Response(self._page, content_type=b"text/html; charset=utf-8", headers=headers)

    async def document(self, request: HttpRequest) -> Reply:
        """GET /openapi.json: return the OpenAPI document of this port."""
        return Response(self._document)


def _page(routes: Routes) -> bytes:
    items = []
    for path, methods in routes.items():
        link = f'<a href="{path}">{path}</a>' if "GET" in methods and not path.endswith("/") else path
        handler = next(iter(methods.values()))
        items.append(f"<li>{', '.join(methods)} {link} {html.escape(_summary(handler))}")
    return _PAGE.format(version=VERSION, items="\n".join(items)).encode()


def _document(routes: Routes, bodies: Mapping[str, type[msgspec.Struct]]) -> dict[str, Any]:
    schemas, components = msgspec.json.schema_components(bodies.values(), ref_template="#/components/schemas/{name}")
    schema_by_path = dict(zip(bodies, schemas, strict=True))
    paths = {
        _template(path): {
            method.lower(): _operation(path, method, handler, schema_by_path) for method, handler in methods.items()
        }
        for path, methods in routes.items()
    }
    info = {"title": "Quire", "version": VERSION, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}}
    security: dict[str, Any] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components, **security}}


def _operation(path: str, method: str, handler: Any, schema_by_path: Mapping[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": _summary(handler), "responses": {"200": {"description": "OK"}}}
    if path.endswith("/"):
        name = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [name]
    if method == "POST":
        schema = schema_by_path.get(path, {"type": "object"})
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _template(path: str) -> str:
    return f"{path}{{id}}" if path.endswith("/") and path != "/" else path


def _summary(handler: Any) -> str:
    """Return the first sentence of the docstring of a handler, without the route."""
    text = " ".join((inspect.getdoc(handler) or "").split("\n\n")[0].split())
    sentence = _ROUTE_PREFIX.sub("", text).partition(". ")[0].rstrip(".")
    return sentence[:1].upper() + sentence[1:]
