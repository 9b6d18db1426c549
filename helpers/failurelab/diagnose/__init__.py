"""From what a run left behind to ranked causes, the evidence for each, and the probe that decides: `diagnose`."""
