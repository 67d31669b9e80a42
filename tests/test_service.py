"""The HTTP service: right answers, and one sentence for everything else."""

import base64
import io
import json
import socket
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

import vat
from photos import disc, examples, photo
from service_fakes import (
    CORRESPONDENCE,
    SEGMENTATION,
    bomb,
    decode,
    example,
    live,
    make_service,
    png,
    query,
)
from vat.segmenter import Options
from vat.service.app import create_app


@pytest.fixture(scope="module")
def service():
    return make_service(supports=3, queries=4, points=5, upload_mib=4)


@pytest.fixture(scope="module")
def client(service):
    with TestClient(create_app(service, page=False)) as client:
        yield client


@pytest.fixture(scope="module")
def direct():
    """What the service should answer."""
    return vat.Segmenter(SEGMENTATION, "cpu").fit({"disc": examples(2)})


def refusal(answer, status):
    """The sentence of an answer that refuses."""
    assert answer.status_code == status, answer.text
    detail = answer.json()["detail"]
    assert detail.endswith(".")
    assert "\n" not in detail
    return detail


# -- answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"threshold": 0.6}, {"flip": True}, {"tiles": 2}, {"overlapping": True}])
def test_masks_are_those_of_the_segmenter(client, direct, options):
    files = [*example(0), *example(1), query(9), query(8)]
    answer = client.post("/v1/segment", files=files, data={"label": "disc", **options}).json()
    assert answer["classes"] == ["disc"]
    for seed, result in zip((9, 8), answer["results"], strict=True):
        expected = direct.predict(photo(seed), **options).masks["disc"]
        [found] = result["masks"]
        assert (decode(found["rle"]) == expected).all()
        assert found["area"] == expected.sum()
        assert (result["width"], result["height"]) == (90, 60)


def test_masks_as_pictures(client, direct):
    data = {"encoding": "png", "label": "disc"}
    answer = client.post("/v1/segment", files=[*example(0), *example(1), query()], data=data).json()
    [found] = answer["results"][0]["masks"]
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(found["png"]))))
    expected = direct.predict(photo(9)).mask
    assert (picture == expected).all()
    columns = np.flatnonzero(expected.any(0))
    assert found["box"][0] == columns[0]
    assert found["box"][2] == columns[-1] - columns[0] + 1


def test_a_zip_holds_the_files_that_save_writes(client, direct, tmp_path):
    files = [*example(0), *example(1), query(9, "a.png"), query(8, "a.jpg")]
    data = {"label": "disc", "formats": "png,overlay"}
    answer = client.post("/v1/segment", files=files, data=data, headers={"Accept": "application/zip"})
    assert answer.headers["content-type"] == "application/zip"
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert archive.namelist() == ["a.png", "a_overlay.jpg", "a-2.png", "a-2_overlay.jpg"]
        [label_map] = direct.predict(photo(8)).save(tmp_path, "a")
        assert archive.read("a-2.png") == label_map.read_bytes()


def test_several_classes_and_masks_as_run_lengths(client):
    code = {"size": [60, 90], "counts": [1000, 400, 4000]}
    files = [*example(0), ("support", ("b.png", png(photo(1)))), ("mask", ("b.json", json.dumps(code))), query()]
    answer = client.post("/v1/segment", files=files, data={"label": ["a", "b"]}).json()
    inside = np.repeat([False, True, False], [1000, 400, 4000]).reshape(90, 60).T
    expected = vat.Segmenter(SEGMENTATION, "cpu").fit({"a": examples(1), "b": [(photo(1), inside)]}).predict(photo(9))
    for found in answer["results"][0]["masks"]:
        assert (decode(found["rle"]) == expected.masks[found["label"]]).all()


def test_photos_without_the_thing_can_be_left_alone(client, direct):
    answer = client.post("/v1/segment", files=[*example(0), query()], data={"min_confidence": 1}).json()
    [found] = answer["results"][0]["masks"]
    assert found["area"] == 0
    expected = vat.Segmenter(SEGMENTATION, "cpu").fit(*zip(*examples(1), strict=True)).predict(photo(9))
    assert found["confidence"] == pytest.approx(expected.confidence["object"], abs=1e-4)
    refusal(client.post("/v1/segment", files=[*example(0), query()], data={"min_confidence": 2}), 422)


