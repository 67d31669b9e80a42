"""A service over tiny untrained networks, and files to send to it."""

import io
import struct
import threading
import zlib
from contextlib import contextmanager

import numpy as np
from PIL import Image

from photos import disc, photo
from small import small
from vat.service.app import create_app
from vat.service.core import Service
from vat.service.limits import Limits
from vat.service.server import Server, listen

SEGMENTATION = small(backbone="test_resnet").eval()
CORRESPONDENCE = small(task="correspondence", backbone="test_resnet").eval()


def make_service(**limits):
    return Service(SEGMENTATION, "cpu", Limits(**limits), matcher=CORRESPONDENCE)


def png(picture):
    """An image or array as a file."""
    stream = io.BytesIO()
    (picture if isinstance(picture, Image.Image) else Image.fromarray(picture)).save(stream, "PNG")
    return stream.getvalue()


def example(seed=0):
    """Form entries of a support and its mask."""
    return [("support", (f"{seed}.png", png(photo(seed)))), ("mask", (f"{seed}_mask.png", png(disc(seed))))]


def query(seed=9, name="photo.png"):
    return ("query", (name, png(photo(seed))))


def bomb(side=40_000):
    """A PNG of a few bytes that says it is huge."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(b"\0" * 1000)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def decode(rle):
    from vat.predict.masks import from_rle

    return np.asarray(from_rle(rle))


@contextmanager
def live(service, **options):
    """The service on a socket, in a thread; gives its port."""
    listener = listen("127.0.0.1", 0)
    server = Server(create_app(service, page=False, **options), service)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
