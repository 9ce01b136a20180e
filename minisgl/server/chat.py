"""Conversations: what messages and tools may look like before a chat template sees them.

Chapter 1 tells this module's story. Templates are written by many hands and trust their input; here it earns that
trust.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Copies of ``messages``, each with a known role and its content as one string; text parts are joined as they are.

    Only an assistant's message with ``tool_calls`` may lack content, which then is "". Other keys stay as they are.
    Raises ``ValueError`` naming the message and what is wrong with it.
    """
    if not isinstance(messages, (list, tuple)):
        raise ValueError(f"messages must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise ValueError("messages must hold at least one message")
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _check_message(name: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} must be an object with role and content, got {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{name}.role must be one of {', '.join(ROLES)}, got {role!r}")
    content = message.get("content")
    if content is None:
        if role != "assistant" or not message.get("tool_calls"):
            raise ValueError(f"{name}.content is missing")
        content = ""
    return {**message, "content": _text_of(f"{name}.content", content)}


def _text_of(name: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise ValueError(f"{name} must be a string or a list of text parts, got {type(content).__name__}")
    texts: list[str] = []
    for i, part in enumerate(content):
        if not isinstance(part, Mapping):
            raise ValueError(f"{name}[{i}] must be a text part, got {type(part).__name__}")
        if part.get("type") != "text":
            raise ValueError(f"{name}[{i}].type must be 'text' (this model reads text only), got {part.get('type')!r}")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{name}[{i}].text must be a string, got {type(part.get('text')).__name__}")
        texts.append(part["text"])
    return "".join(texts)


def check_tools(tools: object) -> list[dict[str, Any]] | None:
    """Copies of the tools' JSON descriptions, None for none. Raises ``ValueError`` if one is not an object."""
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError("tools must be a list of objects that describe functions")
    return [dict(tool) for tool in tools] or None
