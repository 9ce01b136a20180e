"""`ServerConfig`: what may be asked of a server beside its engine. The command line makes an option of each field.

Chapter 1 tells this module's story. Frozen, and checked when made, so that a wrong option ends the start in one line.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.utils import check_int, check_range

_INTEGERS = {
    "port": (0, 65535),
    "admin_port": (0, 65535),
    "max_waiting": (1, 2**31 - 1),
    "max_waiting_tokens": (1, 2**31 - 1),
    "max_body_bytes": (1024, 2**31 - 1),
    "max_connections": (1, 2**31 - 1),
}
_SECONDS = (
    "max_first_token_s",
    "request_timeout_s",
    "header_timeout_s",
    "reader_timeout_s",
    "drain_s",
    "step_deadline_s",
    "heartbeat_s",
    "echo_rate",
)
_SWITCHES = ("in_process", "echo", "restart", "log_prompts")
_TEXTS = ("host", "api_key", "admin_key", "served_model_name", "chat_template", "record_wire")
_LISTS = ("allowed_hosts", "allowed_origins")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the server does around its engine. A bad value raises ``ValueError`` with what is allowed.

    Args:
        host: address to listen at; others than loopback want an api_key.
        port: port of the API; 0 takes a free one.
        api_key: what clients must send as a bearer token; None: nothing, and host must be loopback; "none": nothing,
            wherever it listens.
        admin_key: the same for flushing, aborting and the live page; None: only from admin_port, or not at all.
        admin_port: port of a second listener, on loopback, for these; 0 takes a free one; None: there is none.
        served_model_name: the model's name in the API; None: as the engine was asked for it.
        chat_template: Jinja text, or a file that holds it, instead of the model's own template.
        in_process: run the engine in a thread of this process, as for a notebook.
        echo: no model at all: an engine that answers with its prompt.
        echo_rate: tokens a second of each echoed answer; 0: as fast as it goes.
        restart: start the engine again after it died, with growing pauses; otherwise the server ends.
        max_waiting: most requests that have been accepted and have no token yet; more are told to come back later.
        max_waiting_tokens: the same for the sum of their prompts' tokens.
        max_first_token_s: longest predicted time to the first token that is still accepted; None: any.
        max_body_bytes: longest body of a request.
        max_connections: most connections at once, for each listener; further ones are told to come back later.
        request_timeout_s: a request that takes longer is aborted; None: it may take as long as it likes.
        header_timeout_s: a client that takes longer to send its request is cut off.
        reader_timeout_s: a client that reads nothing for longer, while there is something to read, is cut off.
        drain_s: after SIGTERM, running requests have this long to end.
        step_deadline_s: an engine step that takes longer, at least 1, means that the device hangs: the engine ends.
        heartbeat_s: a loop that has not turned for this long is not ready.
        allowed_hosts: further values of the Host header, beside host and loopback.
        allowed_origins: values of the Origin header that pages may call from.
        log_prompts: write prompts and answers to the log too.
        record_wire: folder in which the processes write down what they say to each other, prompts included.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    admin_key: str | None = None
    admin_port: int | None = None
    served_model_name: str | None = None
    chat_template: str | None = None
    in_process: bool = False
    echo: bool = False
    echo_rate: float = 0.0
    restart: bool = False
    max_waiting: int = 1024
    max_waiting_tokens: int = 2**20
    max_first_token_s: float | None = None
    max_body_bytes: int = 2**23
    max_connections: int = 4096
    request_timeout_s: float | None = None
    header_timeout_s: float = 10.0
    reader_timeout_s: float = 60.0
    drain_s: float = 30.0
    step_deadline_s: float = 300.0
    heartbeat_s: float = 5.0
    allowed_hosts: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    log_prompts: bool = False
    record_wire: str | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _INTEGERS.items():
            if getattr(self, name) is not None or name != "admin_port":
                check_int(name, getattr(self, name), low=low, high=high)
        for name in _SECONDS:
            if getattr(self, name) is not None or name not in ("max_first_token_s", "request_timeout_s"):
                check_range(name, getattr(self, name), low=1 if name == "step_deadline_s" else 0)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in _TEXTS:
            value = getattr(self, name)
            if not (isinstance(value, str) and value) and not (value is None and name != "host"):
                raise ValueError(f"{name} must be a string, and not empty, got {value!r}")
        for name in _LISTS:
            values = getattr(self, name)
            if isinstance(values, str) or not all(isinstance(value, str) and value for value in values):
                raise ValueError(f"{name} must be a list of strings, got {values!r}")
            object.__setattr__(self, name, tuple(values))
        if self.restart and self.in_process:
            raise ValueError("restart needs an engine in a process of its own; leave in_process out")
        if self.record_wire is not None and self.in_process:
            raise ValueError("record_wire needs processes that talk to each other; leave in_process out")
        if self.api_key is None and not _is_loopback(self.host):
            raise ValueError(f'at host {self.host!r} others could ask: give an api_key, or "none" to let everybody')

    @property
    def needs_key(self) -> bool:
        """Whether clients must send a key."""
        return self.api_key not in (None, "none")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
