"""The page as a person uses it, in a real browser, on a large and on a small screen."""

import io
import json
import re
import zipfile

import numpy as np
import pytest
from PIL import Image

pytestmark = pytest.mark.web

QUERIES = 8
MATCH_POINTS = ((0.9, 0.41), (0.72, 0.5), (0.4, 0.57), (0.04, 0.63), (0.62, 0.92))  # as shares of the first photo


def tiles(page, kind, area="queries"):
    return page.locator(f"#{area} [data-kind={kind}]")


def wait_for(page, kind, count, area="queries"):
    page.wait_for_function(f"document.querySelectorAll('#{area} [data-kind={kind}]').length === {count}")


def start(page, title="Butterflies"):
    page.get_by_role("button", name=f"Try: {title}").click()
    wait_for(page, "found", QUERIES)
    page.get_by_text(f"{QUERIES} done").wait_for()


def wait_for_new_masks(page, before, done):
    """Until the masks that `before` shows were all predicted again."""
    page.wait_for_function(f"document.querySelector('#queries img').src !== {json.dumps(before[0])}")
    wait_for(page, "old", 0)
    page.get_by_text(f"{done} done").wait_for()


def drag(page, selector, *shares):
    """With the button held down through points given as shares of an element."""
    page.locator(selector).scroll_into_view_if_needed()
    box = page.locator(selector).bounding_box()
    spots = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in shares]
    page.mouse.move(*spots[0])
    page.mouse.down()
    for spot in spots[1:]:
        page.mouse.move(*spot, steps=8)
    page.mouse.up()


def pictures(page, area="queries"):
    return page.locator(f"#{area} img").evaluate_all("images => images.map(image => image.src)")


def photos_done(service):
    return service.metrics.photos.labels("segment")._value.get()


def saved(page, kind):
    page.get_by_label(kind).check()
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download").click()
    with open(waiting.value.path(), "rb") as file:
        return waiting.value.suggested_filename, file.read()


def test_the_loop_of_a_labeller(page, service, shoot):
    shoot("empty")
    start(page)
    shoot("found")

    # Paint the example anew: everything is predicted again.
    before, asked = pictures(page), photos_done(service)
    page.get_by_role("button", name="Clear").click()
    drag(page, "#easel .stage", (0.25, 0.65), (0.45, 0.75), (0.65, 0.65))
    assert page.get_by_role("button", name="Undo").is_enabled()
    page.get_by_role("button", name="Find it in all photos").click()
    wait_for_new_masks(page, before, QUERIES)
    assert photos_done(service) == asked + QUERIES

    # Correct a prediction with a box: it becomes an example, the others are predicted again.
    tiles(page, "found").nth(2).click()
    page.get_by_text("Correct it with brush").wait_for()
    page.wait_for_function("document.querySelector('#easel .hint').getBoundingClientRect().top >= 0")  # tools in sight
    page.get_by_role("radio", name="Box").click()
    drag(page, "#easel .stage", (0.3, 0.3), (0.6, 0.7))
    shoot("correcting")
    page.get_by_role("button", name="Add to examples and predict again").click()
    wait_for(page, "given", 1)
    page.get_by_text("7 done by 3 examples").wait_for()
    assert photos_done(service) == asked + 2 * QUERIES - 1
    shoot("corrected")

    # What was corrected is in the download, as it was drawn.
    name, content = saved(page, "PNG masks")
    archive = zipfile.ZipFile(io.BytesIO(content))
    masks = sorted(entry for entry in archive.namelist() if entry.endswith(".png"))
    assert name == "masks.zip"
    assert len(masks) == QUERIES + 2
    shares = [np.asarray(Image.open(archive.open(entry)))[200:240, 200:240].mean() for entry in masks]
    assert max(shares) == 1
    name, content = saved(page, "COCO JSON")
    assert name == "instances.json"
    assert len(json.loads(content)["images"]) == QUERIES + 2
    name, content = saved(page, "YOLO-seg")
    assert "labels/photo 1.txt" in zipfile.ZipFile(io.BytesIO(content)).namelist()


def test_corrections_that_follow_fast_all_count(page):
    start(page)
    for place, examples in ((1, 3), (2, 4)):
        page.locator("#queries button").nth(place).click()
        page.get_by_text("Correct it with brush").wait_for()
        drag(page, "#easel .stage", (0.2, 0.2), (0.4, 0.4))
        page.get_by_role("button", name="Add to examples and predict again").click()
        page.get_by_text(f"by {examples} examples").wait_for()  # the first one is still predicting then
    page.get_by_text("6 done by 4 examples").wait_for()
    wait_for(page, "old", 0)
    page.get_by_role("button", name="Add to examples and predict again").click()
    page.get_by_text("All photos have their masks, by 4 examples.").wait_for()


def test_stopping_and_starting_over(page):
    page.get_by_label("cut-out").check()
    slider = page.get_by_role("slider", name=re.compile("Threshold"))
    slider.fill("0.3")
    page.get_by_role("button", name="Try: Butterflies").click()
    page.get_by_text(f"0 of {QUERIES}").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped; photos").wait_for()
    page.wait_for_timeout(2000)
    assert page.get_by_text("Stopped; photos").is_visible()
    assert slider.input_value() == "0.5"
    assert page.get_by_label("overlay").is_checked()
    for left in (1, 0):
        page.get_by_role("button", name="Remove").click()
        wait_for(page, "given", left, "examples")
    page.get_by_text("Now paint the object on an example photo.").wait_for()
    page.get_by_role("button", name="Start over").click()
    wait_for(page, "bare", 0)
    page.get_by_role("button", name="Download").click()
    page.get_by_text("There are no masks to download yet.").wait_for()


