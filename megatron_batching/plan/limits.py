"""What is too large to be planned, refused before any work.

Planning simulates every op of every candidate: its time grows with the samples of a replica and
with the square of the virtual stages that each of them passes. The limits lie where one core needs
a minute or two, several times beyond what runs on real clusters; a number with a few digits too
many ends at once, with its reason, and not in hours of silence.
"""

from __future__ import annotations

from megatron_batching.plan.layout import MOST_COUNT, Layout
from megatron_batching.plan.options import BatchingOptions

MOST_SAMPLES = 2**20  # of a mini-batch
MOST_ON_A_REPLICA = 2**18  # samples, or micro-batches that are asked for
MOST_REPLICAS = 2**16
MOST_STAGES = 512  # each holds a layer or more
MOST_WORK = 2**26  # samples of a replica x stages^2


def check_size(num_samples: int, layout: Layout, options: BatchingOptions) -> None:
    """Raise ValueError where a plan of so many samples would take hours.

    >>> check_size(64, Layout(pp=100_000), BatchingOptions(micro_batch_size=1))
    Traceback (most recent call last):
    ...
    ValueError: pp=100000 makes 100,000 virtual stages: at most 512 can be planned for, each of \
them a layer or more; lower pp or vpp
    """
    if num_samples > MOST_SAMPLES:
        raise ValueError(
            f"the mini-batch has {num_samples:,} samples: at most {MOST_SAMPLES:,} can be planned "
            "at once; cut it into several"
        )
    stages = layout.num_virtual_stages
    sizes = f"pp={layout.pp}" + (f", vpp={layout.vpp}" if layout.vpp > 1 else "")
    if stages > MOST_STAGES:
        raise ValueError(
            f"{sizes} makes {stages:,} virtual stages: at most {MOST_STAGES} can be planned for, "
            "each of them a layer or more; lower pp or vpp"
        )
    if layout.dp > MOST_REPLICAS:
        raise ValueError(
            f"dp={layout.dp} is over the {MOST_REPLICAS:,} replicas that can be planned for: lower "
            "dp"
        )
    if options.alignment(layout) > MOST_COUNT:
        raise ValueError(
            f"align={options.align} with cp={layout.cp} pads samples to a multiple of "
            f"{options.alignment(layout)}: at most 2^40; lower them"
        )
    asked = {"group": layout.group, "min_num_micro_batches": options.min_num_micro_batches}
    for name, count in asked.items():
        if count is not None and count > MOST_ON_A_REPLICA:
            raise ValueError(
                f"{name}={count} asks for more than {MOST_ON_A_REPLICA:,} micro-batches on a "
                "replica: lower it"
            )
    most = min(MOST_ON_A_REPLICA, MOST_WORK // stages**2)
    on_one = max(-(-num_samples // layout.dp), *(count or 0 for count in asked.values()))
    if on_one > most:
        raise ValueError(
            f"{sizes} with {on_one:,} samples or micro-batches on a replica is too much to plan: "
            f"with {stages} virtual stages at most {most:,}; cut the mini-batch into several, or "
            "raise dp"
        )
