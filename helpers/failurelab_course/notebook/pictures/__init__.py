"""Drawings of a mechanism, from figures that a notebook measured: one module for each."""
