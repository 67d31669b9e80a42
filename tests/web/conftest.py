"""A server with the page, and a browser before it. Needs chromium and playwright: `make test-web`."""

import os
import shutil
import socket
import threading
import time
from pathlib import Path
from urllib.parse import urlparse

import pytest

SHOTS = Path(os.environ.get("VAT_WEB_SHOTS", "out/web"))
PHONE = {"device_scale_factor": 2, "has_touch": True, "is_mobile": True}
SCREENS = {
    "desktop": {"viewport": {"width": 1280, "height": 900}},
    "phone": {
        "viewport": {"width": 390, "height": 844},
        "device_scale_factor": 2,
        "has_touch": True,
        "is_mobile": True,
    },
}


@pytest.fixture(scope="session")
def service():
    """The built-in models; untrained ones of the same kind where they are not installed."""
    import torch

    import vat
    from vat import builtin
    from vat.service.core import Service

    torch.manual_seed(0)
    try:
        models = [builtin.path(name) and name for name in ("vat-mini", "vat-mini-match")]
    except vat.VatError:
        models = [vat.create_model(f"vat_lite4_slim.{tag}").eval() for tag in ("mini", "mini_match")]
    service = Service(models[0], "cpu", matcher=models[1])
    yield service
    service.close()


@pytest.fixture(scope="session")
def address(service):
    import uvicorn

    from vat.service.app import create_app

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(create_app(service), port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=SCREENS)
def screen(request):
    return request.param


@pytest.fixture
def page(browser, address, screen):
    """The page, opened. Fails the test when a request leaves the machine or a script goes wrong."""
    context = browser.new_context(**SCREENS[screen], accept_downloads=True)
    page = context.new_page()
    page.set_default_timeout(60_000)
    hosts, problems = set(), []
    page.on("request", lambda request: hosts.add(urlparse(request.url).hostname))
    page.on("websocket", lambda socket: hosts.add(urlparse(socket.url).hostname))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: message.type == "error" and problems.append(message.text))
    page.goto(address)
    page.wait_for_selector("#easel .stage")
    page.wait_for_function("sessionStorage.getItem('vat-visit')")  # or a test that reloads at once would cut that off
    yield page
    context.close()
    assert hosts - {None} == {"127.0.0.1"}  # None: pictures inside the page itself
    assert problems == []


@pytest.fixture
def shoot(page, screen):
    """Save a picture of what is seen."""

    def save(name):
        SHOTS.mkdir(parents=True, exist_ok=True)
        page.wait_for_timeout(400)  # let transitions end
        page.screenshot(path=SHOTS / f"{screen}_{name}.png", full_page=screen == "desktop")

    return save
