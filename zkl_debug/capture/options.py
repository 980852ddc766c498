"""What a capture is asked to record."""

from __future__ import annotations

from dataclasses import dataclass

from zkl_debug.capture.rows import FrameRows
from zkl_debug.errors import UsageError
from zkl_debug.schema import Phase, row_phase


@dataclass(frozen=True)
class CaptureOptions:
    """What to record.

    Attributes:
        level: ``digest`` (16 bytes a row and site), ``payload`` (digests and raw bits) or ``off`` (attached, silent).
        sites: shell-style patterns of canonical site names; empty means all.
        layers: inclusive range of layers whose sites are recorded; sites outside any layer always are.
        budget: cap on payload bytes; None for no cap.
        strict: raise probe failures instead of disabling the probe.
        requests: record while one of the first so many generation requests runs; 0 for all.
        at_once: on a device, read each site when it is passed, even where it was seen to be the same a little later or
            at another site.
    """

    level: str = "digest"
    sites: tuple[str, ...] = ()
    layers: tuple[int, int] | None = None
    budget: int | None = None
    strict: bool = False
    requests: int = 0
    at_once: bool = False

    def __post_init__(self) -> None:
        if self.level not in ("digest", "payload", "off"):
            raise UsageError(f"capture level {self.level!r}", "digest, payload or off")


class FirstRequests:
    """Frames that run one of the first so many generation requests.

    Args:
        wanted: how many; 0 for all.
    """

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._seen: set[int] = set()
        self.left_out = 0

    def admit(self, rows: FrameRows) -> bool:
        """Whether one of the requests is in a frame; scoring frames have none and are always admitted."""
        if not self._wanted or rows.warmup:
            return True
        generated = row_phase(rows.rows["flags"]) != Phase.SCORE
        if not generated.any():
            return True
        samples = dict.fromkeys(rows.rows["sample"][generated].tolist())
        room = self._wanted - len(self._seen)
        self._seen.update([sample for sample in samples if sample not in self._seen][:room])
        if self._seen.isdisjoint(samples):
            self.left_out += 1
            return False
        return True

    def notes(self) -> list[str]:
        """What was left out, for the manifest."""
        if not self.left_out:
            return []
        return [f"{self.left_out} forwards ran none of the first {self._wanted} requests: not recorded"]
