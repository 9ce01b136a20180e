"""`ApiError`: a refusal or failure in the one shape that OpenAI's clients understand.

Chapter 1 tells this module's story. Whatever goes wrong in the front, on the way to the engine or in it, a client sees
``{"error": {"message", "type", "param", "code"}}`` and a status that says whether to try again.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from minisgl.server.client import EngineDied, RequestRefused


class ErrorDetail(msgspec.Struct):
    """What went wrong.

    Args:
        message: for a person.
        type: the family of the error.
        param: the field of the request that is at fault, if one is.
        code: for a program.
    """

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """The body of every answer that is not a success, and the data of an event that ends a stream early."""

    error: ErrorDetail


_TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error on its way to a client.

    Args:
        status: of the answer, 400..599.
        message: for a person.
        param, code: see `ErrorDetail`.
        headers: further ones of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        """The JSON of an `ErrorBody`. What has no UTF-8 form in it (half of a surrogate pair) becomes "?"."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        texts = [
            None if text is None else text.encode("utf-8", "replace").decode()
            for text in (str(self), self.param, self.code)
        ]
        return msgspec.json.encode(ErrorBody(ErrorDetail(texts[0] or "", kind, texts[1], texts[2])))


def as_api_error(error: BaseException) -> ApiError | None:
    """The `ApiError` that tells a client of ``error``; None if it is a bug of ours, whose text is not for clients."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRefused):
        return ApiError(400, str(error))
    if isinstance(error, EngineDied):
        return ApiError(503, f"the engine is gone: {error}", code="engine_died", headers={"retry-after": "5"})
    return None
