"""Notebooks run by papermill, each by a kernel of its own, and the reader's copies of them."""
