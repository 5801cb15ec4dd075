"""Backends for trainers that are written elsewhere; each imports its trainer, and nobody else."""
