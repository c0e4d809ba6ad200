"""Owns pydist's version: pyproject.toml and `pydist.__version__` read it from here."""

__version__ = "0.1.0"
