"""The report as one JSON document: ``format: "zkl-check"``, version 1."""

from __future__ import annotations

from zkl_debug.schema import Json
from zkl_debug.stack.recipes.fixer import Fix
from zkl_debug.stack.recipes.model import Preset, Report, Severity, Violation
from zkl_debug.stack.recipes.presets import PRESETS, UNSUPPORTED, environment_of, rules_of

FORMAT = "zkl-check"
VERSION = 1


def report_document(report: Report, fix: Fix | None = None) -> dict[str, Json]:
    """The whole report as plain data."""
    preset = PRESETS[report.preset]
    return {
        "format": FORMAT,
        "version": VERSION,
        "verdict": "sound" if report.sound else "violations",
        "zero_expected": report.sound and not report.by_design,
        "recipe": {"path": report.recipe, "files": list(report.files), "missing_files": list(report.missing_files)},
        "mode": "generation-only" if report.generation_only else "recipe",
        "preset": {**_preset(preset), "picked": report.picked, "status_text": report.status},
        "presets": [_preset(p) for p in PRESETS.values()],
        "not_supported": dict(UNSUPPORTED),
        "counts": {
            "rules": report.rules,
            "violations": len(report.violations),
            "fixable": sum(v.fixable for v in report.violations),
        },
        "violations": [violation_document(v) for v in report.violations],
        "not_zero_by_design": [violation_document(v) for v in report.by_design],
        "advice": [violation_document(v) for v in report.advice],
        "unknown_keys": [
            {"key": k.path, "did_you_mean": k.suggestion or None, "file": k.file} for k in report.unknown_keys
        ],
        "unresolved": [{"key": u.path, "text": u.raw, "reason": u.reason} for u in report.unresolved],
        "derived": [
            {"key": d.key, "value": d.value, "text": d.text, "warning": d.warning or None} for d in report.derived
        ],
        "model": report.model,
        "beyond_the_recipe": list(preset.beyond),
        "environment": report.environment,
        "fix": None if fix is None else _fix(fix),
    }


def presets_document() -> dict[str, Json]:
    """Every preset with all its rules, for ``--list``."""
    return {
        "format": "zkl-check-presets",
        "version": VERSION,
        "presets": [
            {
                **_preset(preset),
                "rules": [
                    {
                        "rule": rule.id,
                        "severity": rule.severity.value,
                        "side": rule.side.value,
                        "key": rule.key,
                        "kind": rule.kind.value,
                        "required": rule.required,
                        "why": rule.why,
                        "preset": rule.preset,
                        "source": rule.source,
                        "checked_upstream": rule.upstream,
                        "training_only": rule.training_only,
                        "fixable": rule.fixable,
                    }
                    for rule in rules_of(preset.name)
                ],
                "environment": [
                    {
                        "rule": rule.id,
                        "need": rule.need.value,
                        "names": list(rule.names),
                        "minimum": rule.minimum or None,
                        "why": rule.why,
                        "preset": rule.preset,
                        "source": rule.source,
                        "checked_upstream": rule.upstream,
                    }
                    for rule in environment_of(preset.name)
                ],
            }
            for preset in PRESETS.values()
        ],
        "not_supported": dict(UNSUPPORTED),
    }


def violation_document(v: Violation) -> dict[str, Json]:
    """One finding as plain data."""
    document: dict[str, Json] = {
        "rule": v.rule,
        "key": v.key,
        "found": v.found,
        "state": v.state.value,
        "required": v.required,
        "why": v.why,
        "preset": v.preset,
        "source": v.source,
        "side": v.side.value,
        "checked_upstream": v.upstream,
        "file": v.file or None,
        "hint": v.hint or None,
    }
    if v.severity is Severity.VIOLATION:
        document |= {"fixable": v.fixable, "not_fixable_because": v.not_fixable or None}
    return document


def _preset(preset: Preset) -> dict[str, Json]:
    return {
        "name": preset.name,
        "title": preset.title,
        "source": preset.source,
        "status": preset.status.value,
        "evidence": preset.evidence,
        "builds_on": preset.base or None,
    }


def _fix(fix: Fix) -> dict[str, Json]:
    return {
        "out": fix.out,
        "written": fix.written,
        "verdict": "sound" if fix.after.sound else "violations",
        "changes": [{"key": c.key, "value": c.value, "was": c.was, "rule": c.rule} for c in fix.changes],
        "remaining": [violation_document(v) for v in fix.remaining],
        "yours_to_decide": [violation_document(v) for v in fix.after.advice if not v.fixable],
    }
