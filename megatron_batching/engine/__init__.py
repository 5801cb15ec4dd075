"""The engines: contract, registry, settings, the Megatron pipeline and its FSDP reference."""