def test_a_page_that_is_loaded_again_goes_on(page):
    start(page)
    page.wait_for_function("sessionStorage.getItem('vat-visit')")
    page.reload()
    wait_for(page, "found", QUERIES)
    wait_for(page, "given", 2, "examples")
    page.get_by_role("button", name="Find it in all photos").click()
    page.get_by_text("All photos have their masks, by 2 examples.").wait_for()


def test_threshold_and_looks_do_not_ask_the_network(page, service, shoot):
    start(page, "Toy cars")
    asked, overlays = photos_done(service), pictures(page)
    page.get_by_label("mask", exact=True).check()
    page.wait_for_function(f"document.querySelector('#queries img').src !== {json.dumps(overlays[0])}")
    masks = pictures(page)
    slider = page.get_by_role("slider", name=re.compile("Threshold"))
    slider.focus()
    for _ in range(25):
        slider.press("ArrowLeft")
    page.wait_for_function(f"document.querySelector('#queries img').src !== {json.dumps(masks[0])}")
    page.get_by_label("cut-out").check()
    page.wait_for_timeout(800)
    shoot("cutout")
    assert len({*overlays, *masks, *pictures(page)}) == 3 * QUERIES
    assert photos_done(service) == asked


def test_uploaded_photos_are_masked_as_they_come(page, tmp_path):
    start(page)
    files = []
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 255, (40, 60, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((600, 400)).save(tmp_path / f"upload {number}.jpg")
        files.append(tmp_path / f"upload {number}.jpg")
    (tmp_path / "broken.jpg").write_text("no picture")
    page.locator("#query-files input[type=file]").set_input_files([*files, tmp_path / "broken.jpg"])
    page.get_by_text("broken.jpg was left out").wait_for()  # first: the note is gone after some seconds
    wait_for(page, "found", QUERIES + 3)
    page.locator("#example-files input[type=file]").set_input_files(files[0])
    wait_for(page, "bare", 1, "examples")
    page.get_by_text("Paint the object you look for").wait_for()


def test_everything_by_keyboard(page):
    page.get_by_role("button", name="Try: Butterflies").focus()
    page.keyboard.press("Enter")
    wait_for(page, "found", QUERIES)
    stage = page.locator("#easel .stage")
    stage.focus()
    for key in ("b", "ArrowRight", "ArrowDown", "Space", "Shift+ArrowLeft", "Enter"):
        page.keyboard.press(key)
    assert page.get_by_role("button", name="Undo").is_enabled()
    page.keyboard.press("Control+z")
    page.keyboard.press("Control+z")
    assert page.get_by_role("button", name="Undo").is_disabled()
    for key in ("r", "Space", *["ArrowRight"] * 6, *["ArrowDown"] * 6, "Space"):
        page.keyboard.press(key)
    assert page.get_by_role("button", name="Undo").is_enabled()
    tiles(page, "found").first.focus()
    page.keyboard.press("Enter")
    page.get_by_text("Correct it with brush").wait_for()


def test_two_classes_keep_their_colours(page, shoot):
    start(page, "Birds and fish")
    assert page.get_by_role("radio", name="fish").is_visible()
    page.get_by_role("button", name="+ Class").click()
    page.get_by_label("Name of the chosen class").fill("sky")
    page.get_by_label("Name of the chosen class").press("Tab")
    before = pictures(page)
    drag(page, "#easel .stage", (0.1, 0.05), (0.9, 0.05))
    page.get_by_role("button", name="Find it in all photos").click()
    wait_for_new_masks(page, before, QUERIES)
    shoot("classes")
    document = json.loads(saved(page, "COCO JSON")[1])
    assert [category["name"] for category in document["categories"]] == ["bird", "fish", "sky"]


def test_points_find_their_way(page, shoot):
    page.get_by_role("tab", name="Match").click()
    page.get_by_role("button", name="Try: Two animals").click()
    page.wait_for_selector(".board[data-empty=no]")
    first = page.locator(".board .first")
    first.scroll_into_view_if_needed()
    for x, y in MATCH_POINTS:
        box = first.bounding_box()
        first.click(position={"x": x * box["width"], "y": y * box["height"]})
    assert page.locator(".board .list li").count() == len(MATCH_POINTS)
    assert re.search(r"→ \(\d+, \d+\), confidence \d+ %", page.locator(".board .list li").first.inner_text())
    shoot("match")
    page.get_by_label("How much of the warped first photo is shown").fill("60")
    shoot("warp")
    page.locator(".board").get_by_role("button", name="Undo").click()
    assert page.locator(".board .list li").count() == len(MATCH_POINTS) - 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off_and_all_text_can_be_read(page, scheme, shoot):
    page.emulate_media(color_scheme=scheme)
    page.reload()
    start(page)
    height = page.viewport_size["height"]
    for width in (320, page.viewport_size["width"]):
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert (
            page.evaluate(
                "Math.max(...[...document.querySelectorAll('.tiles button')].map(tile => "
                "tile.getBoundingClientRect().right))"
            )
            <= width
        )
    assert page.evaluate(LOW_CONTRAST) == []
    shoot(scheme)


LOW_CONTRAST = """() => {
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const parse = text => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll('h1, h2, p, button, label, span, li')) {
    const own = [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest('button:disabled, [aria-hidden=true]')) continue;
    const style = getComputedStyle(node), front = parse(style.color), back = behind(node);
    const share = Number(style.opacity) * (front[3] ?? 1);
    const seen = front.slice(0, 3).map((value, i) => share * value + (1 - share) * back[i]);
    const [high, low] = [light(seen), light(back)].sort((a, b) => b - a);
    if ((high + 0.05) / (low + 0.05) < 4.5) poor.push(node.textContent.trim());
  }
  return poor;
}"""
