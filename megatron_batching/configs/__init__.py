"""The configs that come with the package: what commands read when told nothing else.

They are installed with it, so that a name such as `demo` works in every folder, and the command
`config` prints one to start from. A file of the user's is given by its path; only a bare name that
is known here is taken for one of these.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent


def config_names() -> list[str]:
    """Names of the shipped configs.

    >>> config_names()
    ['bench', 'bench_gpt', 'demo', 'verl/grpo_megatron', 'verl/megatron_batching']
    """
    return sorted(
        path.relative_to(_FOLDER).with_suffix("").as_posix() for path in _FOLDER.rglob("*.yaml")
    )


def find_config(name: str | Path) -> Path:
    """The file of a shipped config; of anything else, the path itself.

    >>> find_config("demo").name, find_config("./demo").name
    ('demo.yaml', 'demo')
    """
    return _FOLDER / f"{name}.yaml" if str(name) in config_names() else Path(name)
