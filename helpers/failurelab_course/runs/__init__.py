"""Notebooks run by papermill, benchmarks, and the authors' lint."""
