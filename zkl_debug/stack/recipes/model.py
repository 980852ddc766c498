"""The records of the recipe check: rules and presets are data of these types, findings are results of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from zkl_debug.schema import Json

TRAIN_ROOT = "policy.megatron_cfg"
GENERATION_ROOT = "policy.generation.mcore_generation_config"


class Side(StrEnum):
    """Where a rule looks its key up."""

    RECIPE = "recipe"  # a dotted path from the top of the recipe
    TRAIN = "train"  # relative to policy.megatron_cfg
    GENERATION = "generation"  # the generation config merged over policy.megatron_cfg
    MODEL = "model"  # a fact about the resolved model: mla, experimental_attention, hybrid
    ENVIRONMENT = "environment"  # this machine: packages, GPU, variables


class Kind(StrEnum):
    """What a rule (or a condition of one) asks of the value it finds."""

    EQUALS = "equals"
    EACH_EQUALS = "each-equals"  # the value, or every element of a list of values
    ONE_OF = "one-of"
    NOT_EQUALS = "not-equals"
    MULTIPLE_OF = "multiple-of"
    GREATER = "greater"
    NULL = "null"
    NOT_NULL = "not-null"
    OFF = "off"  # false, null or absent
    CONTAINS = "contains"  # a list with that element
    MATCHES = "matches"  # a regular expression, case ignored
    TEXT = "text"  # an environment variable: equal as text
    IS_TEXT = "is-text"  # an environment variable: written as text, or absent
    AGREE = "agree"  # the same effective value on the training and the generation side
    FAMILY = "family"  # one setting under several names: on under at least one, off under none
    OVERRIDDEN = "overridden"  # the generation config sets the key itself


class Severity(StrEnum):
    """What follows from a rule that does not hold."""

    VIOLATION = "violation"  # the recipe is not sound
    BY_DESIGN = "by-design"  # the run will not be zero, and no kernel is to blame
    ADVICE = "advice"  # worth knowing; does not change the verdict


class Status(StrEnum):
    """How far a preset's promise has been tested."""

    VERIFIED = "verified by a run"
    ENFORCED = "enforced only"
    UNSUPPORTED = "not supported"


class State(StrEnum):
    """In which way a key is there, or is not."""

    ABSENT = "absent"
    NULL = "null"
    VALUE = "value"
    INTERPOLATED = "interpolated"  # written as ${...} and resolved
    UNRESOLVED = "unresolved"  # written as ${...} and not resolvable here
    MISSING = "missing"  # written as ???


@dataclass(frozen=True)
class Key:
    """What is known of a recipe key.

    Args:
        type: ``bool``, ``int``, ``number``, ``str``, ``list``, ``map`` or ``any``.
        default: the effective value when the key is absent.
        origin: who supplies that default; empty where nothing does.
        null_is_default: an explicit null means the same as an absent key (otherwise null is taken literally).
    """

    type: str
    default: Json = None
    origin: str = ""
    null_is_default: bool = True


@dataclass(frozen=True)
class Found:
    """A key as the recipe has it. ``effective`` is what the run would use."""

    path: str
    state: State
    effective: Json = None
    raw: Json = None
    origin: str = ""  # who supplies the effective value of an absent or null key
    file: str = ""  # the file of the defaults chain that sets it
    inherited: bool = False  # a generation value that comes from policy.megatron_cfg
    detail: str = ""  # why it is unresolved, or what a model fact rests on


@dataclass(frozen=True)
class When:
    """A condition under which a rule is in force."""

    side: Side
    key: str
    kind: Kind
    value: Json = None


@dataclass(frozen=True)
class Rule:
    """One requirement. A preset is a tuple of these.

    Args:
        when: all must hold for the rule to be in force.
        unless: if there are any and all hold, the rule is not in force.
        upstream: who else checks this: ``sets`` (NeMo-RL overwrites the key), ``yes``, ``no`` or in words.
        explicit: the key must be written; a default does not count.
        training_only: does not concern a dedicated generation worker.
        fix: the value ``--fix`` writes (None: derived from ``required``).
        not_fixable: why ``--fix`` leaves it alone; empty if it does not.
        required_text: the requirement in words, where the value alone does not say it.
        names: the alternative names of a FAMILY rule, oldest first.
    """

    id: str
    side: Side
    key: str
    kind: Kind
    required: Json
    why: str
    source: str
    preset: str
    severity: Severity = Severity.VIOLATION
    when: tuple[When, ...] = ()
    unless: tuple[When, ...] = ()
    upstream: str = "yes"
    explicit: bool = False
    training_only: bool = False
    fix: Json = None
    not_fixable: str = ""
    required_text: str = ""
    names: tuple[str, ...] = ()

    @property
    def fixable(self) -> bool:
        return not self.not_fixable


class Need(StrEnum):
    """What an environment rule asks of the machine."""

    VERSION = "version"  # a package of at least this version
    PRESENT = "present"  # a package of any version
    SAME_VERSION = "same-version"  # two packages of one version
    FIELDS = "fields"  # all of these fields in TransformerConfig
    ANY_FIELD = "any-field"  # at least one of these fields in TransformerConfig
    SM = "sm"  # every GPU of at least this compute capability


@dataclass(frozen=True)
class EnvRule:
    """A requirement on the machine: ``names`` are distribution names (alternatives) or config fields."""

    id: str
    need: Need
    names: tuple[str, ...]
    why: str
    source: str
    preset: str
    minimum: str = ""
    upstream: str = "yes"


@dataclass(frozen=True)
class Preset:
    """A named set of rules. ``base`` rules are inherited, except the ids in ``replaces``."""

    name: str
    title: str
    source: str
    status: Status
    evidence: str
    rules: tuple[Rule, ...]
    environment: tuple[EnvRule, ...]
    base: str = ""
    replaces: tuple[str, ...] = ()
    verified_model: str = ""  # regular expression on policy.model_name
    beyond: tuple[str, ...] = ()  # what no recipe can show


@dataclass(frozen=True)
class Pick:
    """A step of the choice of a preset from a recipe: the first whose conditions all hold decides."""

    preset: str
    when: tuple[When, ...]
    reason: str


@dataclass(frozen=True)
class Violation:
    """A rule that does not hold, with what was found."""

    rule: str
    severity: Severity
    key: str
    found: str
    required: str
    why: str
    preset: str
    source: str
    upstream: str
    side: Side
    fixable: bool
    not_fixable: str = ""
    hint: str = ""
    state: State = State.VALUE
    file: str = ""


@dataclass(frozen=True)
class UnknownKey:
    """A key that no rule and no public recipe knows."""

    path: str
    suggestion: str
    file: str


@dataclass(frozen=True)
class Unresolved:
    """An interpolation that has no value here."""

    path: str
    raw: str
    reason: str


@dataclass(frozen=True)
class Derived:
    """A value the run computes when the recipe leaves it open, and how."""

    key: str
    value: int | None
    text: str
    warning: str = ""


@dataclass(frozen=True)
class Report:
    """Everything one check found."""

    recipe: str
    files: tuple[str, ...]  # base first
    missing_files: tuple[str, ...]
    preset: str
    picked: str
    status: str
    generation_only: bool
    rules: int
    violations: tuple[Violation, ...]
    by_design: tuple[Violation, ...]
    advice: tuple[Violation, ...]
    unknown_keys: tuple[UnknownKey, ...]
    unresolved: tuple[Unresolved, ...]
    derived: tuple[Derived, ...]
    model: dict[str, Json] = field(default_factory=dict)
    environment: dict[str, Json] | None = None

    @property
    def sound(self) -> bool:
        return not self.violations and not self.missing_files
