"""What the services and their libraries log has one form."""

import json
import subprocess
import sys

SCRIPT = """
import logging
import structlog
from shared.runtime import logs
logs.configure("INFO", "json")
structlog.get_logger("ours").info("life_begun", epoch=1)
logging.getLogger("aiokafka").error("Unable to connect to %s", "127.0.0.1:9092")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("aiokafka").exception("Unexpected")
"""


def test_lines_of_libraries_are_json_too():
    """With format json every line is one object, whoever wrote it, tracebacks included."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    ours, foreign, failed = [json.loads(line) for line in result.stderr.splitlines()]
    assert (ours["event"], ours["level"], ours["epoch"]) == ("life_begun", "info", 1)
    assert foreign["event"] == "Unable to connect to 127.0.0.1:9092"
    assert (foreign["level"], foreign["logger"]) == ("error", "aiokafka")
    assert foreign.keys() == {"event", "level", "logger", "timestamp"}
    assert "ZeroDivisionError" in failed["exception"]
