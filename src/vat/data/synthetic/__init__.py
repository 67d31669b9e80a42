"""A procedural world with unlimited classes, so that both tasks run without any download.
 The way of a picture: a class id gives a `Recipe` (a body of `Part`s by a plan, with textures); a random
stream gives an `Instance` (pose and view) and a background; `compose` paints them into a `Scene`, which knows
for every pixel what it shows; `SyntheticEpisodes` and `SyntheticPairs` make samples of scenes.
"""

from vat.data.synthetic.datasets import SyntheticEpisodes, SyntheticPairs
from vat.data.synthetic.recipe import SPLIT_CLASSES, Recipe, class_recipe
from vat.data.synthetic.scene import Scene, compose

__all__ = [
    "SPLIT_CLASSES",
    "Recipe",
    "Scene",
    "SyntheticEpisodes",
    "SyntheticPairs",
    "class_recipe",
    "compose",
]
