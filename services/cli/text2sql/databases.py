"""Databases as the command line names them: a sample, a file, or an address."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from services.text2sql.samples.writing import SAMPLES, sample_file
from services.text2sql.sql.database import check_reachable
from services.text2sql.sql.drivers import Limits, open_driver
from shared.adapters.local_kafka import default_cache_dir
from shared.domain.near_names import did_you_mean
from shared.errors import ConfigError


def database_named(text: str) -> tuple[str, str]:
    """Return name and address of a database: a sample's name, a SQLite file, or an address.

    The name is that of the file, or of the database on its server, where it is a word.
    A sample is generated into the cache folder when it is not there yet.

    Raises:
        ConfigError: It is no address of a database that is supported, or there is no such file.
    """
    if text in SAMPLES:
        return text, sample_file(text, default_cache_dir(os.environ) / "samples")
    if is_plain_name(text):
        samples = ", ".join(sorted(SAMPLES))
        raise ConfigError(
            f"there is no sample database {text!r}{did_you_mean(text, SAMPLES)} (there are: "
            f"{samples}); others are given as sqlite:///FILE or postgresql://USER@HOST:PORT/NAME"
        )
    path = Path(text)
    is_file = "://" not in text and path.suffix in (".db", ".sqlite", ".sqlite3")
    url = f"sqlite:///{path}" if is_file else text
    open_driver(url, Limits()).engine.dispose()  # tells what is wrong before anything is started
    name = path.stem if is_file else Path(urlsplit(url).path).stem
    return name if is_file or _is_word(name) else "database", url


def is_plain_name(text: str) -> bool:
    """Return whether a text is neither a sample, nor a file, nor an address."""
    return text not in SAMPLES and _is_word(text)


def _is_word(text: str) -> bool:
    return text.replace("-", "").replace("_", "").isalnum()


def databases_named(texts: Sequence[str]) -> dict[str, str]:
    """Return databases by name: each text is what `database_named` takes, or NAME=ADDRESS.

    Raises:
        ConfigError: One of them cannot be used, or two have the same name.
    """
    found: dict[str, str] = {}
    for text in texts:
        given, is_named, address = text.partition("=")
        if is_named and is_plain_name(given):
            name, url = given, database_named(address)[1]
        else:
            name, url = database_named(text)
        if name in found:
            raise ConfigError(f"two databases are called {name!r}: give them names, NAME=URL")
        found[name] = url
    return found


def check_databases(databases: Mapping[str, str]) -> None:
    """Connect to each of some databases, name -> address, once.

    Raises:
        ConfigError: One cannot be reached or read, or has nothing in it.
    """
    for name, url in databases.items():
        check_reachable(name, url)
