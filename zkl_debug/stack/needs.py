"""What a switch needs, and whether a machine has it: pure functions over facts that were probed or assumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from zkl_debug.stack.switches import Switch


class NeedKind(StrEnum):
    """What a need is about."""

    GPU = "gpu"  # compute capability of every GPU, at least `minimum`
    NO_GPU = "no-gpu"  # a machine without a GPU
    PACKAGE = "package"  # any of `names` installed, at least `minimum`
    FIELD = "field"  # any of `names` a field of megatron-core's config class `owner` (dataclasses.fields)
    SYMBOL = "symbol"  # every one of `names` importable ("module:attribute.attribute")


@dataclass(frozen=True)
class Need:
    """One requirement; see :class:`NeedKind` for what ``names``, ``minimum`` and ``owner`` mean."""

    kind: NeedKind
    names: tuple[str, ...] = ()
    minimum: str = ""
    owner: str = ""

    @property
    def text(self) -> str:
        """The requirement in words."""
        if self.kind is NeedKind.GPU:
            return f"a GPU of SM{self.minimum} or newer" if self.minimum else "a GPU"
        if self.kind is NeedKind.NO_GPU:
            return "a machine without a GPU"
        if self.kind is NeedKind.PACKAGE:
            return f"{self.names[0]} >= {self.minimum}" if self.minimum else self.names[0]
        if self.kind is NeedKind.FIELD:
            return f"{self.owner}.{' or '.join(self.names)}"
        return ", ".join(name.rpartition(":")[2] for name in self.names)


def gpu(minimum: str = "") -> Need:
    """A GPU, of at least this compute capability (``"100"``)."""
    return Need(NeedKind.GPU, minimum=minimum)


def package(*names: str, minimum: str = "") -> Need:
    """A distribution; several names are names of the same thing."""
    return Need(NeedKind.PACKAGE, names, minimum)


def model_field(*names: str) -> Need:
    """A field of megatron-core's ``TransformerConfig``; several names are one setting that was renamed."""
    return Need(NeedKind.FIELD, names, owner="TransformerConfig")


def engine_field(*names: str) -> Need:
    """A field of megatron-core's ``InferenceConfig``."""
    return Need(NeedKind.FIELD, names, owner="InferenceConfig")


def symbol(*names: str) -> Need:
    """Functions or classes, as ``module:attribute``."""
    return Need(NeedKind.SYMBOL, names)


NO_GPU = Need(NeedKind.NO_GPU)
TE = package("transformer_engine", "transformer_engine_cu13", "transformer_engine_cu12")
TE_218 = package("transformer_engine", "transformer_engine_cu13", "transformer_engine_cu12", minimum="2.18")
FA4 = package("flash-attn-4", minimum="4.0.0b19")
NEMO_RL = package("nemo-rl", "nemo_rl")
MAMBA = package("mamba_ssm", "mamba-ssm")
FLASHINFER = package("flashinfer-python", minimum="0.7.0.post1")


@dataclass(frozen=True)
class Facts:
    """What is known of a machine. ``None`` means unknown: such a need is assumed to be met, and said so.

    Attributes:
        name: how the machine is called in listings.
        sm: lowest compute capability of its GPUs (100 for SM100), 0 without a GPU.
        gpus: names of the GPUs.
        packages: distribution -> version, or None where it is not installed.
        fields: config class of megatron-core -> names of its fields.
        symbols: ``module:attribute`` -> whether it can be imported.
        problem: why megatron-core could not be asked, or empty.
    """

    name: str
    sm: int | None = None
    gpus: tuple[str, ...] = ()
    packages: Mapping[str, str | None] | None = None
    fields: Mapping[str, frozenset[str]] | None = None
    symbols: Mapping[str, bool] | None = None
    problem: str = ""


#: Machines a plan can be made for from anywhere. What is installed there is not known.
TARGETS: dict[str, Facts] = {
    "sm100": Facts("sm100 (GB200, B200)", sm=100),
    "sm90": Facts("sm90 (H100, H200)", sm=90),
    "cpu": Facts("cpu", sm=0),
}


@dataclass(frozen=True)
class Availability:
    """Whether a switch can be tried on a machine.

    Attributes:
        available: it can.
        reason: why not.
        assumes: needs nobody could check, taken as met.
    """

    available: bool
    reason: str = ""
    assumes: tuple[str, ...] = field(default=())

    @property
    def text(self) -> str:
        """``available``, or ``untestable: <reason>``."""
        return "available" if self.available else f"untestable: {self.reason}"


