"""Public load tools against the gateway, aiperf and guidellm; each runs where it is installed."""

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import gateway_mesh
from tests.support.servers import NOT_RUN

NUM_REQUESTS = 20
# Their tokenizer, so that they need no network: one byte, one token.
ALPHABET = sorted(chr(point) for point in (*range(33, 127), *range(161, 173), *range(174, 324)))
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": BYTES,
    "decoder": BYTES,
    "model": {
        "type": "BPE",
        "vocab": {letter: index for index, letter in enumerate(ALPHABET)},
        "merges": [],
    },
}
NAMES = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ALPHABET[0]}


def report_in(folder: Path) -> Any:
    """Return the report that aiperf left."""
    (report,) = folder.glob("out/**/profile_export_aiperf.json")
    return json.loads(report.read_text())


def installed(name: str) -> str:
    """Return a load tool's program; without it the test is listed as not run."""
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{NOT_RUN}{name} is not installed: docs/gateway.md, Public load tools")
    return program


async def run_tool(program: str, words: str, folder: Path) -> None:
    """Run a load tool to its end beside a folder with its tokenizer; it must succeed."""
    bytes_ = folder / "bytes"
    bytes_.mkdir()
    (bytes_ / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (bytes_ / "tokenizer_config.json").write_text(json.dumps(NAMES))
    process = await asyncio.create_subprocess_exec(
        program,
        *words.split(),
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode(errors="replace")[-2_000:]


@pytest.mark.slow
async def test_aiperf_works_unmodified(tmp_path: Path):
    """Streaming chat requests all succeed, and its report has their latencies."""
    aiperf = installed("aiperf")
    async with gateway_mesh() as mesh:
        command = (
            f"profile --model default --url {mesh.gateway_url} --endpoint-type chat --streaming "
            f"--request-count {NUM_REQUESTS} --concurrency 4 --tokenizer ./bytes "
            "--isl 50 --osl 20 --ui none --artifact-dir out"
        )
        await run_tool(aiperf, command, tmp_path)
    found = report_in(tmp_path)
    assert found["request_count"]["avg"] == NUM_REQUESTS
    assert found["time_to_first_token"]["avg"] > 0


@pytest.mark.slow
async def test_guidellm_works_unmodified(tmp_path: Path):
    """Streaming chat requests all succeed, and it reads their token counts."""
    guidellm = installed("guidellm")
    async with gateway_mesh() as mesh:
        command = (
            f"run --backend kind=openai_http,target={mesh.gateway_url},model=default "
            "--profile kind=constant,rate=5 "
            f"--constraint kind=max_requests,count={NUM_REQUESTS} "
            "--data kind=synthetic_text,prompt_tokens=200,output_tokens=20 "
            "--tokenizer kind=hf_auto,model=./bytes --output kind=json,path=out.json "
            "--disable-progress"
        )
        await run_tool(guidellm, command, tmp_path)
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == NUM_REQUESTS
    assert not requests["errored"]
    assert all(0 < one["output_metrics"]["text_tokens"] <= 20 for one in requests["successful"])
