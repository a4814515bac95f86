"""What every chaos test needs."""

import pytest

from tests.support.servers import MissingServerError, cache_dir, do_without, prepare_kafka


@pytest.fixture(autouse=True)
def _own_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make sure that a Kafka can be started here: chaos needs one that it may stop."""
    monkeypatch.setenv("HEXFLOW_CACHE_DIR", str(cache_dir()))
    try:
        prepare_kafka(lambda _: None, {})
    except MissingServerError as missing:
        do_without(missing)
