"""The judges: one module each, in the order of `order`."""
