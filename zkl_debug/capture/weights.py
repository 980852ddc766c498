"""Which weights the frames of a capture ran with: a snapshot before the first of them, and again when they change.

A snapshot taken when the probe attaches would be of weights that need never run: a checkpoint may be loaded, a policy
refitted or an engine woken in between. So the first forward decides. Later ones are asked again when the step or the
weight version is another, and when one weight is seen to have changed that nobody announced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from zkl_debug.capture.rows import FrameRows, Sketch
from zkl_debug.capture.state import PartOf, allocated, model_state, tensor_digest
from zkl_debug.digest_torch import unobserved
from zkl_debug.schema import Phase, row_phase

if TYPE_CHECKING:
    from zkl_debug.capture.session import CaptureSession

_SAMPLE = 1 << 16  # elements of a watched weight that are read before a forward
_SMALL = 1 << 10  # elements of a weight too small to stand for the others


class WeightWatch:
    """Takes the snapshots of one capture.

    Args:
        session: where they are stored.
        model: whose parameters and buffers they hold.
        part_of: see :func:`zkl_debug.capture.state.model_state`.
    """

    def __init__(self, session: CaptureSession, model: nn.Module, part_of: PartOf | None = None) -> None:
        self._session = session
        self._model = model
        self._part_of = part_of
        self._seen: tuple[int, int] | None = None
        self._sample: tuple[tuple[int, int], ...] = ()
        self._places: list[tuple[nn.Module, str]] | None = None
        self._phase: Phase | None = None

    def before_frame(self, rows: FrameRows | Sketch) -> None:
        """Called before each forward that will be a frame; ``rows`` are its rows."""
        session = self._session
        if session.writer is None or rows.warmup or session.recording or not rows.n_rows:
            return
        phase = rows.phase
        if isinstance(rows, FrameRows) and phase is Phase.MIXED:
            phase = Phase(int(row_phase(rows.rows["flags"]).min()))
        turned, self._phase = phase != self._phase, phase
        known = (session.step, session.weight_version)
        if self._seen is not None and self._seen == known:
            if not self._may_have_changed(phase, turned) or self._read_sample() == self._sample:
                return
            # Nobody said so, but these are other weights: what follows must not be compared with what was before.
            session.end_frame()
            session.weight_version += 1
            known = (session.step, session.weight_version)
        if self._seen is not None:
            session.event("weights", {"reason": "step" if known[0] != self._seen[0] else "changed"})
        self._seen = known
        session.state(model_state(self._model, self._part_of))
        self._sample = self._read_sample()

    def _may_have_changed(self, phase: Phase, turned: bool) -> bool:
        """Weights are not exchanged while a sequence is being decoded; on a device a look costs a wait for it."""
        return phase is not Phase.DECODE and (turned or not any(w.is_cuda for w in self._watched()))

    def _read_sample(self) -> tuple[tuple[int, int], ...]:
        with unobserved():
            return tuple(
                tensor_digest(weight.detach()[: max(1, _SAMPLE // max(1, weight[0].numel()))])
                for weight in self._watched()
                if allocated(weight)
            )

    def _watched(self) -> list[torch.Tensor]:
        """The watched weights as they are now: a parameter may have been replaced by another object."""
        if self._places is None:
            self._places = _places(self._model)
        found = [getattr(owner, name, None) for owner, name in self._places]
        return [weight for weight in found if isinstance(weight, torch.Tensor) and weight.ndim >= 2]


def _places(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where a small, a middling and a large matrix hang that training moves.

    Norm weights near one do not do: in bf16 a small update leaves every bit of them as it was.
    """
    found = [
        (p.numel(), p.requires_grad, module, name)
        for module in model.modules()
        for name, p in module.named_parameters(recurse=False)
        if p.ndim >= 2 and p.is_floating_point() and p.numel()
    ]
    trained = [entry for entry in found if entry[1]] or found
    large = sorted((e for e in trained if e[0] >= _SMALL), key=lambda e: e[0]) or trained
    picked = {i: large[i] for i in (0, len(large) // 2, len(large) - 1)} if large else {}
    return [(module, name) for _, _, module, name in picked.values()]
