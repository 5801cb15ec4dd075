"""`python -m megatron_batching`, and the command `megatron-batching`."""

from megatron_batching.program import end_on_interrupt


def main() -> None:
    """Run the command line as a program of its own."""
    end_on_interrupt()
    from megatron_batching.cli import main as command_line  # takes long

    command_line()


if __name__ == "__main__":
    main()
