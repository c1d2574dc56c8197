"""What a planner expected of its rounds, what they were, and why it changed its mind."""

from collections.abc import Mapping
from typing import Any

SHOWN = 12  # newest changes of shape


def lines(report: Mapping[str, Any]) -> list[str]:
    """`Planner.report` in words.

    Args:
        report: what `Engine.pilot.report()` returns.
    """
    found = [
        f"planner: {report['rounds']} rounds, now {shape(report['shape'])}",
        f"  time of a round: off by {report['time_error_median']:.1%} in the median",
        f"  tokens of a round: off by {report['tokens_error_median']:.1%} in the median, "
        f"{report['tokens_bias']:+.1%} in all",
        "  calibration error of acceptance: "
        + (
            ", ".join(f"{kind} {error:.3f}" for kind, error in report["calibration_error"].items()) or "nothing drafted"
        ),
        "  rounds by reason: " + ", ".join(f"{reason} {count}" for reason, count in sorted(report["reasons"].items())),
        "  " + cost(report),
    ]
    for kind, table in report["scores"].items():
        pairs = [f"{e['said']:.2f} -> {e['accepted']:.2f} ({e['drafts']:.0f})" for e in table]
        if pairs:
            found.append(f"  {kind} said and was right (drafts): {', '.join(pairs)}")
    switches = report["switches"]
    if len(switches) > SHOWN:
        found.append(f"  {len(switches)} changes of shape, the newest {SHOWN}:")
    found += [
        f"  round {one['round']}: {shape(one['from'])} -> {shape(one['to'])} ({one['reason']})"
        for one in switches[-SHOWN:]
    ]
    return found


def cost(report: Mapping[str, Any]) -> str:
    """What the planner itself has cost, as shares of the time of all rounds.

    The host learns and decides while the device works, so that its part is an upper bound.
    """
    whole = max(report["seconds"], 1e-9)
    stages = ", ".join(f"{stage} {spent / whole:.2%}" for stage, spent in report["host_s"].items())
    return (
        f"cost of planning: host {sum(report['host_s'].values()) / whole:.2%} of the time of rounds ({stages}), "
        f"trials and shadow drafts {report['exploration_s'] / whole:.2%} (expected)"
    )


def shape(fields: Mapping[str, Any]) -> str:
    """A draft shape in short: `none`, `ngram x5`, `eagle3 5x4, 16 rows`."""
    if not fields["depth"]:
        return "plain"
    if fields["branching"] == 1:
        return f"{fields['kind']} x{fields['depth']}"
    return f"{fields['kind']} {fields['depth']}x{fields['branching']}, {fields['rows']} rows"