def test_a_stored_set_lives_until_it_is_deleted(client, direct):
    stored = client.post("/v1/supports", files=[*example(0), *example(1)], data={"label": "disc"})
    assert stored.status_code == 201
    address = f"/v1/supports/{stored.json()['id']}"
    assert client.get(address).json()["shots"] == {"disc": 2}
    data = {"support_set": stored.json()["id"]}
    answer = client.post("/v1/segment", files=[query()], data=data).json()
    assert (decode(answer["results"][0]["masks"][0]["rle"]) == direct.predict(photo(9)).mask).all()
    assert client.delete(address).status_code == 204
    assert "store it again" in refusal(client.get(address), 404)
    refusal(client.delete(address), 404)
    refusal(client.post("/v1/segment", files=[query()], data=data), 404)


def test_equal_examples_are_encoded_once():
    service = make_service()
    with TestClient(create_app(service, page=False)) as client:
        for seed in (7, 8):
            assert client.post("/v1/segment", files=[*example(0), query(seed)]).status_code == 200
        counters = client.get("/metrics").text
    assert "vat_examples_reused_total 1.0" in counters
    assert 'vat_compute_seconds_count{task="fit"} 1.0' in counters
    assert 'vat_requests_total{method="POST",path="/v1/segment",status="200"} 2.0' in counters


def test_points_are_those_of_the_matcher(client):
    files = {"source": ("a.png", png(photo(0))), "target": ("b.png", png(photo(1)))}
    points = [[10, 20], [40.5, 30]]
    answer = client.post("/v1/match", files=files, data={"points": json.dumps(points)}).json()
    expected = vat.Matcher(CORRESPONDENCE, "cpu").match(photo(0), photo(1), points)
    assert answer["points"] == expected.as_dict()["points"]
    assert len(client.post("/v1/match", files=files, data={"grid": 3}).json()["points"]) == 6
    saved = client.post("/v1/match", files=files, headers={"Accept": "application/zip"})
    assert zipfile.ZipFile(io.BytesIO(saved.content)).namelist() == ["match_picture.jpg", "match_warp.jpg"]


def test_the_page_and_the_service_share_one_engine(direct):
    service = make_service()
    [result] = service.segment({"disc": examples(2)}, [photo(9)], Options(threshold=0.4))
    assert (result.mask == direct.predict(photo(9), threshold=0.4).mask).all()
    stored = service.store({"disc": examples(2)})
    assert (service.segment(stored.id, [photo(9)])[0].mask == direct.predict(photo(9)).mask).all()
    service.close()


def test_the_service_says_what_it_is(client):
    assert [model["task"] for model in client.get("/v1/models").json()["models"]] == ["segmentation", "correspondence"]
    assert client.get("/healthz").json()["status"] == "ok"
    assert client.get("/").json()["schema_at"] == "/openapi.json"
    for path, operations in client.get("/openapi.json").json()["paths"].items():
        for operation in operations.values():
            for status, response in operation["responses"].items():
                if status != "204":
                    assert response["content"], (path, status)


# -- refusals ------------------------------------------------------------------------------------------------

