"""Brings docs/guide.md up to date: runs its commands again and puts in what they print and the pictures they make.

    python docs/make_guide.py             # all of it, in a temporary folder; about six minutes on a CPU
    python docs/make_guide.py --check     # change nothing; fail if a command of the guide fails

Every ```console block is run in order, in one folder with photos drawn by `vat.data.synthetic`; what follows a line
that begins with `$ ` is replaced by the command's output. A picture is made anew where the line before it names the
files it shows, side by side: <!-- from masks/1_overlay.jpg masks/2_overlay.jpg -->.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from vat.data.synthetic import class_recipe, compose
from vat.images import read_image

DOCS = Path(__file__).resolve().parent
GUIDE = DOCS / "guide.md"
CLASSES = {"butterfly": 3, "fish": 6}
SIDE = 480
LONGEST = 34
"""Lines of output that the guide shows of one command."""

BLOCK = re.compile(r"(?<=```console\n).*?(?=```)", re.DOTALL)
COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n(?:(?!\$ ).*\n)*", re.MULTILINE)
PICTURE = re.compile(r"<!-- from (.+?) -->\n!\[[^\]]*\]\((.+?)\)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the commands of the guide again.")
    parser.add_argument("--check", action="store_true", help="change nothing, fail if a command fails")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draw_photos(folder)
        (folder / "configs").symlink_to(DOCS.parent / "configs")
        text = BLOCK.sub(lambda block: rerun(block[0], folder), GUIDE.read_text())
        if not check:
            for sources, target in PICTURE.findall(text):
                side_by_side([folder / source for source in sources.split()], DOCS / target)
            GUIDE.write_text(text)


def rerun(block: str, folder: Path) -> str:
    """A console block with its commands as they are and their outputs as they are now."""
    return COMMAND.sub(lambda found: f"$ {found[1]}\n{output(found[1], folder)}", block)


def output(command: str, folder: Path) -> str:
    path = f"{os.environ['PATH']}{os.pathsep}{Path(sys.executable).parent}"
    environment = os.environ | {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb", "PATH": path}
    started = time.perf_counter()
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=900,
    )
    print(f"{time.perf_counter() - started:4.0f} s  $ {command}", file=sys.stderr)
    if done.returncode != 0:
        sys.exit(f"The command failed with exit code {done.returncode}:\n{command}\n{done.stdout}")
    lines = [line.rstrip().replace(f"{folder}/", "") for line in done.stdout.strip("\n").splitlines()]
    if len(lines) > LONGEST:
        lines = [*lines[:LONGEST], "..."]
    return "".join(f"{line}\n" for line in lines)


def side_by_side(sources: list[Path], target: Path, height: int = 240) -> None:
    pictures = [read_image(source) for source in sources]
    height = min(height, *(picture.height for picture in pictures)) if len(pictures) > 1 else pictures[0].height
    pictures = [picture.resize((picture.width * height // picture.height, height)) for picture in pictures]
    gap = 8
    strip = Image.new("RGB", (sum(picture.width + gap for picture in pictures) - gap, height), "white")
    x = 0
    for picture in pictures:
        strip.paste(picture, (x, 0))
        x += picture.width + gap
    strip.thumbnail((1000, 1000))
    target.parent.mkdir(parents=True, exist_ok=True)
    strip.save(target, quality=88)


# ---- photos


def draw_photos(folder: Path) -> None:
    """examples/CLASS/{1,2,3}.jpg with masks, photos/*.jpg, a pair to match, and a short video."""
    for name in CLASSES:
        for number in (1, 2, 3):
            scene = draw(name, seed=number)
            save(scene.image, folder / f"examples/{name}/{number}.jpg")
            save(scene.mask * np.uint8(255), folder / f"examples/{name}/{number}.png")
        for number in (1, 2, 3, 4):
            other = [other for other in CLASSES if other != name] if number == 4 else []
            save(draw(name, *other, seed=100 + number).image, folder / f"photos/{name}/{number}.jpg")
    for number, name in enumerate(("first.jpg", "second.jpg")):
        save(draw("butterfly", seed=200 + number).image, folder / name)
    draw_video(folder / "clip.mp4")


def draw(name: str, *others: str, seed: int, size: int = SIDE):  # type: ignore[no-untyped-def]
    recipes = [class_recipe(CLASSES[other]) for other in (name, *others)]
    rng = np.random.default_rng([CLASSES[name], seed])
    return compose(rng, recipes[0], recipes[1:], size, span=(0.5, 0.8))


def save(pixels: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.transpose(1, 2, 0) if pixels.ndim == 3 else pixels).save(path)


def draw_video(path: Path, frames: int = 12) -> None:
    """The camera moves over a still scene."""
    import av

    scene = draw("fish", seed=300, size=SIDE + 4 * frames).image.transpose(1, 2, 0)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=12)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = SIDE, SIDE, "yuv420p", 4_000_000
        for number in range(frames):
            window = np.ascontiguousarray(scene[2 * number :][:SIDE, 4 * number :][:, :SIDE])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(window, format="rgb24")))
        container.mux(stream.encode())


if __name__ == "__main__":
    main()
