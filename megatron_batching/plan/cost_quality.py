"""Whether a cost file may be trusted: what `calibrate` found out about it, in one line.

`calibrate` predicts and measures mini-batches that took no part in the fit, and leaves the errors
in its file. What is large: choosing the right number of micro-batches shortens steps by 7 to 8% on
two of the three length traces that the planner was tuned on. A model that misses whole steps by
`LARGE_ERROR` or more cannot tell such plans apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from megatron_batching.plan.cost_files import read_yaml
from megatron_batching.plan.layout import Layout
from megatron_batching.schedules.files import entries, entry, one_line

LARGE_ERROR = 0.1  # of a step's time, median over held-out mini-batches


def held_out_warning(errors: Sequence[float]) -> str | None:
    """What there is to say against a fit with these relative errors of held-out steps, if anything.

    >>> held_out_warning([0.02, -0.04])
    >>> held_out_warning([0.02, -0.3, -0.2])
    'its fit missed 3 held-out mini-batches by 20% (median; the worst by 30%), and plans differ by \
less: calibrate again on a quieter machine, or with more repeats and larger micro-batches'
    """
    sizes = [abs(error) for error in errors]
    if not sizes or statistics.median(sizes) < LARGE_ERROR:
        return None
    return (
        f"its fit missed {len(sizes)} held-out mini-batches by {statistics.median(sizes):.0%} "
        f"(median; the worst by {max(sizes):.0%}), and plans differ by less: calibrate again on a "
        "quieter machine, or with more repeats and larger micro-batches"
    )


def cost_warning(source: str | None, layout: Layout | None = None) -> str | None:
    """What speaks against planning with `--cost source`, in one line; None if nothing does.

    Args:
        source: as `load_cost_model` takes it; only YAML files say how good they are.
        layout: where given, tp and cp are compared with those that the file was measured with.

    Raises:
        ValueError: the file cannot be read, or its `calibration` section is malformed.
    """
    if source is None or not source.endswith((".yaml", ".yml")):
        return None
    values = read_yaml(source)
    if not isinstance(values, dict) or "calibration" not in values:
        return None
    try:
        about = entry(values, "calibration", dict)
        errors = entries({"held_out_errors": [], **about}, "held_out_errors", float)
        measured = entry({"layout": {}, **about}, "layout", dict)
        found = (
            [
                f"it was measured with {name} {entry(measured, name, int)}, this layout has {own}"
                for name, own in (("tp", layout.tp), ("cp", layout.cp))
                if name in measured and entry(measured, name, int) != own
            ]
            if layout
            else []
        )
    except ValueError as error:
        raise ValueError(f"cost file {source!r}, calibration: {one_line(error)}") from None
    found += [text] if (text := held_out_warning(errors)) else []
    return f"cost file {source!r}: {'; '.join(found)}" if found else None
