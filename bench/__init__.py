"""Comparisons with other software, each in one run on one machine. Not part of the package."""
