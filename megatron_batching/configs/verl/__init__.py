"""A recipe and the settings for verl; a package, so that Hydra finds them by its name."""
