"""`RemoteServer`: a running server as `minisgl chat --url` sees it. Chapter 1 shows it.

Nothing but the standard library, so that it can be read as an example of a client, and used where no engine is.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import MISSING, fields
from typing import Any
from urllib.parse import urlsplit

from minisgl.request import SamplingParams

_ANSWER_S = 600.0  # longest silence


class RemoteServer:
    """A server at ``url`` that speaks OpenAI's format.

    Args:
        url: like ``http://HOST:PORT``, with what comes before ``/v1`` in its paths, if anything does.
        api_key: its key, if it wants one.

    Raises:
        ValueError: the URL is none.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be like http://HOST:PORT, got {url!r}")
        self._url = url
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._address = (parts.hostname, parts.port)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams) -> Generator[str, None, None]:
        """The answer to a conversation, in pieces of text as they come. Closing the generator cancels the answer.

        Raises:
            ValueError: the server refuses, in its own words.
            RuntimeError: nobody answers, or the answer breaks off.
        """
        connection = self._kind(*self._address, timeout=_ANSWER_S)
        with closing(connection):
            try:
                body = {"messages": list(messages), "stream": True, **changes(params)}
                connection.request("POST", f"{self._path}/v1/chat/completions", json.dumps(body), self._headers)
                answer = connection.getresponse()
                if answer.status != 200:
                    raise ValueError(_problem(answer))
                yield from _texts(answer)
            except (OSError, http.client.HTTPException) as error:
                raise RuntimeError(f"{self._url}: {error or type(error).__name__}") from error


def changes(params: SamplingParams) -> dict[str, Any]:
    """What of ``params`` is not as by default, with the names that it has in a request's body too."""
    values = ((f.name, getattr(params, f.name), f.default) for f in fields(params) if f.default is not MISSING)
    return {name: list(v) if isinstance(v, tuple) else v for name, v, default in values if v != default}


def _texts(answer: http.client.HTTPResponse) -> Generator[str, None, None]:
    while line := answer.readline():
        if not line.startswith(b"data:"):  # an empty line, or a comment
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                yield text
    raise RuntimeError("the answer broke off")


def _problem(answer: http.client.HTTPResponse) -> str:
    body = answer.read()
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server answers with status {answer.status} {answer.reason}"
