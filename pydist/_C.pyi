"""The types of the extension module; tests/test_package.py holds this file against it."""
