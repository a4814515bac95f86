"""A LangChain chat model against the gateway, as a user would set it up."""

import asyncio
import json
import shutil

from langchain_openai import ChatOpenAI

from tests.support.gateway import gateway_mesh, quick_fleet
from tests.support.servers import MissingServerError, do_without


async def test_a_langchain_chat_model_works_unmodified():
    """Invoke, stream and batch give text and token counts; tools reach the engine."""
    async with gateway_mesh(quick_fleet()) as mesh:
        model = ChatOpenAI(
            model="default", base_url=f"{mesh.gateway_url}/v1", api_key="none", max_tokens=12
        )
        answer = await model.ainvoke("how many orders were late?")
        assert answer.content
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["output_tokens"] == len(str(answer.content).split())
        parts = [part.content async for part in model.astream("and in May?")]
        assert "".join(map(str, parts))
        assert len(await model.abatch(["one", "two", "three"])) == 3
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        assert (await model.bind_tools([tool]).ainvoke("call f")).content
        deadline = ChatOpenAI(
            model="default",
            base_url=f"{mesh.gateway_url}/v1",
            api_key="none",
            extra_body={"hexflow": {"query_id": "q", "slo_s": 60}},
        )
        assert (await deadline.ainvoke("in time?")).content


async def test_curl_works():
    """Plain curl, with a body and nothing else, gets an answer; with -N a stream."""
    curl = shutil.which("curl")
    if curl is None:
        do_without(MissingServerError("curl is missing: apt-get install curl"))
    body = '{"model": "default", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3'
    async with gateway_mesh(quick_fleet(1)) as mesh:
        for end in ("}", ', "stream": true}'):
            process = await asyncio.create_subprocess_exec(
                curl,
                "-sN",
                f"{mesh.gateway_url}/v1/chat/completions",
                "-d",
                body + end,
                stdout=asyncio.subprocess.PIPE,
            )
            out, _ = await process.communicate()
            if end == "}":
                assert json.loads(out)["choices"][0]["message"]["content"]
            else:
                assert out.endswith(b"data: [DONE]\n\n")
