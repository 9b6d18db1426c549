"""From what a run left behind to the cause that it proves, or to the look that decides: `diagnose`."""
