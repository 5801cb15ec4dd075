"""`python -m megatron_batching`."""

from megatron_batching.cli import main

if __name__ == "__main__":
    main()
