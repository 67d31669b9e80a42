"""A page with all results at a glance: one HTML file that holds its pictures and needs nothing else."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np
from PIL import Image

from vat.images import encoded
from vat.predict.drawing import colour, tint

if TYPE_CHECKING:
    from vat.predict.results import Segmentation

SIDE = 240
"""Longer side of a thumbnail in pixels: about 8 kB each, so that a thousand photos make a page of 12 MB."""

STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; margin: 0; background: #f7f7f5; color: #222 }
header { position: sticky; top: 0; background: #fffd; padding: .8em 1.2em; border-bottom: 1px solid #ddd; z-index: 1 }
h1 { font-size: 1.1em; margin: 0 0 .4em }
header form { display: flex; flex-wrap: wrap; gap: .5em 1em; align-items: center }
header input, header select { font: inherit; max-width: 100% }
header label { white-space: nowrap }
i { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin-right: .35em }
main { display: grid; grid-template-columns: repeat(auto-fill, min(242px, 50vw - 2em)); gap: 12px; padding: 1.2em }
figure { margin: 0; background: #fff; border: 1px solid #ddd; content-visibility: auto;
  contain-intrinsic-size: 240px 260px }
figure img { display: block; margin: auto; max-width: 100%; height: auto }
figcaption { padding: .4em .6em; font-size: .85em; overflow-wrap: anywhere }
small { color: #666; display: block }
[hidden] { display: none }
"""

SCRIPT = """
const tiles = [...document.querySelectorAll('figure')], main = document.querySelector('main');
const text = document.getElementById('text'), order = document.getElementById('order');
const boxes = [...document.querySelectorAll('header input[type=checkbox]')];
const values = name => new Map(tiles.map(tile => [tile, new Map(JSON.parse(tile.dataset[name]))]));
const shares = values('shares'), confidence = values('confidence');
const place = tile => Number(tile.dataset.place);
function show() {
  const wanted = boxes.filter(box => box.checked).map(box => box.value), words = text.value.toLowerCase();
  const chosen = map => [...map].map(([name, value]) => wanted.length && !wanted.includes(name) ? 0 : value);
  const ranks = {
    name: () => 0,
    area: tile => chosen(shares.get(tile)).reduce((sum, share) => sum + share, 0),
    surest: tile => Math.max(0, ...chosen(confidence.get(tile))),
  };
  const rank = ranks[order.value];
  let count = 0;
  for (const tile of tiles) {
    tile.hidden = !(tile.dataset.name.includes(words) && wanted.every(name => shares.get(tile).has(name)));
    count += !tile.hidden;
  }
  document.getElementById('count').textContent = count + ' of ' + tiles.length + ' shown';
  tiles.sort((a, b) => rank(b) - rank(a) || place(a) - place(b));
  main.append(...tiles);
}
text.oninput = order.onchange = show; boxes.forEach(box => box.onchange = show); show();
"""


@dataclass(frozen=True)
class Tile:
    """A photo on the sheet: its thumbnail as JPEG, the share of it that each class covers, where a click leads, and how
    sure the model is that it shows each class.
    """

    name: str
    picture: bytes
    shares: dict[str, float]
    link: str | None = None
    confidence: dict[str, float] = field(default_factory=dict)


def thumbnail(result: Segmentation) -> bytes:
    """The photo with its masks, small, as JPEG. Masks shrink with the photo before they are drawn, which is fast."""
    picture = result.image.copy()
    picture.thumbnail((SIDE, SIDE))
    masks = [
        np.asarray(Image.fromarray(mask).resize(picture.size, Image.Resampling.NEAREST), dtype=bool)
        for mask in result.masks.values()
    ]
    return encoded(tint(picture, masks, 0.5), "JPEG", quality=80)


def contact_sheet(tiles: Iterable[Tile], classes: Sequence[str], title: str) -> str:
    """The page: tiles to filter by class and name, in the order given, by the area of the classes chosen, or by how
    sure it is that a photo shows them: where things are masked that are not there, they stand at the end.
    """
    figures = "\n".join(_figure(place, tile) for place, tile in enumerate(tiles))
    boxes = "".join(
        f'<label><input type="checkbox" value="{escape(name)}"> <i style="background:rgb{colour(number)}"></i>'
        f"{escape(name)}</label>"
        for number, name in enumerate(classes)
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title><style>{STYLE}</style></head>
<body><header><h1>{escape(title)} <small id="count"></small></h1>
<form onsubmit="return false"><input id="text" type="search" placeholder="name" aria-label="Show names with this text">
<select id="order" aria-label="Order"><option value="name">by name</option>
<option value="area">largest area first</option><option value="surest">surest first</option></select>
<span>Photos with</span>{boxes}</form></header>
<main>
{figures}
</main>
<script>{SCRIPT}</script></body></html>
"""


def _figure(place: int, tile: Tile) -> str:
    present = {name: share for name, share in tile.shares.items() if share > 0}
    sure = {name: f", confidence {value:.2f}" for name, value in tile.confidence.items()}
    listed = "; ".join(f"{name} {share:.1%}{sure.get(name, '')}" for name, share in present.items()) or "nothing found"
    shares, confidence = (escape(json.dumps(list(of.items()))) for of in (present, tile.confidence))
    data = base64.b64encode(tile.picture).decode()
    picture = f'<img loading="lazy" alt="{escape(tile.name)}" src="data:image/jpeg;base64,{data}">'
    if tile.link is not None:
        picture = f'<a href="{escape(quote(tile.link))}">{picture}</a>'
    return (
        f'<figure data-place="{place}" data-name="{escape(tile.name.lower())}" data-shares="{shares}" '
        f'data-confidence="{confidence}">'
        f"{picture}<figcaption>{escape(tile.name)}<small>{escape(listed)}</small></figcaption></figure>"
    )
