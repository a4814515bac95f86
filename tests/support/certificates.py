"""Certificates for tests, made by openssl: an authority, and what it signed, in date or expired."""

import subprocess
from pathlib import Path

from shared.adapters.local_process import LOOPBACK

EXPIRED = -1
"""Days of validity: the certificate ended yesterday."""


class Authority:
    """An authority of a test's own.

    Args:
        folder: Where its files go.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.certificate = folder / "authority.crt"
        self._key = folder / "authority.key"
        self._run(
            *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=authority", "-keyout", self._key, "-out", self.certificate),
        )

    def sign(self, name: str, *, days: int = 2) -> Path:
        """Make a certificate for loopback.

        Args:
            name: Of its holder, and of the files.
            days: Validity; `EXPIRED`: it is over.

        Returns:
            A PEM file with key and certificate; beside it are NAME.key and NAME.crt.
        """
        key, request, crt, both = (
            self._folder / f"{name}.{end}" for end in ("key", "csr", "crt", "pem")
        )
        extension = self._folder / f"{name}.ext"
        extension.write_text(f"subjectAltName=IP:{LOOPBACK}\n")
        self._run(
            *("req", "-new", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", key, "-out", request),
        )
        self._run(
            *("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key),
            *("-CAcreateserial", "-days", days, "-extfile", extension, "-out", crt),
        )
        both.write_text(key.read_text() + crt.read_text())
        return both

    @staticmethod
    def _run(*words: str | int | Path) -> None:
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
