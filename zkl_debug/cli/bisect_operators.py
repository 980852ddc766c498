"""``zkl-debug bisect operators``: every operator that diverges on its own, in one teacher-forced pass."""

from __future__ import annotations

from typing import Any

import click

from zkl_debug.cli.bedopts import bed_options, make_options
from zkl_debug.cli.common import emit_json, stderr, stdout
from zkl_debug.cli.farm import away, ray_choice
from zkl_debug.errors import ExitCode


@click.command("operators", short_help="All operators that diverge on their own, not only the first.")
@click.option("--bed", required=True, help="Workload to run (see `zkl-debug beds`).")
@bed_options
@click.option("--attribution", is_flag=True, help="Also: how much of the log-prob gap each of them accounts for.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@ray_choice
def command(bed: str, attribution: bool, as_json: bool, ray: str | None, **values: Any) -> int:
    """Feed scoring's value into generation at every operator and list those that still differ.

    Exit code: 0 no operator differs, 1 some do, 3 a side does not repeat, or nothing could be compared.
    """
    from zkl_debug.beds.operators import scan_operators

    options = make_options(bed, values, ("gen", "train"))
    if ray is not None:
        return away(ray, gpus=int(options.on_gpu))
    with stderr().status("starting") as status:
        scan = scan_operators(options, lambda text: status.update(text), attribution=attribution)
    if as_json:
        emit_json({"format": "zkl-operators", "version": 1, "bed": bed, **scan.to_json()})
    else:
        _print(scan)
    return int(ExitCode.DIVERGED if scan.operators else ExitCode.OK)


def _print(scan: Any) -> None:
    console = stdout()
    console.print(f"{scan.sites} sites, {scan.rows} rows compared, each operator on scoring's inputs")
    if not scan.operators:
        console.print("[green]no operator differs[/]")
    for o in scan.operators:
        note = "" if o.inputs_equal else "  (an input could not be made equal: may be inherited)"
        where = f"first at sample {o.sample} position {o.position}"
        console.print(f"  [bold]{o.site}[/]  {o.rows} of {o.of} rows, {where}{note}")
    if scan.attribution is not None:
        _print_attribution(scan.attribution)
    for title, names in (("not comparable", scan.unmatched), ("seen as copies, not replaced", scan.not_forced)):
        if names:
            console.print(f"{title}: {', '.join(names[:6])}{' ...' if len(names) > 6 else ''}")


def _print_attribution(found: Any) -> None:
    console = stdout()
    gap = found.gap
    console.print(f"log-probs: {gap.rows} rows, mean gap {gap.mean_abs:.3g} nats, largest {gap.max_abs:.3g}")
    for share in found.shares:
        console.print(f"  {_percent(share.share):>7} of it  {share.site}  (put right alone: {_alone(share.alone)})")
    if found.unexplained:
        where = f"first {found.still[0]}" if found.still else "at no site that was seen"
        rest = f"{_percent(found.unexplained)} of it is not explained by them: what still differs, {where}"
        console.print(f"  [yellow]{rest}[/]")
    else:
        console.print("  all of them put right: nothing remains")
    if found.left_out:
        console.print(f"  not tried: {len(found.left_out)} more, from {found.left_out[0]}")


def _percent(share: float) -> str:
    """A share as text; one too small for its digits is not called zero."""
    return f"{share:.1%}" if share == 0.0 or abs(share) >= 0.0005 else "<0.1%"


def _alone(part: float) -> str:
    return f"{_percent(-part)} more" if part < 0 else f"{_percent(part)} goes away"
