"""What a trainer calls: the engine contract, its registry, and the engines behind it."""
