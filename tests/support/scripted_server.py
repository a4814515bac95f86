"""An OpenAI-compatible server whose every answer is known beforehand."""

import asyncio
import re

from aiohttp import web

from services.text2sql.scripted.model import ScriptedModel
from tests.support.openai_server import FakeServer, begin, choice, send, usage

NUM_PIECES = 12
PAUSE_S = 0.08
CHARS_PER_PIECE = 100
CONTEXT_TOKENS = 32_768
_COUNT = re.compile(r"^Count from (\d+)$")


def count_prompt(number: int) -> str:
    """Return a prompt that `counted` answers."""
    return f"Count from {number}"


def counted(number: int) -> str:
    """Return the answer to `count_prompt`: no other prompt's begins, or goes on, like it."""
    return "".join(f"{number}.{index} " for index in range(NUM_PIECES))


class ScriptedServer(FakeServer):
    """Counts, and answers an agent's prompts as the scripted model does, a piece at a time.

    Args:
        model: Knows the questions.
    """

    def __init__(self, model: ScriptedModel) -> None:
        super().__init__(metrics=None, models=[{"id": "scripted", "max_model_len": CONTEXT_TOKENS}])
        self._model = model

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat."""
        body = await request.json()
        messages = body["messages"]
        found = _COUNT.match(messages[-1]["content"])
        text = counted(int(found[1])) if found else self._model.answer(messages)
        size = len(text) // NUM_PIECES if found else CHARS_PER_PIECE
        pieces = [text[at : at + size] for at in range(0, len(text), size)] if size else [text]
        self.active += 1
        try:
            response = await begin(request)
            for piece in pieces:
                await asyncio.sleep(PAUSE_S)
                await send(response, choice(is_chat=True, text=piece))
            await send(response, choice(is_chat=True, text="", finish_reason="stop"))
            await send(response, usage(len(str(messages)) // 4, len(pieces)))
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.active -= 1
        return response
