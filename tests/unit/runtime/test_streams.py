"""Standard streams: there whatever started the process."""

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys
from shared.runtime.lifecycle import loop_factory
from shared.runtime.streams import open_standard_streams
open_standard_streams()
async def use_sockets():
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.close()
    server.close()
print("told", flush=True)
print("warned", file=sys.stderr, flush=True)
with asyncio.Runner(loop_factory=loop_factory()) as runner:
    runner.run(use_sockets())
"""


@pytest.mark.parametrize(
    ("closed", "out", "err"),
    [
        ("0<&-", "told\n", "warned\n"),
        ("1>&-", "", "warned\n"),
        ("2>&-", "told\n", ""),
        ("0<&- 1>&- 2>&-", "", ""),
    ],
)
def test_a_closed_stream_is_replaced_by_the_null_device(closed: str, out: str, err: str):
    """No socket takes its number, and what is printed to the others arrives."""
    ended = subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, PROGRAM],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, out, err)
