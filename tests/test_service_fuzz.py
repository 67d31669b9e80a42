"""Requests made up from the service's own description: whatever they are, the answer is as described, never a 5xx."""

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from service_fakes import example, live, make_service, query
from vat.service.app import create_app

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
SERVICE = make_service()
DESCRIBED = schemathesis.openapi.from_dict(create_app(SERVICE, page=False).app.openapi())


@pytest.fixture(scope="module")
def address():
    with live(SERVICE) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def client(address):
    with httpx.Client(base_url=address, timeout=30) as client:
        yield client


@DESCRIBED.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_no_request_is_a_surprise(case, address):
    case.call_and_validate(base_url=address, checks=CHECKS)


PHOTOS = {
    "/v1/segment": [*example(), query()],
    "/v1/supports": example(),
    "/v1/match": [("source", query()[1]), ("target", query()[1])],
}


@pytest.mark.slow
@DESCRIBED.include(path=list(PHOTOS), method="POST").parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_no_option_is_a_surprise_where_the_photos_are_real(case, client):
    files = PHOTOS[case.path]
    made_up = case.body if isinstance(case.body, dict) else {}
    fields = {name: str(value) for name, value in made_up.items() if name not in dict(files)}
    answer = client.post(case.path, files=files, data=fields)
    assert answer.status_code in (200, 201, 400, 404, 422), answer.text
    assert answer.status_code < 300 or answer.json()["detail"].endswith(".")
