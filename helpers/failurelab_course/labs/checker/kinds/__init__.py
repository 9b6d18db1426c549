"""One module for each kind of lab: how it is run and what is measured."""
