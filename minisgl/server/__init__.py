"""Text in, text out: tokenizer, chat template, detokenizer, and later the HTTP API.

Chapter 1 tells this room's story. No torch here.
"""

from minisgl.server.assembly import Changes, OutputAssembler
from minisgl.server.chat import check_messages, check_tools
from minisgl.server.detokenizer import Detokenizer
from minisgl.server.stop_strings import StopStrings
from minisgl.server.token_bytes import TokenBytes
from minisgl.server.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Changes",
    "Detokenizer",
    "OutputAssembler",
    "StopStrings",
    "TokenBytes",
    "Tokenizer",
    "check_messages",
    "check_tools",
    "load_tokenizer",
]
