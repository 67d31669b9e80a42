"""`vat serve` as a process: what the documentation shows works, and it ends without losing a request."""

import asyncio
import re
import shutil
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from starlette.responses import StreamingResponse

import vat
from command import VAT, mask, models, photo, run  # noqa: F401  fixtures
from service_fakes import make_service
from vat.service.app import create_app
from vat.service.server import Server, is_loopback, listen

DOCS = Path(__file__).parent.parent / "docs" / "service.md"


def block(language):
    return re.search(rf"```{language}\n(.*?)```", DOCS.read_text(), re.DOTALL)[1]


@pytest.fixture
def process(models):  # noqa: F811
    files = ["--model", models["segmentation"], "--match-model", models["correspondence"]]
    command = [VAT, "serve", "--port", "0", "--no-page", "--device", "cpu", *files]
    with subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True) as process:
        process.url = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())[0]
        yield process
        process.kill()


def test_the_documented_clients_work_and_the_end_is_orderly(process, models, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    names = ["cat1.jpg", "photo.jpg", "another.jpg"]
    for seed, name in enumerate(names):
        photo(tmp_path / name, seed)
    mask(tmp_path / "cat1.png")
    direct = vat.Segmenter(models["segmentation"], "cpu").fit({"cat": [("cat1.jpg", "cat1.png")]})

    if shutil.which("curl"):
        line = block("sh").replace("http://127.0.0.1:7860", process.url)
        answer = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout
        assert f'"area":{direct.predict("photo.jpg").mask.sum()}' in answer

    source = block("python")
    assert len([line for line in source.splitlines() if line]) <= 40
    names_of: dict = {}
    exec(source, names_of)
    client = names_of["Client"](process.url)
    cats = client.learn([("cat1.jpg", "cat1.png", "cat")])
    found = client.segment(cats, names[1:], threshold=0.4)
    for name, result in zip(names[1:], found, strict=True):
        assert (result["cat"] == direct.predict(name, threshold=0.4).mask).all()
    expected = vat.Matcher(models["correspondence"], "cpu").match("cat1.jpg", "photo.jpg", [(10, 20)])
    assert np.allclose(client.match("cat1.jpg", "photo.jpg", [(10, 20)])[0]["target"], expected.matched[0], atol=0.01)
    with pytest.raises(RuntimeError, match="store it again"):
        client.segment("nowhere", names)

    with ThreadPoolExecutor() as pool:
        under_way = pool.submit(client.segment, cats, names * 10)
        while httpx.get(f"{process.url}/healthz").json()["under_way"] == 0:
            assert not under_way.done(), "the request was over too soon to test anything"
        process.send_signal(signal.SIGTERM)
        assert len(under_way.result(60)) == 30
    assert process.wait(20) in (0, -signal.SIGTERM)
    assert "Traceback" not in process.stderr.read()


def test_who_listens_to_others_is_warned(run, models, monkeypatch):  # noqa: F811
    listened = []
    monkeypatch.setattr("vat.service.server.serve", lambda app, service, host, *_: listened.append(host))
    options = ["--no-page", "--match-model", "none", "--model", models["segmentation"], "--device", "cpu"]
    run("serve", *options)
    assert run.err == ""
    run("serve", *options, "--host", "0.0.0.0")
    assert "--token" in run.err
    run("serve", *options, "--host", "0.0.0.0", "--token", "sesame")
    assert run.err == ""
    assert listened == ["127.0.0.1", "0.0.0.0", "0.0.0.0"]
    assert "empty" in run("serve", *options, "--token", " ", code=2)
    assert "header" in run("serve", *options, "--token", "s\u00e9same", code=2)


@pytest.mark.parametrize(("host", "alone"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("::", False)])
def test_loopback_is_this_computer_alone(host, alone):
    assert is_loopback(host) is alone


def test_a_port_in_use_is_one_sentence(run, models):  # noqa: F811
    options = ["--no-page", "--match-model", "none", "--model", models["segmentation"], "--device", "cpu"]
    assert "cannot be listened at" in run("serve", *options, "--host", "192.0.2.1", code=2)
    assert "cannot be listened at" in run("serve", *options, "--host", "no.such.host.invalid", code=2)


def test_the_end_does_not_wait_for_streams_that_have_none(capfd):
    service, listener = make_service(), listen("127.0.0.1", 0)

    async def beats():
        while True:
            yield b"beat"
            await asyncio.sleep(0.05)

    async def app(scope, receive, send):
        assert scope["type"] == "http"
        await StreamingResponse(beats())(scope, receive, send)

    server = Server(app, service)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    with httpx.stream("GET", f"http://127.0.0.1:{listener.getsockname()[1]}/") as stream:
        assert next(stream.iter_bytes()) == b"beat"
        server.should_exit = True
        thread.join(5)
        assert not thread.is_alive()
    service.close()
    assert "Traceback" not in capfd.readouterr().err


def test_every_endpoint_is_in_the_documentation():
    schema = create_app(make_service(), page=False).app.openapi()
    listed = set(re.findall(r"`(GET|POST|DELETE) (/\S+)`", DOCS.read_text()))
    found = {(method.upper(), path) for path, methods in schema["paths"].items() for method in methods}
    assert listed == found - {("GET", "/")}
