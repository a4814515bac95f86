"""What an OpenAI-compatible server streams, put together. Pure.

`EventLines` cuts bytes into the data of server-sent events, `Answer` adds them up to a call's
result. Whatever is no valid event is a `GenerationFailed`; nothing is guessed.
"""

import json
import math
from typing import Any

from shared.adapters.whole_text import TextPieces, whole_text
from shared.contracts.messages import MAX_TOKENS, Usage
from shared.errors import GenerationFailed
from shared.ports import Finished

DONE = "[DONE]"
_QUOTED = 120
_SAID = 480
"""As much as an outcome's detail carries; an error's point is often at its end."""
_WHOLE_NUMBERS = range(-(2**63), 2**64)
"""What MessagePack carries."""
_LONGEST_WHOLE_NUMBER = 20
_TOO_LONG = "the server's answer is longer than any answer may be"


def _number(text: str) -> int | float | None:
    """Return a whole number; one that is too large to be carried as nearly as can be, or not."""
    if len(text) <= _LONGEST_WHOLE_NUMBER and (whole := int(text)) in _WHOLE_NUMBERS:
        return whole
    number = float(text)
    return number if math.isfinite(number) else None


_JSON = json.JSONDecoder(parse_int=_number)


class EventLines:
    """Cuts a stream of bytes into events; comments (pings) and other fields are skipped.

    Lines end with CR, LF or both, and an empty one ends an event, whose `data:` lines belong
    together. Some servers forget the empty line: where what came before is whole by itself, the
    next `data:` line begins a new event.

    Args:
        max_line_bytes: Longest line, and longest event, bytes.
        max_total_bytes: Longest stream, bytes.
    """

    def __init__(self, max_line_bytes: int, max_total_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._left_bytes = max_total_bytes
        self._rest = b""
        self._is_after_cr = False
        self._event: list[str] = []
        self._event_size = 0

    def feed(self, data: bytes) -> list[str]:
        """Return the data of every event that is complete.

        Raises:
            GenerationFailed: A line, an event or the stream is longer than allowed, or no text.
        """
        self._left_bytes -= len(data)
        if self._is_after_cr and data.startswith(b"\n"):
            data = data[1:]  # the second half of a line's end that was cut in two
            self._is_after_cr = False
        if data:
            self._is_after_cr = data.endswith(b"\r")
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._left_bytes < 0 or len(self._rest) > self._max_line_bytes:
            raise GenerationFailed(_TOO_LONG)
        return [text for line in lines for text in self._take(line)]

    def rest(self) -> list[str]:
        """Return the data of a last event that nothing ended.

        Raises:
            GenerationFailed: It is longer than allowed, or no text.
        """
        events = [*self._take(self._rest), *self._end_event()]
        self._rest = b""
        return events

    def _take(self, line: bytes) -> list[str]:
        """Take a line; returns the events that it ends."""
        if not line:
            return self._end_event()
        data = _event_data(line)
        if not data:
            return []
        # Only a first line is looked at: to parse again with each further one would take for ever.
        is_first_whole = len(self._event) == 1 and _is_whole(self._event[0])
        before = self._end_event() if is_first_whole else []
        self._event.append(data)
        self._event_size += len(line)
        if self._event_size > self._max_line_bytes:
            raise GenerationFailed(_TOO_LONG)
        # Nothing follows this one, perhaps not even an empty line.
        return before + (self._end_event() if self._event == [DONE] else [])

    def _end_event(self) -> list[str]:
        events = ["\n".join(self._event)] if self._event else []
        self._event, self._event_size = [], 0
        return events


def _event_data(line: bytes) -> str:
    for prefix in (b"data:", b"error:"):  # llama.cpp has told errors under a name of its own
        if line.startswith(prefix):
            try:
                return line[len(prefix) :].strip().decode()
            except UnicodeDecodeError as exc:
                raise GenerationFailed("the server's answer is no text") from exc
    return ""


def _is_whole(line: str) -> bool:
    """Return whether an event's line is a JSON value, so that no further one belongs to it."""
    try:
        _JSON.decode(line)
    except (ValueError, RecursionError):
        return False
    return True


class Answer:
    """Adds up the events of one call.

    Args:
        is_chat: Whether it came from the chat endpoint.
    """

    def __init__(self, *, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._texts = TextPieces()
        self._message: dict[str, Any] = {"role": "assistant"}
        self._tool_calls: dict[int, dict[str, Any]] = {}
        self._finish_reason = ""
        self._usage: Usage | None = None
        self.num_pieces = 0
        """Events that brought something generated; about one a token."""

    @property
    def is_complete(self) -> bool:
        """Whether the server said why it stopped."""
        return bool(self._finish_reason)

    @property
    def has_usage(self) -> bool:
        """Whether the server told its token counts."""
        return self._usage is not None

    def take(self, data: str) -> tuple[bool, str]:
        """Add one event.

        Returns:
            Whether it brought anything generated, and the text among that.

        Raises:
            GenerationFailed: The event is an error, or nonsense.
        """
        event = parse_event(data)
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._usage = _usage(usage) or self._usage
        choices = event.get("choices")
        if not isinstance(choices, list):
            if usage is None:
                raise GenerationFailed(f"the server sent no completion: {data[:_QUOTED]!r}")
            return False, ""
        for choice in choices:
            if isinstance(choice, dict) and choice.get("index", 0) == 0:
                return self._take_choice(choice)
        return False, ""

    def finished(self) -> Finished:
        """Return the whole result.

        Raises:
            GenerationFailed: The stream ended before the server said why it stopped.
        """
        if not self.is_complete:
            raise GenerationFailed("the server's answer was cut off")
        text = self._texts.whole()
        return Finished(
            text=text,
            usage=self._usage or Usage(),
            finish_reason=self._finish_reason,
            message=self._whole_message(text) if self._is_chat else None,
        )

    def _take_choice(self, choice: dict[str, Any]) -> tuple[bool, str]:
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self._finish_reason = whole_text(reason)
        delta = choice.get("delta") or choice.get("message") if self._is_chat else choice
        if not isinstance(delta, dict):
            return False, ""
        text = delta.get("content") if self._is_chat else delta.get("text")
        brings_more = self._is_chat and self._take_fields(delta)
        if isinstance(text, str) and text:
            self.num_pieces += 1
            return True, self._texts.add(text)
        self.num_pieces += brings_more
        return brings_more, ""

    def _take_fields(self, delta: dict[str, Any]) -> bool:
        """Add up what a chat message has beside its content; returns whether there was any."""
        brings_any = False
        for key, value in delta.items():
            if key in ("role", "content") or not value:
                continue
            brings_any = True
            if key == "tool_calls" and isinstance(value, list):
                for position, part in enumerate(value):
                    self._take_tool_call(part, position)
            elif isinstance(value, str) and isinstance(self._message.get(key), str):
                self._message[key] += value
            else:
                self._message[key] = value
        return brings_any

    def _take_tool_call(self, part: object, position: int) -> None:
        if not isinstance(part, dict):
            raise GenerationFailed("the server sent a tool call that is none")
        index = part.get("index", position)
        whole = self._tool_calls.setdefault(index if isinstance(index, int) else position, {})
        _merge(whole, {key: value for key, value in part.items() if key != "index"})

    def _whole_message(self, text: str) -> dict[str, object]:
        message = {**self._message, "content": text or None}
        if self._tool_calls:
            message["tool_calls"] = [self._tool_calls[key] for key in sorted(self._tool_calls)]
        return message


def parse_event(data: str) -> dict[str, Any]:
    """Return an event's JSON object.

    Raises:
        GenerationFailed: It is no JSON object, or the server's word that it failed.
    """
    try:
        event = _JSON.decode(data)
    except (ValueError, RecursionError) as exc:
        raise GenerationFailed(f"the server sent garbage: {data[:_QUOTED]!r}") from exc
    if not isinstance(event, dict):
        raise GenerationFailed(f"the server sent garbage: {data[:_QUOTED]!r}")
    error = event.get("error")
    if error:
        raise GenerationFailed(f"the server failed: {error_text(error)}")
    return event


def error_text(error: object) -> str:
    """Return what an error object says, short enough to quote."""
    if isinstance(error, dict):
        error = error.get("message") or error.get("type") or error
    return whole_text(str(error)[:_SAID])


def _merge(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a piece of a tool call: its arguments come in pieces of text, all else whole."""
    for key, value in part.items():
        before = whole.get(key)
        if isinstance(value, dict):
            _merge(whole.setdefault(key, {}) if isinstance(before, dict | None) else whole, value)
        elif key == "arguments" and isinstance(before, str) and isinstance(value, str):
            whole[key] = before + value
        elif value is not None:
            whole[key] = value


def _usage(usage: dict[str, Any]) -> Usage | None:
    """Return the token counts; None where they are none: nothing is guessed."""
    details = usage.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else 0
    input_tokens = _count(usage.get("prompt_tokens"))
    output_tokens = _count(usage.get("completion_tokens", 0))
    if input_tokens is None or output_tokens is None:
        return None
    return Usage(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=min(input_tokens, cached or 0),
    )


def _count(value: object) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value <= MAX_TOKENS else None