def availability(switches: Iterable[Switch], facts: Facts) -> dict[str, Availability]:
    """Availability of every switch on a machine, by name; what requires an untestable switch is untestable too."""
    known = {s.name: s for s in switches}
    found: dict[str, Availability] = {}

    def of(name: str, path: tuple[str, ...]) -> Availability:
        if name not in found:
            found[name] = _own(known[name], facts)
            if found[name].available:
                for required in known[name].requires:
                    if required in known and required not in path:
                        below = of(required, (*path, name))
                        if not below.available:
                            found[name] = Availability(False, f"requires {required}, which is untestable")
                            break
        return found[name]

    return {name: of(name, ()) for name in known}


def summary(needs: Iterable[Need]) -> dict[str, list[str]]:
    """Needs by kind, each once, the strongest of those about one thing."""
    every = list(needs)
    gpus = [int(n.minimum or 0) for n in every if n.kind is NeedKind.GPU]
    found: dict[str, list[str]] = {}
    if gpus:
        found["gpu"] = [gpu(str(max(gpus)) if max(gpus) else "").text]
    packages: dict[str, Need] = {}
    for need in every:
        if need.kind is NeedKind.PACKAGE:
            known = packages.get(need.names[0])
            if known is None or (need.minimum and (not known.minimum or _at_least(need.minimum, known.minimum))):
                packages[need.names[0]] = need
    for key, texts in (
        ("packages", [n.text for n in packages.values()]),
        ("fields", [n.text for n in every if n.kind is NeedKind.FIELD]),
        ("functions", [n.text for n in every if n.kind is NeedKind.SYMBOL]),
        ("machine", [n.text for n in every if n.kind is NeedKind.NO_GPU]),
    ):
        if texts:
            found[key] = list(dict.fromkeys(texts))
    return found


def _own(switch: Switch, facts: Facts) -> Availability:
    unmet, assumed = [], []
    for need in switch.needs:
        met, why = _judge(need, facts)
        if met is None:
            assumed.append(need.text)
        elif not met:
            unmet.append(why)
    return Availability(not unmet, "; ".join(unmet), tuple(assumed))


def _judge(need: Need, facts: Facts) -> tuple[bool | None, str]:
    """Whether a need is met (None: not known), and what is there instead."""
    if need.kind is NeedKind.GPU:
        return _judge_gpu(need, facts)
    if need.kind is NeedKind.NO_GPU:
        if facts.sm is None:
            return None, ""
        return facts.sm == 0, "stands in for a kernel on a machine without a GPU"
    if need.kind is NeedKind.PACKAGE:
        return _judge_package(need, facts)
    if need.kind is NeedKind.FIELD:
        if facts.fields is None:
            return (None, "") if not facts.problem else (False, f"megatron-core does not answer: {facts.problem}")
        have = facts.fields.get(need.owner, frozenset())
        return bool(have.intersection(need.names)), f"the installed megatron-core has no {need.text}"
    if facts.symbols is None:
        return (None, "") if not facts.problem else (False, f"megatron-core does not answer: {facts.problem}")
    absent = [name.rpartition(":")[2] for name in need.names if not facts.symbols.get(name, False)]
    return not absent, f"no {', '.join(absent)} in what is installed"


def _judge_gpu(need: Need, facts: Facts) -> tuple[bool | None, str]:
    if facts.sm is None:
        return None, ""
    if facts.sm == 0:
        return False, f"needs {need.text}; there is none"
    return facts.sm >= int(need.minimum or 0), f"needs SM{need.minimum}; {facts.name} has SM{facts.sm}"


def _judge_package(need: Need, facts: Facts) -> tuple[bool | None, str]:
    if facts.packages is None:
        return None, ""
    versions = [v for name in need.names if (v := facts.packages.get(name))]
    if not versions:
        return False, f"{need.names[0]} is not installed"
    if need.minimum and not any(_at_least(v, need.minimum) for v in versions):
        return False, f"needs {need.text}, found {versions[0]}"
    return True, ""


def _at_least(version: str, minimum: str) -> bool:
    try:
        return Version(version) >= Version(minimum)
    except InvalidVersion:
        return False
