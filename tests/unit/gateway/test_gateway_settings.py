"""The gateway's settings, and what follows from them."""

import pytest

from services.gateway.app import check_exposure, is_loopback, params_of, partition_of
from services.gateway.params import GatewayParams
from services.gateway.settings import GatewaySettings
from shared.errors import ConfigError


def test_settings_have_the_parameters_defaults():
    """A gateway process and one in the embedded mesh behave alike unless told otherwise."""
    settings = GatewaySettings(gateway_id="gateway", reply_partition=0)
    assert params_of(settings, 12) == GatewayParams()


def test_replicas_of_a_set_read_partitions_of_their_own():
    """`gateway-0` ... `gateway-11` share no reply partition; another name has one as well."""
    assert [partition_of(f"gateway-{n}", 12) for n in range(12)] == list(range(12))
    assert 0 <= partition_of("some-host.example", 12) < 12
    assert params_of(GatewaySettings(gateway_id="gw-3"), 12).reply_partition == 3


def test_the_network_is_not_served_without_keys(tmp_path):
    """Beyond loopback a keys file is needed, or the user's word."""
    with pytest.raises(ConfigError, match="KEYS_FILE"):
        check_exposure(GatewaySettings(host="0.0.0.0"))  # noqa: S104
    check_exposure(GatewaySettings(host="0.0.0.0", allow_anonymous=True))  # noqa: S104
    check_exposure(GatewaySettings(host="0.0.0.0", keys_file=tmp_path / "keys"))  # noqa: S104
    check_exposure(GatewaySettings())
    assert [is_loopback(host) for host in ("127.0.0.5", "::1", "localhost", "example.org")] == [
        True,
        True,
        True,
        False,
    ]
