"""docker-compose.yml against the schema of compose files."""

import copy

import jsonschema
import pytest

from tests.support.compose import compose_file
from tests.support.compose_schema import compose_schema

pytestmark = pytest.mark.slow


def test_the_file_fits_the_schema():
    """Docker Compose's own schema takes the file."""
    jsonschema.validate(compose_file({}), compose_schema())


def test_the_schema_would_notice():
    """A misspelt key of a service is refused."""
    wrong = copy.deepcopy(compose_file({}))
    wrong["services"]["tuner"]["enviroment"] = {}
    with pytest.raises(jsonschema.ValidationError, match="enviroment"):
        jsonschema.validate(wrong, compose_schema())
