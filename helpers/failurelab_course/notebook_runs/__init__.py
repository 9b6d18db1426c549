"""Notebooks run by papermill, each in a process of its own, and the reader's copies of them."""
