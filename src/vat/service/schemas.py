"""The JSON that goes out, as the OpenAPI schema describes it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class Problem(BaseModel):
    """Why a request was refused."""

    detail: str = Field(description="One sentence.")


class RunLengths(BaseModel):
    """COCO's compressed run-length code of a mask."""

    size: tuple[int, int] = Field(description="Height, width.")
    counts: str


class Mask(BaseModel):
    """The pixels of one class in one photo."""

    label: str
    area: int = Field(description="Pixels.")
    box: tuple[int, int, int, int] | None = Field(description="x, y, width, height; null where the mask is empty.")
    score: float | None = Field(description="Mean probability within the mask; null where it is empty.")
    confidence: float = Field(description="How sure it is that the photo shows the class at all, from 0 to 1.")
    rle: RunLengths | None = None
    png: str | None = Field(default=None, description="Base64 of a black and white PNG.")


class PhotoMasks(BaseModel):
    """One photo, at its own size and upright."""

    name: str = Field(description="The file's name without any folder.")
    width: int
    height: int
    masks: list[Mask]


class Segmented(BaseModel):
    model: str
    classes: list[str]
    results: list[PhotoMasks] = Field(description="In the order of the queries.")


class StoredSet(BaseModel):
    """Examples kept in encoded form; photos are not."""

    id: str
    classes: list[str]
    shots: dict[str, int] = Field(description="Class -> number of its examples.")
    created: float = Field(description="Seconds since 1970.")
    expires: float = Field(description="Forgotten then, unless it is used before.")


class MatchedPoint(BaseModel):
    source: tuple[float, float] = Field(description="x, y in pixels of the source.")
    target: tuple[float, float] = Field(description="x, y in pixels of the target.")
    confidence: float = Field(description="From 0 to 1: how well the point returns when it is carried there and back.")


class Matched(BaseModel):
    model: str
    source_size: tuple[int, int] = Field(description="Width, height.")
    target_size: tuple[int, int] = Field(description="Width, height.")
    points: list[MatchedPoint]


class Model(BaseModel):
    name: str
    task: Literal["segmentation", "correspondence"]
    image_size: int = Field(description="Side of the square that photos are scaled to.")
    parameters: int
    device: str
    precision: str


class Models(BaseModel):
    models: list[Model]


class Health(BaseModel):
    status: Literal["ok"] = "ok"
    version: str
    under_way: int = Field(description="Requests that upload, wait or compute.")


class Index(BaseModel):
    """What stands at `/` where there is no page."""

    name: str = "vat"
    version: str
    schema_at: str = "/openapi.json"
