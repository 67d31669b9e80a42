"""The endpoints under /v1, and those that tell how the service is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, File, Form, Header, Path, Response, UploadFile
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

import vat
from vat.cli.options import choices
from vat.errors import VatError
from vat.files import unique_stems, zipped
from vat.matcher import grid_points
from vat.predict.results import MATCH_FILES, PICTURES, Match, Segmentation
from vat.predict.writers import WRITERS
from vat.segmenter import Options
from vat.service.answers import photo_masks, saved_files
from vat.service.core import Service, Supports
from vat.service.limits import OutOfTime
from vat.service.schemas import Health, Matched, Model, Models, Problem, Segmented, StoredSet
from vat.service.store import SupportSet
from vat.service.uploads import Upload, check_photo, paired, read_photo
from vat.service.worker import Turns

Result = TypeVar("Result")

ZIP = "application/zip"
MOST_TEXT = 200  # characters of a list of formats; an answer repeats what it refuses
MOST_TILES = 4  # more than that takes longer than a request may
PROBLEMS: dict[int | str, dict[str, Any]] = {
    401: {"model": Problem, "description": "The token is missing or wrong."},
    400: {"model": Problem, "description": "The body is not a form."},
    408: {"model": Problem, "description": "The upload took too long."},
    413: {"model": Problem, "description": "The body is too large."},
    422: {"model": Problem, "description": "A field, photo or mask is wrong."},
    429: {"model": Problem, "description": "Too many requests are under way; see Retry-After."},
    503: {"model": Problem, "description": "The work took too long, or the service shuts down."},
}
UNAUTHORISED: dict[int | str, dict[str, Any]] = {401: PROBLEMS[401]}
UNKNOWN: dict[int | str, dict[str, Any]] = {
    404: {"model": Problem, "description": "No set of examples has this id."},
    422: PROBLEMS[422],
}
FILES: dict[int | str, dict[str, Any]] = {
    200: {"description": "JSON, or a ZIP where `Accept` says application/zip.", "content": {ZIP: {}}}
}

Photos = Annotated[list[UploadFile], File(description="Labelled photos.")]
Masks = Annotated[
    list[UploadFile], File(description="Their masks in the same order: pictures, or COCO run lengths as JSON.")
]
Labels = Annotated[list[str], Form(description="The class of each support, of all of them, or none for 'object'.")]
Id = Annotated[str, Path(description="From POST /v1/supports.", max_length=64)]
Accept = Annotated[str, Header(description="application/zip for files instead of JSON.")]
Points = TypeAdapter(list[tuple[FiniteFloat, FiniteFloat]])


def routes(service: Service) -> APIRouter:
    """All endpoints of a service."""
    router = APIRouter()
    _add_segment(router, service)
    _add_supports(router, service)
    _add_match(router, service)
    _add_status(router, service)
    return router


def _add_segment(router: APIRouter, service: Service) -> None:
    @router.post("/v1/segment", responses={**FILES, **PROBLEMS, 404: UNKNOWN[404]}, tags=["segmentation"])
    async def segment(
        query: Annotated[list[UploadFile], File(min_length=1, description="The photos to segment.")],
        support: Photos = [],  # noqa: B006  never changed
        mask: Masks = [],  # noqa: B006
        label: Labels = [],  # noqa: B006
        support_set: Annotated[str | None, Form(description="The id of a stored set, instead of supports.")] = None,
        threshold: Annotated[float, Form(ge=0, le=1, description="Probability from which a pixel counts.")] = 0.5,
        min_confidence: Annotated[
            float, Form(ge=0, le=1, description="Mask nothing of a class that the photo shows less surely than this.")
        ] = 0.0,
        overlapping: Annotated[bool, Form(description="Let classes share pixels.")] = False,
        tiles: Annotated[
            Literal["auto"] | Annotated[int, Field(ge=1, le=MOST_TILES)] | None,
            Form(description="Also look at tiles, this many along the longer side."),
        ] = None,
        flip: Annotated[bool, Form(description="Also look at the mirrored photo.")] = False,
        encoding: Annotated[Literal["rle", "png"], Form(description="Of the masks in JSON.")] = "rle",
        formats: Annotated[str, Form(description="Of the files in a ZIP: " + ", ".join([*PICTURES, *WRITERS]))] = "png",
        accept: Accept = "*/*",
    ) -> Segmented:
        """Masks of the queries, learnt from the supports or a stored set."""
        options = Options(threshold, overlapping, tiles, (1.0,), flip, min_confidence=min_confidence)
        photos = await _read(query)
        files = choices(formats[:MOST_TEXT], "'formats'", [*PICTURES, *WRITERS]) if ZIP in accept else None
        supports = await _read(support), await _read(mask), label
        if (support_set is not None) == any(supports):
            raise VatError("Send either 'support_set', or 'support' with 'mask'.")
        stems = unique_stems([photo.name for photo in photos])

        def finish(i: int, result: Segmentation) -> Any:
            result.name = photos[i].name
            if files:
                return saved_files(result, stems[i], files)
            return result.classes, photo_masks(result, photos[i].name, encoding)

        def job() -> Turns[list[Any]]:
            for photo in _counted(photos, service):
                check_photo(photo, service.limits)
            examples: Supports = support_set or paired(*supports, service.limits)
            return (yield from service.segmenting(examples, photos, options, finish))

        done = await _finished(service, job())
        if files:
            return _zip({name: content for part in done for name, content in part.items()})
        return Segmented(
            model=service.names["segmentation"], classes=list(done[0][0]), results=[result for _, result in done]
        )


def _add_supports(router: APIRouter, service: Service) -> None:
    @router.post("/v1/supports", status_code=201, responses=PROBLEMS, tags=["segmentation"])
    async def store_supports(support: Photos, mask: Masks, label: Labels = []) -> StoredSet:  # noqa: B006
        """Encode examples once and keep them under an id, for any number of requests."""
        uploads = await _read(support), await _read(mask), label

        def job() -> Turns[SupportSet]:
            return (yield from service.storing(paired(*uploads, service.limits)))

        return _stored(await _finished(service, job()), service)

    @router.get("/v1/supports/{id}", responses={**UNKNOWN, **UNAUTHORISED}, tags=["segmentation"])
    async def get_supports(id: Id) -> StoredSet:
        """What is stored under an id; asking counts as a use."""
        return _stored(service.stored.get(id), service)

    @router.delete("/v1/supports/{id}", status_code=204, responses={**UNKNOWN, **UNAUTHORISED}, tags=["segmentation"])
    async def delete_supports(id: Id) -> None:
        """Forget a set of examples."""
        service.stored.remove(id)


def _add_match(router: APIRouter, service: Service) -> None:
    @router.post("/v1/match", responses={**FILES, **PROBLEMS}, tags=["correspondence"])
    async def match(
        source: Annotated[UploadFile, File(description="The photo in which the points are known.")],
        target: Annotated[UploadFile, File(description="The photo in which they are looked for.")],
        points: Annotated[str | None, Form(description="JSON such as [[120, 80], [200, 95]], in pixels.")] = None,
        grid: Annotated[int, Form(ge=1, le=64, description="Without points: so many along the longer side.")] = 8,
        formats: Annotated[str, Form(description="Of the files in a ZIP: " + ", ".join(MATCH_FILES))] = "picture,warp",
        accept: Accept = "*/*",
    ) -> Matched:
        """Points of the source, found in the target."""
        [first], [second] = await _read([source]), await _read([target])
        given = None if points is None else _points(points, service)
        files = choices(formats[:MOST_TEXT], "'formats'", MATCH_FILES) if ZIP in accept else None

        def finish(found: Match) -> Any:
            return saved_files(found, "match", files) if files else found.as_dict()

        def job() -> Turns[Any]:
            start, end = (read_photo(photo, service.limits) for photo in (first, second))
            asked = grid_points(start.size, grid) if given is None else given
            return (yield from service.matching(start, end, asked, finish))

        done = await _finished(service, job())
        return _zip(done) if files else Matched(model=service.names["correspondence"], **done)


def _add_status(router: APIRouter, service: Service) -> None:
    @router.get("/v1/models", responses=UNAUTHORISED, tags=["status"])
    async def models() -> Models:
        """The models that answer."""
        parts = [part for part in (service.segmenter, service.matcher) if part is not None]
        return Models(
            models=[
                Model(
                    name=name,
                    task=task,  # type: ignore[arg-type]
                    image_size=part.engine.image_size,
                    parameters=sum(p.numel() for p in part.engine.network.parameters()),
                    device=str(part.engine.device),
                    precision=str(part.engine.dtype).removeprefix("torch."),
                )
                for (task, name), part in zip(service.names.items(), parts, strict=True)
            ]
        )

    @router.get("/healthz", tags=["status"])
    async def health() -> Health:
        """Whether the service is up; needs no token."""
        return Health(version=vat.__version__, under_way=service.worker.busy)

    router.head("/healthz", include_in_schema=False)(health)  # as `wget --spider` asks

    text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

    @router.get("/metrics", response_class=Response, responses={**text, **UNAUTHORISED}, tags=["status"])
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


# -- fields --------------------------------------------------------------------------------------------------


async def _read(files: Sequence[UploadFile]) -> list[Upload]:
    return [Upload(await file.read(), file.filename) for file in files]


async def _finished(service: Service, job: Turns[Result]) -> Result:
    """The result of a job. Giving up on waiting takes it out of the queue."""
    try:
        async with asyncio.timeout(service.limits.seconds):
            return await asyncio.wrap_future(service.worker.submit(job))
    except TimeoutError:
        raise OutOfTime(f"The request took longer than {service.limits.seconds:g} seconds.") from None


def _counted(photos: list[Upload], service: Service) -> list[Upload]:
    if len(photos) > service.limits.queries:
        raise VatError(f"There are {len(photos)} queries; at most {service.limits.queries} are taken in one request.")
    return photos


def _points(text: str, service: Service) -> list[tuple[float, float]]:
    try:
        points = Points.validate_json(text)
    except ValidationError:
        raise VatError("'points' is not a JSON list of x, y in pixels, such as [[120, 80], [200, 95]].") from None
    if len(points) > service.limits.points:
        raise VatError(f"There are {len(points)} points; at most {service.limits.points} are taken in one request.")
    return points


def _stored(entry: SupportSet, service: Service) -> StoredSet:
    return StoredSet(
        id=entry.id,
        classes=entry.segmenter.classes,
        shots=entry.shots,
        created=entry.created,
        expires=entry.used + service.limits.stored_seconds,
    )


def _zip(files: dict[str, bytes]) -> Any:
    """In place of the model that an endpoint promises: a response passes as it is."""
    return Response(zipped(files), media_type=ZIP, headers={"Content-Disposition": 'attachment; filename="vat.zip"'})
