"""All that touches Megatron-Core. Nothing is imported here: it takes seconds."""
