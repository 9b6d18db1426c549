"""For a teacher: slides made of the notebooks."""
