"""The API's own description, held to what the API does: requests made from it, right ones and broken ones."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
import pytest
import schemathesis
from fake_client import FakeClient
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from minisgl.server.config import ServerConfig
from minisgl.server.http import create_app

app = create_app(FakeClient(), ServerConfig(allowed_hosts=["*"]), admin=True)
schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers={"host": "127.0.0.1"})
schema.config.generation.update(modes=list(GenerationMode))


@schema.hook("map_body")
def ask_for_the_model(_: Any, body: Any) -> Any:
    """Nearly all made-up names are of models that do not exist."""
    return body | {"model": "fake"} if isinstance(body, dict) and isinstance(body.get("model"), str) else body


statuses: dict[str, set[int]] = defaultdict(set)


@schema.parametrize()
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_whatever_comes_the_answer_is_as_described(case: schemathesis.Case) -> None:
    """V07: no 5xx, no status, type or shape that the description lacks, and nothing accepted that it forbids."""
    answer = case.call()
    statuses[case.path].add(answer.status_code)
    case.validate_response(
        answer,
        checks=[
            not_a_server_error,
            status_code_conformance,
            content_type_conformance,
            response_schema_conformance,
            negative_data_rejection,
        ],
    )


def test_both_kinds_of_requests_were_made() -> None:
    """Those that were answered, and where there is something to get wrong, those that were refused."""
    rarely = ("/v1/models/{model}", "/v1/chat/completions")  # chance seldom names the model, or makes a conversation
    assert statuses and all(200 in seen for path, seen in statuses.items() if path not in rarely), statuses
    assert all(400 in statuses[path] for path in ("/v1/completions", "/v1/chat/completions", "/tokenize")), statuses


def test_the_description_is_complete() -> None:
    """Every route is in it, every reference leads somewhere, and errors are ours, not FastAPI's."""
    described: dict[str, Any] = app.openapi()
    paths = {route.path for route in app.routes if getattr(route, "include_in_schema", False)}
    assert set(described["paths"]) == {path.replace(":path", "") for path in paths} and len(paths) > 10
    text = msgspec.json.encode(described).decode()
    for part in text.split('"$ref":"#/components/schemas/')[1:]:
        assert part.partition('"')[0] in described["components"]["schemas"]
    assert "HTTPValidationError" not in str(described["paths"])
    assert "security" not in described


@pytest.mark.parametrize("keys", [{"api_key": "k"}, {"admin_key": "k"}])
def test_the_description_tells_of_the_key(keys: dict[str, str]) -> None:
    described = create_app(FakeClient(), ServerConfig(**keys)).openapi()
    assert described["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
