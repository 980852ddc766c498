"""How a model is spread over processes: the sizes of the parallel groups and the place of one rank in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zkl_debug.errors import UsageError

CP_COMMS = ("a2a", "p2p")


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel groups of one side.

    Attributes:
        tp: tensor parallel.
        pp: pipeline stages.
        cp: context parallel; each rank has chunks r and 2 * cp - 1 - r of a sequence cut into 2 * cp (zigzag).
        ep: expert parallel, over the ranks of tp, cp and dp; an expert is never cut (expert tensor parallel 1).
        dp: replicas that score other micro-batches.
        sp: sequence parallel inside the tensor-parallel group.
        cp_comm: ``a2a`` (heads change places with the sequence) or ``p2p`` (keys and values go round a ring).
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    sp: bool = False
    cp_comm: str = "a2a"

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "ep", "dp"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)}", "at least 1")
        if self.sp and self.tp == 1:
            raise UsageError("sequence parallel with tp 1", "--tp 2 or more: it shares out the rows of that group")
        if self.cp_comm not in CP_COMMS:
            raise UsageError(f"cp communication {self.cp_comm!r}", f"one of {', '.join(CP_COMMS)}")
        if (self.tp * self.cp * self.dp) % self.ep:
            raise UsageError(
                f"ep {self.ep} over {self.tp * self.cp * self.dp} ranks",
                "a divisor of tp * cp * dp: experts are spread over these ranks",
                f"--dp {self.ep}",
            )

    @property
    def world(self) -> int:
        """Processes it takes."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def text(self) -> str:
        """Sizes above one, e.g. ``tp2 sp``; ``one rank`` for none."""
        parts = [f"{name}{getattr(self, name)}" for name in ("tp", "pp", "cp", "ep", "dp") if getattr(self, name) > 1]
        parts += ["sp"] if self.sp else []
        return " ".join(parts) or "one rank"

    def check_model(self, spec: Any) -> None:
        """Refuse a model that cannot be cut so; ``spec`` is a :class:`~zkl_debug.engines.megatron.model.ModelSpec`.

        Raises:
            UsageError: when heads, groups, layers, experts or widths do not divide.
        """
        for what, count, parts in (
            ("attention heads", spec.heads, self.tp * (self.cp if self.cp_comm == "a2a" else 1)),
            ("KV groups", spec.kv_groups, self.tp * (self.cp if self.cp_comm == "a2a" else 1)),
            ("layers", spec.layers, self.pp),
            ("vocabulary entries", spec.vocab, self.tp),
            ("experts", spec.experts, self.ep),
        ):
            if count % parts:
                raise UsageError(f"{count} {what} over {parts} ranks ({self.text})", "a number that divides them")
        if self.ep > 1 and not spec.experts:
            raise UsageError(f"ep {self.ep} of a model without experts", "a bed with experts: --bed tiny-moe")
        if spec.experts and self.tp > 1 and not self.sp:
            raise UsageError("experts under tensor parallel without sequence parallel", "--sp, as megatron-core asks")


ONE = ParallelLayout()
