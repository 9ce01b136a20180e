"""The running example of the whole book: a short question, a long document, two that share a system prompt."""

from __future__ import annotations

_STORY = (
    "Once upon a time there was a small fox named Ruby. Ruby lived near the old mill, where the stream turns twice "
    "before it reaches the sea. She was a careful fox, and she loved her red kite more than anything. Every day she "
    "took it up the hill, and every night she brought it home and hung it on a nail behind the door.\n"
    "One windy day the string broke. The kite went over the mill, over the stream and over the tall trees, and it was "
    "gone. Ruby looked in the reeds, but all she found was a boot. She looked under the bridge, but all she found was "
    "dust. She looked behind the mill, and there was nothing at all. Ruby felt sad and sat down near the gate.\n"
    'Just then Otto the owl came by. "Why are you sad?" asked Otto. "I lost my kite," said Ruby. "I will help you '
    'look," said Otto. He flew up, high above the trees, and turned his head the way that only owls can. Then he saw '
    'something red at the top of the tallest tree. "I see it!" he said, and he brought it down.\n'
    'Ruby was so glad that she jumped three times. "Thank you, Otto!" she said. She made a longer string, and from '
    "that day on the two went up the hill together. Ruby held the string, and Otto flew beside the kite. When it was "
    "too windy they stayed at home, ate bread and honey, and told each other stories until the stars came out."
)
_SYSTEM = (
    "You are a helpful assistant. You are a tiny model that knows this engine. Answer briefly. One sentence is enough, "
    "and two are the most. If you do not know the answer, say that you do not know it."
)


def _ask(question: str, *, system: str | None = None, story: bool = False) -> list[dict[str, str]]:
    before = [{"role": "system", "content": system}] if system else []
    if story:
        before += [{"role": "user", "content": "Tell me a story."}, {"role": "assistant", "content": _STORY}]
    return [*before, {"role": "user", "content": question}]


REQUESTS: dict[str, list[dict[str, str]]] = {
    "short question": _ask("What is 7 + 5?"),
    "long document": _ask("Who was Otto?", story=True),
    "shared prompt, one": _ask("What is a page?", system=_SYSTEM),
    "shared prompt, two": _ask("What is decode?", system=_SYSTEM),
}
"""Conversations for ``LLM.chat``, by the name under which the figures show them, in order of arrival."""
