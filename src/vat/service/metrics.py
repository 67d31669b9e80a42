"""What `/metrics` tells Prometheus. Each service has a registry of its own."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counters of the computing and of the requests before it. Labels take few values, whatever clients send."""

    def __init__(self, busy: Callable[[], int], stored: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "vat_requests", "Requests answered.", ["method", "path", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "vat_request_seconds",
            "From a request to its answer.",
            ["path"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.photos = Counter("vat_photos", "Photos segmented, or pairs matched.", ["task"], registry=self.registry)
        self.turns = Histogram(
            "vat_compute_seconds",
            "Time computing for one photo, pair or set of examples.",
            ["task"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.reused = Counter("vat_examples_reused", "Sets of examples known already.", registry=self.registry)
        self.upload = Counter("vat_upload_bytes", "Bytes of request bodies.", registry=self.registry)
        Gauge("vat_requests_under_way", "Requests that upload, wait or compute.", registry=self.registry).set_function(
            busy
        )
        Gauge("vat_support_sets", "Sets of examples kept under an id.", registry=self.registry).set_function(stored)

    def text(self) -> bytes:
        """In the format of Prometheus."""
        return generate_latest(self.registry)
