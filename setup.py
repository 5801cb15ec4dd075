"""Package definition of megatron-batching.

`schedules/` lies beside `megatron_batching/` because it stands alone on numpy; it is
installed as `megatron_batching.schedules`, so that no bare `schedules` package reaches
anyone's site-packages.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (ROOT / "megatron_batching" / "version.py").read_text(), re.M
).group(1)

EXTRAS = {
    "viz": ["matplotlib>=3.8", "plotly>=5.20"],
    "tensorboard": ["tensorboard>=2.12"],
    "verl": ["verl==0.9.1", "tensordict", "mbridge", "einops"],
    "hf": ["mbridge>=0.15", "transformers", "safetensors"],
    "te": ["transformer-engine[pytorch]"],
    "docs": ["mkdocs-material>=9.5", "mkdocstrings[python]>=0.26"],
    "dev": ["pytest>=8", "hypothesis>=6.100", "psutil", "ruff>=0.6", "mypy>=1.10", "py-spy"],
}

setup(
    name="megatron-batching",
    version=VERSION,
    description="Plans and runs variable-length micro-batches on Megatron-Core pipelines.",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[
        *find_packages(include=["megatron_batching", "megatron_batching.*"]),
        "megatron_batching.schedules",
    ],
    package_dir={"megatron_batching.schedules": "schedules"},
    package_data={
        "megatron_batching": [
            "py.typed",
            "__init__.pyi",
            "*/__init__.pyi",
            "configs/*.yaml",
            "configs/verl/*.yaml",
        ],
        "megatron_batching.schedules": ["py.typed"],
    },
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.16",
        "numpy",
        "lazy_loader>=0.4",
        "omegaconf>=2.3",
        "typer>=0.12",
        "rich>=13",
    ],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["megatron-batching = megatron_batching.__main__:main"],
        "verl.plugins": ["megatron_batching = megatron_batching.integrations.verl_plugin"],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
