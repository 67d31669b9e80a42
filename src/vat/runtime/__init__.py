"""Exported models without torch: NumPy, Pillow and onnxruntime are all that this package needs.

from vat.runtime import Segmenter
segmenter = Segmenter("exported").fit(["a.jpg"], ["a.png"])
segmenter.predict("photo.jpg").save("masks")
"""

from vat.runtime.segmenter import Segmenter

__all__ = ["Segmenter"]
