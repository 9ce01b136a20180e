"""Stop strings: which of several strings does a growing text reach first, and how much of it might be the start of one?

Chapter 1 tells the story. `StopStrings` is built from a request's stop strings and does not change; the state, a plain
number, belongs to the `Detokenizer` that walks it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """An automaton that reads a text once, a character at a time (Aho and Corasick, CACM 18(6), 1975).

    A *state* stands for the longest end of the text so far that begins one of the strings; 0 is the empty end. So
    ``depth[state]`` is the number of characters that must be held back, and ``match[state]`` the string that the text
    ends with, the longest one if there are several, else None. A step costs constant time on average, however many
    strings there are and however long they are.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._fallback = [0]  # the state of the next shorter end of the text that begins a string
        self.depth = [0]
        self.match: list[str | None] = [None]
        for string in strings:
            assert string, "an empty stop string is everywhere; SamplingParams refuses it"
            self.match[self._insert(string)] = string
        # Breadth first: a state's fallback is shorter than the state, so it is complete before it is needed.
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            if self.match[state] is None:
                self.match[state] = self.match[self._fallback[state]]
            for char, child in self._children[state].items():
                self._fallback[child] = self.step(self._fallback[state], char)
                queue.append(child)

    def _insert(self, string: str) -> int:
        state = 0
        for char in string:
            if char not in self._children[state]:
                self._children[state][char] = len(self._children)
                self._children.append({})
                self._fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = self._children[state][char]
        return state

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while state and char not in self._children[state]:
            state = self._fallback[state]
        return self._children[state].get(char, 0)

    def pass_over(self, state: int) -> int:
        """The state from which to go on when the match at ``state`` is ignored: an end that can still grow."""
        while state and not self._children[state]:
            state = self._fallback[state]
        return state
