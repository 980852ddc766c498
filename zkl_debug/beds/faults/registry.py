"""What a fault is, and the list of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from zkl_debug.errors import UsageError

if TYPE_CHECKING:
    from zkl_debug.beds.bed import BedOptions
    from zkl_debug.beds.run import BedContext

Break = Callable[["BedContext"], AbstractContextManager[None]]


@dataclass(frozen=True)
class Answer:
    """What a diagnosis of the fault must say.

    Attributes:
        sites: glob patterns; the first differing site must match one of them. Empty: no site is to be blamed.
        edge: ``score-prefill``, ``prefill-decode``, ``within-a`` ... with A = train and B = gen; alternatives are
            separated by ``|``; empty when nothing is compared or differs.
        kind: ``own``, ``uncaptured-state`` ..., alternatives separated by ``|``; or empty.
        rule: what the affected rows have in common, in words.
        explanation: the closed form or mechanism, in words.
        verdict: ``diverged``, ``identical`` or ``refused``.
        rule_says: regular expressions, one of which the rule (its first wording) must match; empty: any, or none.
        names: names, one of which the first explanation must have; for a refusal its code. Empty: nothing to explain.
        says: regular expressions that the text of that explanation, or of the refusal, must match.
    """

    sites: tuple[str, ...] = ()
    edge: str = ""
    kind: str = ""
    rule: str = ""
    explanation: str = ""
    verdict: str = "diverged"
    rule_says: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    says: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fault:
    """A defect to put into a bed, with the stack on.

    Attributes:
        id: as in the catalogue.
        title: one line.
        source: where it happened to somebody.
        beds, dtypes: where it applies.
        sides: the sides it is on.
        breaks: context manager factory; the defect is there inside.
        answer: the known right answer.
        options: fields of the bed's options it needs.
        model: fields of the model spec it needs.
    """

    id: str
    title: str
    source: str
    beds: tuple[str, ...]
    dtypes: tuple[str, ...]
    sides: tuple[str, ...]
    breaks: Break
    answer: Answer
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    def side(self, name: str, context: BedContext) -> AbstractContextManager[None]:
        """The defect round the work of one side, or nothing where it is not on that side."""
        return self.breaks(context) if name in self.sides else nullcontext()

    def adjust(self, options: BedOptions) -> BedOptions:
        """``options`` with the fields this fault needs.

        Raises:
            UsageError: one of them was asked to be something else: the run would not be the one asked for.
        """
        usual = type(options)()
        fields = dict(self.options)
        for name, wanted in fields.items():
            asked = getattr(options, name)
            if isinstance(wanted, dict) and name == "switches":
                fields[name] = {**asked, **wanted}
                asked, wanted = {key: asked.get(key, value) for key, value in wanted.items()}, dict(wanted)
            if asked not in (wanted, getattr(usual, name)):
                raise UsageError(
                    f"fault {self.id} with {name} {_told(asked)}",
                    f"{name} {_told(wanted)}, which the fault brings along by itself",
                    f"leave it out, or another fault: zkl-debug beds {options.bed}",
                )
        return replace(options, **fields) if fields else options


def _told(value: Any) -> str:
    """``tp 4, dp 2`` of a mapping, any other value as it is."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {each}" for key, each in value.items()) or "of one rank"
    return str(value)


FAULTS: dict[str, Fault] = {}


def register(*faults: Fault) -> None:
    """Add to :data:`FAULTS`."""
    for f in faults:
        assert f.id not in FAULTS, f.id
        FAULTS[f.id] = f


def no_fault(name: str) -> UsageError:
    """The error for an id that no fault of the beds has; one of the loop is sent where it belongs."""
    from zkl_debug.beds.grpo.faults_loop import LOOP_FAULTS

    if name in LOOP_FAULTS:
        return UsageError(
            f"{name} is a fault of the training loop, not of one capture",
            f"one of {', '.join(FAULTS)}",
            f"zkl-debug bisect steps --fault {name}, or zkl-debug bench faults --loop",
        )
    return UsageError(f"no fault {name!r}", f"one of {', '.join(FAULTS)}", "zkl-debug beds")


def fault(name: str | None, bed: str, dtype: str) -> Fault:
    """The fault of that id (None: nothing broken), checked against where it applies.

    Raises:
        UsageError: no such fault, or not for this bed or dtype.
    """
    found = FAULTS.get(name or "Z0")
    if found is None:
        raise no_fault(str(name))
    if found.id == "Z0":  # nothing broken: anywhere
        return found
    if bed not in found.beds or dtype not in found.dtypes:
        where = f"beds {', '.join(found.beds)}, dtypes {', '.join(found.dtypes)}"
        raise UsageError(f"fault {found.id} in bed {bed}, {dtype}", where)
    return found


BOTH_BEDS = ("tiny-gpt", "tiny-moe")
BOTH_DTYPES = ("fp32", "bf16")

register(
    Fault(
        "Z0",
        "nothing is broken",
        "",
        (*BOTH_BEDS, "tiny-hybrid", "tiny-tied", "tiny-window", "tiny-yarn", "tiny-mtp"),
        BOTH_DTYPES,
        (),
        lambda _context: nullcontext(),
        Answer(verdict="identical"),
    )
)
