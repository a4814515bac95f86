"""aiperf, a public load tool, against the gateway; runs where it is installed."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import gateway_mesh
from tests.support.servers import NOT_RUN

NUM_REQUESTS = 20
# Its tokenizer, so that it needs no network: one word, one token.
WORDS = {
    word: index for index, word in enumerate(["<unk>", "</s>", *(f"w{n}" for n in range(500))])
}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "<unk>"},
}
NAMES = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>"}


def report_in(folder: Path) -> Any:
    """Return the report that aiperf left."""
    (report,) = folder.glob("out/**/profile_export_aiperf.json")
    return json.loads(report.read_text())


@pytest.mark.slow
async def test_aiperf_works_unmodified(tmp_path: Path):
    """Streaming chat requests all succeed, and its report has their latencies."""
    aiperf = shutil.which("aiperf")
    if aiperf is None:
        pytest.skip(f"{NOT_RUN}aiperf is not installed: docs/gateway.md, Public load tools")
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text(json.dumps(NAMES))
    async with gateway_mesh() as mesh:
        command = (
            f"profile --model default --url {mesh.gateway_url} --endpoint-type chat --streaming "
            f"--request-count {NUM_REQUESTS} --concurrency 4 --tokenizer ./words "
            "--isl 50 --osl 20 --ui none --artifact-dir out"
        )
        process = await asyncio.create_subprocess_exec(
            aiperf,
            *command.split(),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
    assert process.returncode == 0, out.decode(errors="replace")[-2_000:]
    found = report_in(tmp_path)
    assert found["request_count"]["avg"] == NUM_REQUESTS
    assert found["time_to_first_token"]["avg"] > 0
