"""The queue before the models, and the memory of examples."""

import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest
from PIL import Image

from service_fakes import make_service
from vat.errors import VatError
from vat.service.limits import Closing, Limits, OutOfTime, QueueFull, UnknownSet
from vat.service.store import Store, digest
from vat.service.worker import Worker


@pytest.fixture
def worker():
    worker = Worker(Limits(queue=2, seconds=60))
    yield worker
    worker.close()


def blocked(worker):
    """Holds the worker until the returned event is set."""
    release, begun = threading.Event(), threading.Event()

    def job():
        begun.set()
        release.wait(10)
        yield

    future = worker.submit(job())
    assert begun.wait(10)
    return release, future


def turns(log, name, count):
    for i in range(count):
        log.append(name)
        if i < count - 1:
            yield
    return name


def test_jobs_take_turns(worker):
    log = []
    release, _ = blocked(worker)
    long, short = worker.submit(turns(log, "long", 4)), worker.submit(turns(log, "short", 1))
    release.set()
    assert (long.result(10), short.result(10)) == ("long", "short")
    assert log == ["long", "short", "long", "long", "long"]


def test_an_error_belongs_to_its_job(worker):
    def broken():
        yield
        raise VatError("No.")

    failed = worker.submit(broken())
    with pytest.raises(VatError, match="No"):
        failed.result(10)
    assert worker.submit(turns([], "next", 2)).result(10) == "next"


def test_a_cancelled_job_takes_no_more_turns(worker):
    log = []
    release, _ = blocked(worker)
    future = worker.submit(turns(log, "never", 3))
    assert future.cancel()
    release.set()
    with pytest.raises(CancelledError):
        future.result(10)
    worker.submit(turns([], "last", 1)).result(10)
    assert log == []


def test_time_runs_out_in_the_queue():
    worker = Worker(Limits(seconds=0.05))
    release, _ = blocked(worker)
    late = worker.submit(turns([], "late", 1))
    time.sleep(0.1)
    release.set()
    with pytest.raises(OutOfTime, match=r"0\.05 seconds"):
        late.result(10)
    worker.close()


def test_slots_are_counted_and_given_back(worker):
    with worker.slot(), worker.slot():
        assert worker.busy == 2
        with pytest.raises(QueueFull) as full, worker.slot():
            pass
        assert full.value.seconds >= 1
    assert worker.busy == 0


def test_closing_finishes_what_was_begun(worker):
    release, first = blocked(worker)
    second = worker.submit(turns([], "second", 3))
    closing = threading.Thread(target=worker.close)
    closing.start()
    while not worker._closing:
        time.sleep(0.001)
    with pytest.raises(Closing):
        worker.submit(turns([], "new", 1))
    with pytest.raises(Closing), worker.slot():
        pass
    release.set()
    closing.join(10)
    assert first.done()
    assert second.result(0) == "second"


# -- the store -----------------------------------------------------------------------------------------------


class Fitted:
    """As much of a segmenter as the store looks at."""

    def __init__(self, shots):
        self.shots = {"object": shots}


def test_the_least_recently_used_sets_make_room():
    store = Store(Limits(stored_examples=4))
    first, second = store.keep(Fitted(2)), store.keep(Fitted(2))
    store.get(first.id)
    third = store.keep(Fitted(1))
    assert len(store) == 2
    assert store.get(first.id).examples == 2
    assert store.get(third.id).examples == 1
    with pytest.raises(UnknownSet):
        store.get(second.id)
    large = store.keep(Fitted(9))  # more than there is room for is kept as long as it is the newest
    assert len(store) == 1
    assert store.get(large.id).examples == 9


def test_sets_that_are_not_used_are_forgotten():
    now = [1000.0]
    store = Store(Limits(stored_seconds=10), clock=lambda: now[0])
    used, idle = store.keep(Fitted(1)), store.keep(Fitted(1))
    now[0] += 8
    store.get(used.id)
    now[0] += 8
    assert store.find(used.id) is not None
    assert store.find(idle.id) is None


def test_ids_cannot_be_guessed_and_equal_examples_have_equal_digests(tmp_path):
    store = Store(Limits())
    assert len({store.keep(Fitted(1)).id for _ in range(5)}) == 5
    picture = Image.new("RGB", (4, 3), "red")
    mask = np.ones((3, 4), bool)
    same = {digest({"a": [(picture.copy(), mask.copy())]}) for _ in range(2)}
    path = tmp_path / "a.png"
    picture.save(path)
    before = digest({"a": [(str(path), mask)]})
    Image.new("RGB", (4, 3), "blue").save(path)
    different = [
        digest({"a": [(picture, ~mask)]}),
        digest({"b": [(picture, mask)]}),
        digest({"a": [(picture, mask)] * 2}),
        before,
        digest({"a": [(str(path), mask)]}),
    ]
    assert len(same) == 1
    assert len({*same, *different}) == 6


def test_limits_must_make_sense():
    with pytest.raises(VatError, match="queue"):
        Limits(queue=0)


def test_an_engine_without_examples_says_so():
    service = make_service()
    with pytest.raises(VatError, match="example"):
        service.segment({}, [Image.new("RGB", (8, 8))])
    with pytest.raises(UnknownSet):
        service.segment("nowhere", [Image.new("RGB", (8, 8))])
    service.close()
