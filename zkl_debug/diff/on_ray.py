"""Sites compared by the workers of a Ray cluster, which open the captures themselves.

Ray is imported when a runner is made, never before. The captures must be at the same path on every node; each worker
makes sure that what it opened is what was asked about. A task whose worker is lost is run again elsewhere.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from zkl_debug.cluster import RETRIES, connected, first_line, import_ray
from zkl_debug.diff.alone import Alone
from zkl_debug.diff.edges import build_pairs
from zkl_debug.diff.naming import Family, join_names
from zkl_debug.diff.rows import build_rows
from zkl_debug.diff.sites import join_sites
from zkl_debug.diff.sitework import Packed, SiteOutcome, SiteWork, Unpacker, chunks, pack
from zkl_debug.digest import digest_bytes
from zkl_debug.errors import CaptureInvalid, Refused, UsageError, ZklError


@dataclass(frozen=True)
class Request:
    """What a worker needs to do the same work: the folders, and what must be found in them.

    ``b`` is empty where one capture is compared with itself alone.
    """

    a: str
    b: str
    partial: bool
    verify_bytes: bool
    aliases: tuple[tuple[str, str], ...]
    maps: tuple[Family, ...]
    proof: tuple[int, int]


def _proof(work: SiteWork) -> tuple[int, int]:
    """A digest of what the manifests say of their segments, check values of all data included, and of the sites."""
    segments = [capture.manifest.get("segments") for capture in work.captures]
    return digest_bytes(repr([segments, [(pair.name, pair.on, pair.differ) for pair in work.sites]]).encode())


def make_request(work: SiteWork, maps: tuple[Family, ...] = ()) -> Request:
    """The request of some work.

    Args:
        work: the work.
        maps: the user's own names for sites, which were used to join them.

    Raises:
        UsageError: when a capture is not in a folder.
    """
    alone = isinstance(getattr(work.captures[1], "original", work.captures[1]), Alone)
    captures = work.captures[:1] if alone else work.captures
    roots = [getattr(capture, "place", None) for capture in captures]
    if None in roots:
        raise UsageError("a capture that is not in a folder", "capture folders, which workers can open")
    partial = not all(capture.manifest.get("complete", True) for capture in captures)
    aliases = tuple(sorted((work.aliases or {}).items()))
    other = "" if alone else str(roots[1])
    return Request(str(roots[0]), other, partial, work.verify_bytes, aliases, maps, _proof(work))


@lru_cache(maxsize=1)
def _open_work(request: Request) -> SiteWork:
    """The work of a request, in a worker; kept for its next task."""
    from zkl_debug.store.reader import open_capture

    one = open_capture(Path(request.a), partial=request.partial)
    two = open_capture(Path(request.b), partial=request.partial) if request.b else Alone(one)
    joined = join_names(one, two, request.maps)
    a, b = joined.a, joined.b
    space, aliases = build_rows(a, b), dict(request.aliases)
    sites = join_sites(a, b, aliases)
    work = SiteWork(space, build_pairs(space), sites, request.verify_bytes, (a, b), aliases)
    if _proof(work) != request.proof:
        raise CaptureInvalid(
            f"a worker found other captures at {request.a} and {request.b}",
            "the same files at the same path on every node",
        )
    return work


def compare_sites(request: Request, part: list[int]) -> list[Packed] | ZklError:
    """Outcomes of some sites; a refusal comes back as it is, not wrapped into a Ray error."""
    try:
        work = _open_work(request)
        return [pack(work.compare(i)) for i in part]
    except ZklError as error:
        return error


@dataclass(frozen=True)
class RayRunner:
    """A :class:`~zkl_debug.diff.sitework.Runner` on a Ray cluster.

    Args:
        address: ``local`` for a cluster of this machine that lives as long as the diff, else the address of one that
            runs (``auto``, ``HOST:PORT``, ``ray://HOST:PORT``).
        jobs: workers of a local cluster; default one a core.
        maps: the user's own names for sites, as given to the diff.

    Raises:
        UsageError: when Ray is not installed or cannot be reached.
    """

    address: str
    jobs: int | None = None
    maps: tuple[Family, ...] = ()
    _ray: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ray", import_ray())

    def __call__(self, work: SiteWork, numbers: list[int]) -> Iterator[SiteOutcome]:
        """Outcomes of sites, in order."""
        request = make_request(work, self.maps)
        ray = self._ray
        with connected(ray, self.address, self.jobs):
            workers = max(1, int(ray.cluster_resources().get("CPU", 1)))
            task = ray.remote(max_retries=RETRIES)(compare_sites)
            yield from self._results(task, request, chunks(numbers, workers), workers, Unpacker(len(work.pairs)))

    def _results(
        self, task: Any, request: Request, parts: list[list[int]], workers: int, unpack: Unpacker
    ) -> Iterator[SiteOutcome]:
        waiting = deque(parts)
        running: deque[Any] = deque()
        try:
            while waiting or running:
                while waiting and len(running) < 2 * workers:
                    running.append(task.remote(request, waiting.popleft()))
                for packed in self._get(running.popleft()):
                    yield unpack(packed)
        finally:
            for reference in running:
                with contextlib.suppress(Exception):
                    self._ray.cancel(reference)

    def _get(self, reference: Any) -> list[Packed]:
        try:
            found = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise Refused(
                f"Ray gave up on a part of the comparison, tried {RETRIES + 1} times: {first_line(error)}",
                "workers that can read both captures and have the memory for them",
                "compare on this machine: leave --ray away",
            ) from None
        if isinstance(found, ZklError):
            raise found
        result: list[Packed] = found
        return result
