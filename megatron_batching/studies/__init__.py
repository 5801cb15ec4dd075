"""Programs that measure this package for its documents; each says at its top how it is run."""
