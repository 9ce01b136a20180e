"""Who may ask: keys, the Host that was asked for, the page that asked, and how much may be sent.

Chapter 1 tells this module's story; `.github/SECURITY.md` has the threat model. One ASGI layer that every request
passes before anything reads it. What is not open is closed: a route that is added later needs the key without saying
so.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.server.errors import ApiError

# Probes have no keys, and learn nothing else; nor does a browser that is sent to the page, which holds no secret.
OPEN_PATHS = frozenset({"/health", "/ready", "/", "/page.css", "/page.js"})


class Door:
    """Lets a request in, or answers it with an `ApiError`.

    Args:
        app: what is behind it.
        keys: bearer tokens, one of which a request must bring; none: everybody may ask.
        restricted_paths: paths for which only ``restricted_keys`` count.
        allowed_hosts: names in the Host header beside IP literals and localhost; "*" for any. A page of another
            site that has its name point here (DNS rebinding) shows by that name; addresses cannot be made to point.
        allowed_origins: values of the Origin header; "*" for any. Requests of the same origin, and those without the
            header, which do not come from pages, always pass.
        max_body_bytes: longest body.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Collection[str] = (),
        restricted_paths: Collection[str] = (),
        restricted_keys: Collection[str] = (),
        allowed_hosts: Collection[str] = (),
        allowed_origins: Collection[str] = (),
        max_body_bytes: int,
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._restricted_paths = frozenset(restricted_paths)
        self._restricted_keys = [key.encode() for key in restricted_keys]
        self._hosts = frozenset(host.lower() for host in allowed_hosts)
        self._origins = frozenset(allowed_origins)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":  # web sockets are not spoken here
            try:
                self._check(scope)
                receive = await self._read_body(scope, receive)
            except ApiError as error:
                await send_error(error, send)
                return
            await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])  # of a header sent twice, the last
        self._check_host(headers.get(b"host", b"").decode("latin-1"))
        self._check_origin(headers.get(b"origin"), scope["scheme"], headers.get(b"host", b""))
        path = scope["path"]
        keys = self._restricted_keys if path in self._restricted_paths else self._keys
        if keys and path not in OPEN_PATHS:
            self._check_key(headers.get(b"authorization", b""), keys)

    def _check_host(self, host: str) -> None:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            name = ""
        if "*" not in self._hosts and name != "localhost" and name not in self._hosts and not _is_address(name):
            raise ApiError(
                403, f"host {host!r} is not served here; --allowed-hosts names further ones", code="host_not_allowed"
            )

    def _check_origin(self, origin: bytes | None, scheme: str, host: bytes) -> None:
        if origin is None or origin == f"{scheme}://".encode() + host:
            return
        name = origin.decode("latin-1")
        if "*" not in self._origins and name not in self._origins:
            raise ApiError(
                403,
                f"pages of {name!r} may not call; --allowed-origins names those that may",
                code="origin_not_allowed",
            )

    def _check_key(self, authorization: bytes, keys: Collection[bytes]) -> None:
        scheme, _, key = authorization.partition(b" ")
        # All are compared, each in constant time, so that the answer's delay tells nothing.
        matches = [hmac.compare_digest(key.strip(), each) for each in keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(
                401,
                "this server needs a valid key: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    async def _read_body(self, scope: Scope, receive: Receive) -> Receive:
        """The whole body, bounded, and then whatever else is received."""
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value[:20]) > self._max_body_bytes:
                raise self._too_long()
        parts: list[bytes] = []
        size, last = 0, None
        while True:
            message = await receive()
            if message["type"] != "http.request":
                last = message  # the client has left; who reads the body finds out
                break
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body_bytes:
                raise self._too_long()
            if not message.get("more_body", False):
                break
        first: list[Message] = [last or {"type": "http.request", "body": b"".join(parts), "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        return replay

    def _too_long(self) -> ApiError:
        # The rest of the body is not read, so that the connection cannot go on.
        return ApiError(
            413, f"the body is longer than {self._max_body_bytes} bytes", code="body_too_large",
            headers={"connection": "close"},
        )  # fmt: skip


async def send_error(error: ApiError, send: Send) -> None:
    """The error as a whole answer."""
    body = error.body
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    await send(
        {
            "type": "http.response.start",
            "status": error.status,
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
