"""Frameworks that run on the engines."""
