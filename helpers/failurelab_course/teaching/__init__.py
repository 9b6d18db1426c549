"""For a teacher: slides, and a class on one server."""
