"""The dashboard's files, the API's description, and whether anybody is there.

They hold no data, so anybody may read them; the data needs a key.
"""

from functools import cache
from importlib import metadata
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from services.gateway.openapi import openapi_document

FOLDER = Path(__file__).parent / "static"


def files() -> StaticFiles:
    """Return what serves the files."""
    return StaticFiles(directory=FOLDER, html=True)


async def home(_: Request) -> Response:
    """Answer `GET /`: go to the dashboard."""
    return RedirectResponse("/dashboard/")


async def health(_: Request) -> Response:
    """Answer `GET /health`, which load tools and balancers ask: whoever answers serves."""
    return Response(b"", media_type="text/plain")


async def description(_: Request) -> Response:
    """Answer `GET /openapi.json`."""
    return Response(_document(), media_type="application/json")


@cache
def _document() -> bytes:
    try:
        version = metadata.version("hexflow")
    except metadata.PackageNotFoundError:
        version = "0"
    return msgspec.json.encode(openapi_document(version))
