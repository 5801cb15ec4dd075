"""For trainers that are written elsewhere: backends, and plans in the trainers' own formats.

A backend imports its trainer, and nobody else does; the formats need none.
"""
