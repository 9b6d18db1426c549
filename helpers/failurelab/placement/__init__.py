"""Where a model's tensors lie, where they should, and how to load them there."""

from failurelab.placement.report import KINDS, Placed, PlacementReport, check, local_device_map

__all__ = ["KINDS", "Placed", "PlacementReport", "check", "local_device_map"]