BAD_MASK = ("mask", ("m.json", b'{"size": [60, 90], "counts": [1, 2]}'))
REFUSED = {
    "not an image": ([*example(), ("query", ("notes.txt", b"hello"))], {}, "'notes.txt'"),
    "cut short": ([*example(), ("query", ("cut.png", png(photo(9))[:800]))], {}, "'cut.png'"),
    "an example cut short": ([("support", ("cut.png", png(photo())[:800])), example()[1], query()], {}, "'cut.png'"),
    "1,600 megapixels": ([*example(), ("query", ("bomb.png", bomb()))], {}, "megapixels"),
    "a mask of 1,600 megapixels": ([example()[0], ("mask", ("bomb.png", bomb())), query()], {}, "megapixels"),
    "no mask": ([example()[0], query()], {}, "one mask for each"),
    "no example": ([query()], {}, "support"),
    "no query": (example(), {}, "query"),
    "a black mask": ([example()[0], ("mask", ("m.png", png(np.zeros((60, 90), np.uint8)))), query()], {}, "black"),
    "a mask of another shape": ([example()[0], ("mask", ("m.png", png(disc(0, 90, 60)))), query()], {}, "'0.png'"),
    "bad run lengths": ([example()[0], BAD_MASK, query()], {}, "run lengths"),
    "a huge mask as JSON": (
        [example()[0], ("mask", ("m.json", b'{"size": [99999, 99999], "counts": [1]}')), query()],
        {},
        "run-length",
    ),
    "no JSON": ([example()[0], ("mask", ("m.json", b"{")), query()], {}, "run-length"),
    "both ways": ([*example(), query()], {"support_set": "x"}, "either"),
    "too many examples": ([*(example() * 4), query()], {}, "at most 3"),
    "too many queries": ([*example(), *[query()] * 5], {}, "at most 4"),
    "labels": ([*example(), query()], {"label": ["a", "b"]}, "labels"),
    "an empty label": ([*example(), query()], {"label": " "}, "label"),
    "threshold": ([*example(), query()], {"threshold": "nan"}, "threshold"),
    "tiles": (
        [*example(), query()],
        {"tiles": "9"},
        "'auto'; or: Input should be less",
    ),
    "text for a file": (example(), {"query": "photo.jpg"}, "query=@FILE"),
    "a long label": ([*example(), query()], {"label": "x" * 101}, "at most 100"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_requests_get_one_sentence(client, case):
    files, data, word = REFUSED[case]
    assert word in refusal(client.post("/v1/segment", files=files, data=data), 422)


@pytest.mark.parametrize("points", ["[[1000, 1]]", "[[1]]", "hello", "[[NaN, 1]]", "[[1e999, 0]]", str([[1, 1]] * 6)])
def test_bad_points_get_one_sentence(client, points):
    files = {"source": ("a.png", png(photo(0))), "target": ("b.png", png(photo(1)))}
    assert "point" in refusal(client.post("/v1/match", files=files, data={"points": points}), 422)


def test_unknown_formats_and_addresses(client):
    files, accept = [*example(), query()], {"Accept": "application/zip"}
    assert "formats" in refusal(client.post("/v1/segment", files=files, data={"formats": "exe"}, headers=accept), 422)
    assert "openapi" in refusal(client.get("/v2/segment"), 404)


@pytest.mark.parametrize("page", [False, True])
def test_endpoints_asked_in_a_wrong_way_say_so(page):
    with TestClient(create_app(make_service(), page=page)) as client:
        for method, path, allowed in (
            ("GET", "/v1/segment", "POST"),
            ("OPTIONS", "/v1/segment", "POST"),
            ("PUT", "/v1/supports/x", "DELETE or GET"),
            ("POST", "/metrics", "GET"),
        ):
            answer = client.request(method, path)
            assert f"takes {allowed} alone" in refusal(answer, 405)
            assert answer.headers["allow"] == allowed.replace(" or ", ", ")
        assert "openapi" in refusal(client.get("/v1/nothing"), 404)
        assert client.head("/healthz").status_code == 200


def test_names_are_short_enough_for_files(client):
    files = [*example(0), *example(1), query(9, "\u732b" * 300 + ".png")]
    data = {"label": ["\u72ac" * 100, "\u72ac" * 99 + "."], "formats": "probability,coco"}
    answer = client.post("/v1/segment", files=files, data=data, headers={"Accept": "application/zip"})
    assert answer.status_code == 200, answer.text
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        *pictures, document = archive.namelist()
        assert len(set(pictures)) == 2  # the two classes differ only where their names are cut
        assert json.loads(archive.read(document))["images"][0]["file_name"].endswith("\u732b.png")


@pytest.mark.parametrize("name", ["../../etc/passwd.png", "C:\\temp\\passwd.png", "/passwd.png", "..\\../passwd.png"])
def test_names_of_files_lose_their_folders(client, name):
    files = [*example(), query(9, name)]
    assert client.post("/v1/segment", files=files).json()["results"][0]["name"] == "passwd.png"
    saved = client.post("/v1/segment", files=files, headers={"Accept": "application/zip"})
    assert zipfile.ZipFile(io.BytesIO(saved.content)).namelist() == ["passwd.png"]


def test_large_bodies_are_refused_before_they_are_read(client, monkeypatch):
    monkeypatch.setattr("vat.service.guard.LINGER_SECONDS", 0.2)
    assert "1 MiB" in refusal(client.post("/v1/segment", json=["x" * 30_000_000]), 413)
    assert "4 MiB" in refusal(client.post("/v1/segment", files=[("query", ("a", bytes(5 << 20)))]), 413)

    page = client.post("/gradio_api/upload", files=[("files", ("a", bytes(5 << 20)))])
    assert page.status_code == 404  # there is none, but a pile of photos is not too much for one
    assert "64 MiB" in refusal(client.post("/", files=[("files", ("a", bytes(65 << 20)))]), 413)

    def endless():
        yield b'--x\r\nContent-Disposition: form-data; name="query"; filename="a"\r\n\r\n'
        while True:
            yield bytes(1 << 16)

    with live(make_service(upload_mib=1)) as port:
        headers = {"content-type": "multipart/form-data; boundary=x"}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/segment", content=endless(), headers=headers, timeout=20)
        assert "1 MiB" in refusal(answer, 413)
        assert answer.headers["connection"] == "close"


def test_a_token_is_asked_for():
    service = make_service()
    with TestClient(create_app(service, token="sesame", page=False)) as client:
        assert client.get("/healthz").status_code == 200
        refusal(client.get("/v1/models"), 401)
        refusal(client.post("/v1/segment", files=[*example(), query()]), 401)
        refusal(client.get("/v1/models", headers={"Authorization": "Bearer wrong"}), 401)
        refusal(client.get("/v1/models", headers={"Authorization": "Basic %%%"}), 401)
        assert client.get("/").headers["www-authenticate"].startswith("Basic")
        assert client.get("/v1/models", headers={"Authorization": "Bearer sesame"}).status_code == 200
        assert client.get("/v1/models", auth=("anybody", "sesame")).status_code == 200


def test_a_full_queue_says_when_to_come_back():
    service = make_service(queue=1)
    with TestClient(create_app(service, page=False)) as client:
        with service.worker.slot():
            answer = client.post("/v1/segment", files=[*example(), query()])
            refusal(answer, 429)
            assert int(answer.headers["Retry-After"]) >= 1
            assert client.get("/healthz").json()["under_way"] == 1
        assert client.post("/v1/segment", files=[*example(), query()]).status_code == 200


def test_who_shuts_down_says_when_to_come_back():
    service = make_service()
    with TestClient(create_app(service, page=False)) as client:
        service.worker.refuse()
        answer = client.post("/v1/segment", files=[*example(), query()])
        assert "shutting down" in refusal(answer, 503)
        assert int(answer.headers["Retry-After"]) >= 1


def test_work_that_takes_too_long_is_given_up(monkeypatch):
    service = make_service(seconds=0.3)
    with TestClient(create_app(service, page=False)) as client:
        predict = vat.Segmenter.predict
        monkeypatch.setattr(vat.Segmenter, "predict", lambda *_, **__: time.sleep(0.6))
        assert "0.3 seconds" in refusal(client.post("/v1/segment", files=[*example(), query(), query()]), 503)
        monkeypatch.setattr(vat.Segmenter, "predict", predict)
        time.sleep(0.6)
        assert client.post("/v1/segment", files=[*example(), query()]).status_code == 200


def test_a_slow_upload_is_given_up(monkeypatch):
    monkeypatch.setattr("vat.service.guard.LINGER_SECONDS", 0.2)
    with live(make_service(upload_seconds=0.3)) as port, socket.create_connection(("127.0.0.1", port)) as slow:
        head = "POST /v1/segment HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        slow.sendall(f"{head}Content-Length: 100000\r\n\r\n--b\r\n".encode())
        slow.settimeout(10)
        assert slow.recv(1000).startswith(b"HTTP/1.1 408")


def test_many_clients_each_get_their_own_answer(direct):
    expected = {seed: direct.predict(photo(seed)).mask for seed in range(20, 28)}

    def ask(seed):
        files = [*example(0), *example(1), query(seed)]
        answer = client.post(f"http://127.0.0.1:{port}/v1/segment", files=files, data={"label": "disc"})
        return (decode(answer.json()["results"][0]["masks"][0]["rle"]) == expected[seed]).all()

    with live(make_service()) as port, httpx.Client(timeout=30) as client, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, [*expected] * 2))
