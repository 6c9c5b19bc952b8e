"""Times taken on this machine's device. Needs torch."""
