"""The dashboard's files. They hold no data, so anybody may read them; the data needs a key."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).parent / "static"


def files() -> StaticFiles:
    """Return what serves the files."""
    return StaticFiles(directory=FOLDER, html=True)


async def home(_: Request) -> Response:
    """Answer `GET /`: go to the dashboard."""
    return RedirectResponse("/dashboard/")
